"""Data sets to prompts, and the order in which prompts are drawn.

`load_prompts` reads, checks, renders and tokenises a file once, before anything else starts.
`PromptSource` deals the prompts out for ever; it is a pure state machine with a resumable cursor.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from dapo_async.chat import Message, Renderer, RenderError, Tokenizer
from dapo_async.config import DataConfig
from dapo_async.datafiles import Row, column_of, read_rows
from dapo_async.errors import CheckpointError, ConfigError
from dapo_async.types import Prompt

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPrompts:
    """A data file as prompts, and what became of its rows: read = kept + dropped."""

    prompts: tuple[Prompt, ...]
    read: int
    dropped: tuple[str, ...]
    """Row ids left out because their prompt is longer than `data.max_prompt_tokens`."""
    longest: int
    """Tokens of the longest kept prompt."""
    max_token_id: int
    """The highest id in any prompt: it must be below the model's vocabulary size."""


def load_prompts(
    path: str | Path,
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
) -> LoadedPrompts:
    """Read a JSONL or Parquet file into prompts.

    A row is named `<file stem>:<its id column, else its number>`; columns other than prompt and
    answer go to `Prompt.extra`. Lengths are those of the whole prompt, template included.

    Args:
        path: the file.
        data: which columns, how they are rendered, how long a prompt may be.
        tokenizer: a Hugging Face fast tokenizer.
        limit: keep only the first prompts.

    Raises:
        ConfigError: unreadable file, missing or mistyped column, an answer that
            `data.answer_pattern` doesn't match, repeated ids, an over-long prompt under
            `overlong_prompts: error`, or no prompt left; path, row and column are named.
    """
    reader = _Reader(Path(path), data, tokenizer)
    prompts: list[Prompt] = []
    dropped: list[str] = []
    for row in read_rows(path, (data.prompt_key, data.answer_key)):
        prompt = reader.prompt(row)
        tokens = len(prompt.token_ids)
        if tokens > data.max_prompt_tokens:
            if data.overlong_prompts == "error":
                raise ConfigError(
                    f"{row.where} ({prompt.row_id}): column `{data.prompt_key}`: {tokens} tokens "
                    f"with its template, over `data.max_prompt_tokens: {data.max_prompt_tokens}`"
                )
            dropped.append(prompt.row_id)
            continue
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    read = len(prompts) + len(dropped)
    if not prompts:
        raise ConfigError(
            f"data file {path}: no prompt to use: {read} rows read, {len(dropped)} dropped as "
            f"longer than `data.max_prompt_tokens: {data.max_prompt_tokens}`, 0 kept"
        )
    return LoadedPrompts(
        prompts=tuple(prompts),
        read=read,
        dropped=tuple(dropped),
        longest=max(len(prompt.token_ids) for prompt in prompts),
        max_token_id=max(max(prompt.token_ids) for prompt in prompts),
    )


