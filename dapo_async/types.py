"""The records that flow through a run, one per stage, in the order of the flow:

    Prompt → Draw → Lease → Completion → Trajectory → Group → GroupMeta → Batch → StepReport
    → WeightVersion

Every record is frozen and complete when it is made: nothing is "filled in later". A record that
crosses a process border travels as a msgpack frame (see `dapo_async.codec`), so fields hold
only None, bool, int, float, str, bytes, tuples, dicts with text keys, numpy arrays, and other
records of this module.

Shape suffixes: T response tokens of one trajectory, G trajectories of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

Extra = Mapping[str, Any]
"""What users add to prompts and rewards: JSON-like values under text keys."""


TORCH_NAMES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""`learner.precision` as torch calls it, and with it Hugging Face and SGLang."""


FilterReason = Literal["all_right", "all_wrong", "uniform", "pass_band"]
"""Why the dynamic filter leaves a group out; see `dapo.is_informative`."""
FILTER_REASONS: tuple[FilterReason, ...] = get_args(FilterReason)


class DrawId(NamedTuple):
    """One draw of a prompt. Orders by epoch, then position: the order of drawing within a run."""

    run: str
    epoch: int
    position: int
    timeline: int = 0
    """How often the run had gone on from a checkpoint. The same position may be drawn again after
    that with another outcome: what belongs to a timeline that was left is of no use. Noise is keyed
    by the position alone."""


class LeaseId(NamedTuple):
    """One attempt at a draw. A late answer of an earlier attempt is refused by this id."""

    draw_id: DrawId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set, already rendered and tokenised.

    Example: `Prompt(row_id="train:17", text="2+2=", token_ids=(5, 9, 5, 3), answer="4")`
    """

    row_id: str
    """Names the source row in messages and reports. Two rows with equal text are two prompts."""
    text: str
    """The rendered prompt, special tokens included, as the model sees it."""
    token_ids: tuple[int, ...]
    answer: str
    """The ground truth that reward functions compare with."""
    extra: Extra = field(default_factory=dict[str, Any])
    """Further columns of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one draw is sampled. One object configures the engine and the learner's log-probs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    max_response_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Every id that ends a response; the stop token itself is kept and trained."""
    seed: int = 0

    @property
    def logprob_mode(self) -> LogprobMode:
        return LogprobMode(self.temperature, self.top_p, self.top_k)


class LogprobMode(NamedTuple):
    """Which distribution a log-prob belongs to; the learner refuses a sample of another mode."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A prompt drawn from the source, with everything scheduled stamped on it at admission.

    The reward uses the stamps, so a group is judged by the limits it was generated under even if
    a schedule has moved on meanwhile.
    """

    draw_id: DrawId
    prompt: Prompt
    group_size: int
    sampling: SamplingParams
    overlong_buffer: int
    """Lb of the soft overlong punishment, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One attempt at a draw, handed to one worker."""

    lease_id: LeaseId
    draw: Draw


FinishReason = Literal["stop", "length", "abort"]
"""stop: a stop id or stop string was sampled. length: max_response_tokens reached. abort: cut
off."""

RewardStatus = Literal["ok", "timeout", "error", "invalid"]
"""timeout, error and invalid are failures of the environment, never a reward of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response. All arrays have length T (0 for an empty response).

    Example: token_ids=[7, 8, 2], logprobs=[-.1, -.5, -.2], versions=[4, 4, 5] (an update landed
    after the second token), finish_reason="stop".
    """

    token_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Natural log-probs of the distribution sampled from (see `LogprobMode`)."""
    versions_T: NDArray[np.int32]
    """The weight version that sampled each token."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a reward function says of one response."""

    score: float
    """The task reward that is optimised (before the overlong penalty)."""
    acc: float
    """The task outcome in [0, 1]: the default metric of the dynamic filter."""
    status: RewardStatus = "ok"
    extra: Extra = field(default_factory=dict[str, Any])
    """Further numbers, pooled into the metrics under `reward/<name>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response with its reward."""

    completion: Completion
    reward: Reward
    overlong_penalty: float
    """≤ 0, from the stamps of the draw; added to `reward.score` for the advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All G trajectories of one draw: the payload. Queued, trained and dropped as a whole.

    It is stored beside the learner and never passes through the driver.
    """

    lease_id: LeaseId
    prompt_token_ids: NDArray[np.int32]
    logprob_mode: LogprobMode
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeta:
    """What the driver knows of a complete group: every number but no token.

    Tuples have one entry per trajectory, in sample order.
    """

    lease_id: LeaseId
    worker_id: str
    prompt_tokens: int
    response_tokens_G: tuple[int, ...]
    scores_G: tuple[float, ...]
    accs_G: tuple[float, ...]
    penalties_G: tuple[float, ...]
    statuses_G: tuple[RewardStatus, ...]
    finish_reasons_G: tuple[FinishReason, ...]
    reward_sums: Mapping[str, tuple[float, ...]]
    """(sum, count) of each number in `Reward.extra`, over the trajectories judged ok. The whole
    extras stay with the payload."""
    oldest_version: int
    """The oldest version that sampled any token of the group (the proven version at the start
    for a group without tokens)."""
    newest_version: int
    generate_s: float
    reward_s: float
    samples: tuple[SampleText, ...] = ()
    """A few decoded responses for the sample log; empty for most groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One decoded response for people to read."""

    prompt: str
    response: str
    answer: str
    score: float
    acc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFailure:
    """A lease that ended without a group. The draw is issued again or dropped with the reason."""

    lease_id: LeaseId
    reason: str
    """A short word for the ledger: `reward_error`, `rejected`, `engine_error` …"""
    detail: str = ""
    retry: bool = True


