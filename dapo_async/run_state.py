"""What a checkpoint holds of the driver, beside the learner's tensors: plain values and frames.

Payloads of live groups aren't kept: every draw that was live, complete or not, is issued again
after a resume, as the same draw with a later attempt. So no prompt is skipped or trained twice, and
a checkpoint stays small; what it costs is generating up to `replay.depth` steps' worth of groups
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo_async.codec import MalformedFrame, decode, decode_any, encode
from dapo_async.errors import CheckpointError
from dapo_async.types import Draw, DrawId, EvalReport, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDraw:
    """A draw to issue again."""

    draw: Draw
    attempt: int
    """The last one that was started."""
    oldest: int
    """The oldest version that its tokens might have had."""


def pack_draw(live: LiveDraw) -> dict[str, Any]:
    """Without the prompt's text and tokens, which the data set has."""
    stub = Prompt(row_id=live.draw.prompt.row_id, text="", token_ids=(), answer="")
    frame = encode(replace(live.draw, prompt=stub))
    return {"draw": frame, "attempt": live.attempt, "oldest": live.oldest}


def unpack_draw(
    packed: Mapping[str, Any], run: str, timeline: int, prompt_of: Callable[[str], Prompt]
) -> LiveDraw:
    """As it was, but of the given run and timeline."""
    draw = decode(packed["draw"], Draw)
    draw_id = DrawId(run, draw.draw_id.epoch, draw.draw_id.position, timeline)
    draw = replace(draw, draw_id=draw_id, prompt=prompt_of(draw.prompt.row_id))
    return LiveDraw(draw=draw, attempt=int(packed["attempt"]), oldest=int(packed["oldest"]))


def pack_reports(reports: Sequence[EvalReport]) -> list[bytes]:
    """Without their samples."""
    return [encode(replace(report, samples=())) for report in reports]


def unpack_reports(frames: Sequence[bytes]) -> list[EvalReport]:
    return [decode(frame, EvalReport) for frame in frames]


def to_bytes(state: Mapping[str, Any]) -> bytes:
    return encode(state)


def from_bytes(data: bytes, where: object) -> Mapping[str, Any]:
    """
    Raises:
        CheckpointError: it isn't a state.
    """
    try:
        return decode_any(data, expected="Mapping")
    except MalformedFrame as error:
        raise CheckpointError(f"{where} is malformed: {error}") from error