class _Reader:
    """Turns rows into prompts; every error names path, row and column."""

    def __init__(self, path: Path, data: DataConfig, tokenizer: Tokenizer) -> None:
        self._stem = path.stem
        self._data = data
        self._seen: dict[str, Row] = {}
        self._has_ids: bool | None = None
        try:
            self._renderer = Renderer(tokenizer, chat=data.chat_template)
        except RenderError as error:
            raise ConfigError(f"`data.chat_template: {data.chat_template}`: {error}") from None
        self._pattern: re.Pattern[str] | None = None
        if data.answer_pattern is not None:
            where = f"`data.answer_pattern: {data.answer_pattern}`"
            try:
                self._pattern = re.compile(data.answer_pattern)
            except re.error as error:
                raise ConfigError(f"{where} is not a regular expression: {error}") from None
            if self._pattern.groups < 1:
                raise ConfigError(f"{where} needs a group (…) around the ground truth")

    def prompt(self, row: Row) -> Prompt:
        row_id = self._row_id(row)
        content = column_of(row.values, self._data.prompt_key)
        try:
            if self._data.chat_template:
                text, token_ids = self._renderer.chat(self._messages(row, content))
            else:
                text, token_ids = self._renderer.text(self._plain_text(row, content))
        except RenderError as error:
            raise self._error(row, self._data.prompt_key, str(error)) from None
        if not token_ids:
            raise self._error(row, self._data.prompt_key, "the prompt has no token")
        used = (self._data.prompt_key, self._data.answer_key)
        extra = {key: value for key, value in row.values.items() if key not in used}
        return Prompt(
            row_id=row_id, text=text, token_ids=token_ids, answer=self._answer(row), extra=extra
        )

    def _row_id(self, row: Row) -> str:
        has_id = row.values.get("id") is not None
        if self._has_ids is None:
            self._has_ids = has_id
        if has_id != self._has_ids:
            raise self._error(row, "id", "some rows have an id and some have none")
        if not has_id:
            return f"{self._stem}:{row.number}"
        value = row.values["id"]
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise self._error(row, "id", f"must be text or an integer, not {value!r}")
        row_id = f"{self._stem}:{value}"
        earlier = self._seen.setdefault(row_id, row)
        if earlier is not row:
            raise self._error(row, "id", f"{value!r} is also the id of {earlier.where}")
        return row_id

    def _plain_text(self, row: Row, content: object) -> str:
        if isinstance(content, list):
            raise self._error(
                row, self._data.prompt_key, "a list of messages needs `data.chat_template: true`"
            )
        if not isinstance(content, str) or not content:
            raise self._error(row, self._data.prompt_key, f"must be text, not {_short(content)}")
        return content + self._data.prompt_suffix

    def _messages(self, row: Row, content: object) -> list[Message]:
        messages: list[Message] = []
        if self._data.system_prompt is not None:
            messages.append({"role": "system", "content": self._data.system_prompt})
        if not isinstance(content, list):
            return [*messages, {"role": "user", "content": self._plain_text(row, content)}]
        given = [self._message(row, item) for item in cast(list[Any], content)]
        if self._data.prompt_suffix:
            raise self._error(
                row, self._data.prompt_key, "`data.prompt_suffix` is for text, not for messages"
            )
        if messages and any(message["role"] == "system" for message in given):
            raise self._error(
                row, self._data.prompt_key, "has a system message besides `data.system_prompt`"
            )
        if not given or given[-1]["role"] == "assistant":
            raise self._error(row, self._data.prompt_key, "the last message must be one to answer")
        return messages + given

    def _message(self, row: Row, item: object) -> Message:
        shown = _short(item)
        if isinstance(item, dict):
            fields = cast(dict[str, Any], item)
            given = {key: value for key, value in fields.items() if value is not None}
            if (
                set(given) == {"role", "content"}
                and given["role"] in ROLES
                and isinstance(given["content"], str)
            ):
                return given
        raise self._error(
            row,
            self._data.prompt_key,
            f"a message must be {{role: {' | '.join(ROLES)}, content: text}}, not {shown}",
        )

    def _answer(self, row: Row) -> str:
        value = column_of(row.values, self._data.answer_key)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise self._error(
                row, self._data.answer_key, f"must be text or a number, not {_short(value)}"
            )
        answer = str(value)
        if self._pattern is None:
            return answer
        found = self._pattern.search(answer)
        if found is None or found[1] is None:
            raise self._error(
                row,
                self._data.answer_key,
                f"`data.answer_pattern: {self._data.answer_pattern}` finds nothing in "
                f"{_short(answer)}",
            )
        return found[1].strip()

    @staticmethod
    def _error(row: Row, column: str, problem: str) -> ConfigError:
        return ConfigError(f"{row.where}: column `{column}`: {problem}")


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- drawing -----------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """One draw. Later draws are greater in (epoch, position)."""

    epoch: int
    position: int
    """Running number of the draw within the run; never used twice."""
    prompt: Prompt