class SampleRef(NamedTuple):
    """One trajectory as the packer and the learner know it. A named tuple, since a step has
    thousands and making a frozen dataclass costs several times as much."""

    draw_id: DrawId
    trajectory_index: int
    """Its place in the group."""
    tokens: int
    """Prompt plus response tokens."""
    advantage: float
    trained: bool = True
    """False: the tokens are in the batch but masked (overlong filtering, empty response)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer update. `micro_batches[rank][k]` holds the samples of one forward."""

    micro_batches: tuple[tuple[tuple[SampleRef, ...], ...], ...]
    """The same number of micro-batches on every rank; an empty one is a zero-weight dummy."""
    denominator: float
    """What the summed token (or sequence) losses are divided by, over all ranks; see
    `dapo_async.dapo.denominator`. Known before the first backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One learner step: the samples of B groups, planned into minibatches and micro-batches."""

    version: int
    """The learner version this batch is trained at."""
    lease_ids: tuple[LeaseId, ...]
    """The groups, in draw order; a payload is kept under its lease id."""
    minibatches: tuple[Minibatch, ...]
    """`epochs × minibatches` optimizer updates, in order."""
    clip_low: float
    clip_high: float
    lr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one learner step measured, already pooled over its micro-batches and ranks."""

    version: int
    """The version after the step."""
    metrics: Mapping[str, float]
    """Pooled numbers; see `dapo_async.metrics` for the names."""
    trained_tokens: int
    """Response tokens with loss mask 1."""
    staleness: Mapping[int, int]
    """Samples by staleness (learner version − oldest version of the sample's tokens)."""
    skipped_updates: int = 0
    """Optimizer updates skipped on all ranks because loss or gradient was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a published version."""

    name: str
    dtype: str
    """torch's name without the module: `float32`, `bfloat16` …"""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3: int
    """XXH3-64 of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What the learner's own model says with the weights of a version: the proof that an engine
    has loaded them is that it says the same."""

    token_ids: tuple[int, ...]
    """A fixed text, at least two tokens."""
    logprobs: tuple[float, ...]
    """One less than `token_ids`: natural log-probs at temperature 1 of token_ids[i + 1] given
    token_ids[: i + 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """The manifest of one complete published version."""

    version: int
    location: str
    """The folder that holds the version, on the node of the store that made this manifest."""
    tensors: tuple[TensorSpec, ...]
    finite: bool
    """True: the learner saw no inf or nan in any tensor."""
    canary: Canary | None = None
    """None: nothing to prove an update with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutcomes:
    """What one worker found on evaluation prompts; one entry per prompt, in order."""

    version: int
    """The one version that sampled every token."""
    accs: tuple[float, ...]
    greedy_accs: tuple[float, ...]
    """Empty without greedy evaluation."""
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    failed: int
    """Judgements that failed (status not ok); they count as wrong."""
    samples: tuple[SampleText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One evaluation of one version over a whole evaluation set, pooled."""

    version: int
    n: int
    correct: int
    acc: float
    """Pooled share of right answers over all problems (sampled, one response each)."""
    low: float
    high: float
    """95 % Wilson interval of `acc`."""
    greedy_acc: float | None
    mean_length: float
    truncated: float
    """Share of responses cut at the limit."""
    samples: tuple[SampleText, ...] = ()