class PromptSource:
    """Deals prompts out for ever, epoch after epoch, each in an order of its own.

    Order e is a permutation by NumPy's PCG64 seeded with (seed, e), so it needs no stored random
    state. Prompts that were put back come first, in the order they were put back. No clock, no
    file, no thread: equal calls give equal draws.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        """Raises ConfigError: no prompts, or two with one row id."""
        self._prompts = tuple(prompts)
        self._by_id = {prompt.row_id: prompt for prompt in self._prompts}
        if not self._prompts:
            raise ConfigError("there is no prompt to draw from: 0 rows")
        if len(self._by_id) < len(self._prompts):
            raise ConfigError("two prompts have the same row id")
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._offset = 0
        self._position = 0
        self._returned: deque[Prompt] = deque()
        self._quarantined: set[str] = set()
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def quarantined(self) -> frozenset[str]:
        return frozenset(self._quarantined)

    def draw(self) -> Drawn:
        """The next prompt.

        Raises:
            ConfigError: every row is quarantined.
        """
        prompt = self._next()
        position = self._position
        self._position += 1
        return Drawn(self._epoch, position, prompt)

    def prompt(self, row_id: str) -> Prompt:
        """The row of this id. Unknown ids: KeyError."""
        return self._by_id[row_id]

    def put_back(self, prompt: Prompt) -> None:
        """Draw this prompt again before any other, under a new position."""
        self._returned.append(self._by_id[prompt.row_id])

    def quarantine(self, row_id: str) -> None:
        """Never draw this row again (it breaks whatever touches it). Unknown ids: KeyError."""
        self._quarantined.add(self._by_id[row_id].row_id)

    def state(self) -> dict[str, Any]:
        """The cursor as plain values, for a checkpoint."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "position": self._position,
            "returned": [prompt.row_id for prompt in self._returned],
            "quarantined": sorted(self._quarantined),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor taken by `state`; nothing changes if it is refused.

        Raises:
            ConfigError: the cursor belongs to another seed or another `shuffle`.
            CheckpointError: the cursor is malformed, or of other data. (Only `fingerprint` tells
                all other data: `resume.check` compares it.)
        """
        expected = {
            "seed": (self._seed, "run.seed"),
            "shuffle": (self._shuffle, "data.shuffle"),
        }
        for key, (now, name) in expected.items():
            if state.get(key) != now:
                raise ConfigError(
                    f"can't resume: {name} was {state.get(key)!r} and is now {now!r}, so the "
                    "order of the prompts would change"
                )
        epoch, offset, position = (_count(state, key) for key in ("epoch", "offset", "position"))
        if offset > len(self._prompts):
            raise CheckpointError(f"prompt cursor: offset {offset} is beyond the data")
        returned, quarantined = (
            [self._known(row_id) for row_id in _list(state, key)]
            for key in ("returned", "quarantined")
        )
        self._epoch, self._offset, self._position = epoch, offset, position
        self._returned = deque(returned)
        self._quarantined = {prompt.row_id for prompt in quarantined}
        self._order = self._order_of(epoch)

    def _next(self) -> Prompt:
        if len(self._quarantined) == len(self._prompts):
            raise ConfigError(f"all {len(self._prompts)} rows are quarantined: none can be drawn")
        while self._returned:
            prompt = self._returned.popleft()
            if prompt.row_id not in self._quarantined:
                return prompt
        while True:
            if self._offset == len(self._prompts):
                self._epoch += 1
                self._offset = 0
                self._order = self._order_of(self._epoch)
            prompt = self._prompts[self._order[self._offset]]
            self._offset += 1
            if prompt.row_id not in self._quarantined:
                return prompt

    def _order_of(self, epoch: int) -> list[int]:
        n = len(self._prompts)
        if not self._shuffle:
            return list(range(n))
        seeds = np.random.SeedSequence([self._seed, epoch])
        return np.random.Generator(np.random.PCG64(seeds)).permutation(n).tolist()

    def _known(self, row_id: object) -> Prompt:
        if not isinstance(row_id, str) or row_id not in self._by_id:
            raise CheckpointError(f"prompt cursor: there is no row {row_id!r}")
        return self._by_id[row_id]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of what the model reads and the reward compares, row by row in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        ids = np.asarray(prompt.token_ids, dtype="<i8").tobytes()
        for part in (prompt.row_id.encode(), ids, prompt.answer.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _count(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"prompt cursor: `{key}` must be a count, not {value!r}")
    return value


def _list(state: Mapping[str, Any], key: str) -> list[object]:
    value = state.get(key)
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"prompt cursor: `{key}` must be a list, not {value!r}")
    return list(cast(Sequence[object], value))
