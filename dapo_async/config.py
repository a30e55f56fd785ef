"""The whole configuration of a run, validated when it is read and before any heavy import.

A config is a YAML file (`base:` names one file to inherit from) plus dotted overrides. Numbers
are strict: text is never turned into a number, a bool is never a number. A key that the chosen
path would ignore is refused, so that a run does what its file says. `null` means "not set".
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dapo_async.config_files import apply_override, problems, read_tree
from dapo_async.errors import ConfigError

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def refuse_ignored(self, fields: Iterable[str], why: str) -> None:
        """Refuse fields that were set though the chosen path doesn't read them."""
        for name in fields:
            if name in self.model_fields_set and getattr(self, name) is not None:
                value = getattr(self, name)
                raise ValueError(f"`{name}: {value}` would be ignored {why}; remove it")


class Stage(Section):
    """One stage of a schedule: `value` holds from step `from_step` on."""

    from_step: Annotated[int, Field(ge=0)]
    """First learner step of the stage."""
    value: float
    """The value during the stage."""


class Ramp(Section):
    """A straight line from `start` to `end` over the first `steps` steps, `end` afterwards."""

    start: float
    """Value at step 0."""
    end: float
    """Value from step `steps` on."""
    steps: Count
    """Length of the ramp."""


Scheduled = float | Ramp | list[Stage]
"""A number, a ramp, or a list of stages."""


def at(schedule: Scheduled, step: int) -> float:
    """The value of a schedule at a learner step."""
    if isinstance(schedule, Ramp):
        share = min(1.0, step / schedule.steps)
        return schedule.start + share * (schedule.end - schedule.start)
    if isinstance(schedule, list):
        value = schedule[0].value
        for stage in schedule:
            if step >= stage.from_step:
                value = stage.value
        return value
    return schedule


def values(schedule: Scheduled) -> list[float]:
    """The extreme values a schedule can take (every stage, both ends of a ramp)."""
    if isinstance(schedule, Ramp):
        return [schedule.start, schedule.end]
    if isinstance(schedule, list):
        return [stage.value for stage in schedule]
    return [schedule]


def _check_schedule(
    name: str, schedule: Scheduled, low: float, high: float | None = None, whole: bool = False
) -> None:
    if isinstance(schedule, list):
        starts = [stage.from_step for stage in schedule]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"`{name}`: stages must start at step 0 and rise, got {starts}")
    if whole and isinstance(schedule, Ramp):
        raise ValueError(f"`{name}` counts whole things: use stages, not a ramp")
    for value in values(schedule):
        if value < low or (high is not None and value > high):
            bound = f"≥ {low:g}" + ("" if high is None else f" and ≤ {high:g}")
            raise ValueError(f"`{name}: {value:g}` must be {bound}")
        if whole and value != int(value):
            raise ValueError(f"`{name}: {value:g}` must be a whole number")


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError(
            f"{name!r}: must be of letters, digits, `.`, `_` and `-`, begin with a letter or digit "
            "and have 100 characters at most: it names a folder"
        )
    return name


class RunConfig(Section):
    """Where a run lives and what makes it repeatable."""

    name: Annotated[str, AfterValidator(_check_name)]
    """Names the folder `dir/name`; letters, digits, `.`, `_` and `-`."""
    dir: str = "runs"
    """Parent folder of all runs."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seeds data order, sampling and initialisation."""
    overwrite: bool = False
    """Replace an earlier run of the same name; otherwise its folder is refused."""


class ModelConfig(Section):
    """The policy."""

    path: str
    """A local folder in Hugging Face format."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention of the learner; packed samples never see each other on any. flash_attention_2 needs
    the package flash-attn and a GPU."""


class DataConfig(Section):
    """Training and evaluation prompts."""

    train: str
    """JSONL or Parquet file."""
    eval: str | None = None
    """JSONL or Parquet file of held-out rows."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the ground truth; dots lead into mappings, as in `reward_model.ground_truth`."""
    answer_pattern: str | None = None
    """Regular expression whose first group is the ground truth within the answer column
    (GSM8K: `#### (.+)$`)."""
    chat_template: bool = False
    """Render prompts through the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message put first; needs `chat_template`."""
    prompt_suffix: str = ""
    """Text added to every text prompt before it is rendered."""
    max_prompt_tokens: Count = 1024
    """Longest prompt in tokens, template included."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What happens to a longer row: left out and counted, or refused by name."""
    shuffle: bool = True
    """A new order for every epoch, from `run.seed`."""

    @model_validator(mode="after")
    def _rules(self) -> DataConfig:
        if not self.chat_template:
            self.refuse_ignored(["system_prompt"], "without `chat_template: true`")
        return self


SGLANG_ONLY = (
    "stop_strings", "tensor_parallel_size", "memory_fraction", "context_length", "engine_args",
    "engine_urls", "engine_token_file",
)  # fmt: skip

_WORKER = "the worker sets it itself"
_ONE_MACHINE = "an engine runs on one machine; use more `rollout.workers`"
OWNED_ENGINE_ARGS: Mapping[str, str] = {
    "model_path": "`model.path`",
    "tokenizer_path": "`model.path`",
    "device": "`rollout.device`",
    "dtype": "`learner.precision`",
    "tp_size": "`rollout.tensor_parallel_size`",
    "pp_size": "`rollout.tensor_parallel_size`",
    "mem_fraction_static": "`rollout.memory_fraction`",
    "context_length": "`rollout.context_length`",
    "allow_auto_truncate": "`data.max_prompt_tokens`",
    "max_running_requests": "`rollout.slots`",
    "random_seed": "`run.seed`",
    "preferred_sampling_params": "`rollout.temperature`, `top_p` and `top_k`",
    "skip_tokenizer_init": "`rollout.stop_strings`",
    "incremental_streaming_output": _WORKER,
    "weight_version": _WORKER,
    "trust_remote_code": "code that comes with a model is never run",
    "host": _WORKER,
    "port": _WORKER,
    "nccl_port": _WORKER,
    "dist_init_addr": _WORKER,
    "api_key": _WORKER,
    "admin_api_key": _WORKER,
    "base_gpu_id": _WORKER,
    "gpu_id_step": _WORKER,
    "nnodes": _ONE_MACHINE,
    "node_rank": _ONE_MACHINE,
}
"""SGLang arguments that `rollout.engine_args` may not set → what says it instead, or why not."""


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["torch", "sglang"] = Field(
        default="torch",
        json_schema_extra={"written": ["auto", "torch", "sglang"], "left_out": "auto"},
    )
    """`torch`: the embedded engine. `sglang`: SGLang servers. `auto` is replaced when the config is
    read: sglang where a GPU and the package are, or `engine_urls`, else torch."""
    device: Literal["cpu", "cuda"] = Field(
        default="cpu", json_schema_extra={"left_out": "by the engine"}
    )
    """Where engines compute; left out, it is cuda with SGLang of our own where there is a GPU that
    it can use, else cpu."""
    workers: Count = 1
    """Rollout workers: processes with one engine each."""
    slots: Count = 64
    """Sequences an engine decodes at once."""
    max_groups_per_worker: Count = 8
    """Groups in flight per worker; further ones wait in the driver."""
    group_size: Scheduled = 16
    """G, responses per prompt."""
    temperature: Scheduled = 1.0
    """Sampling temperature, 0 < T; the learner uses the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Below 1 the trained log-probs are still of the full distribution."""
    top_k: int = -1
    """-1: off."""
    max_response_length: Scheduled = 1024
    """Lmax, in tokens; a response that reaches it is truncated."""
    stop_token_ids: list[int] | None = None
    """Stop ids besides those of the model's generation config and tokenizer."""
    stop_strings: list[str] | None = None
    """Texts that end a response and stay part of it (sglang)."""
    weight_update: Literal["retract", "keep_kv", "abort_resume"] = "retract"
    """What happens to running requests at a weight update: `retract` recomputes their KV cache,
    `keep_kv` goes on with the old one (faster, but later tokens see keys of older weights),
    `abort_resume` breaks them off and sends them again with what they have (for SGLang servers
    that can't retract)."""
    tensor_parallel_size: Count = 1
    """GPUs of one engine (sglang)."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of GPU memory for weights and KV cache; null leaves it to SGLang."""
    context_length: Count | None = None
    """Longest prompt + response of an engine (default `data.max_prompt_tokens` +
    `max_response_length`)."""
    engine_args: dict[str, str | int | float | bool | list[str] | list[int] | None] | None = None
    """Further SGLang server arguments, checked by SGLang's own ServerArgs; those that follow from
    other keys are refused here."""
    engine_urls: list[str] | None = None
    """SGLang servers that run already, one worker each (`http://host:port`)."""
    engine_token_file: str | None = None
    """File with the bearer token of `engine_urls`, readable by its owner only."""
    deterministic: bool = False
    """Equal runs give equal bits: fixed forward shapes and noise keyed by draw and sample."""
    group_timeout: Positive = 600.0
    """Seconds after which an incomplete group that blocks the learner is dropped (overdue)."""
    start_timeout_s: Positive = 300.0
    """Longest start of a worker."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts per worker before it is given up."""
    max_attempts: Count = 5
    """Attempts at one draw (its worker died, its request failed) before its row is set aside."""
    min_workers: Count = 1
    """With fewer workers left, or with room in the cluster for fewer, the run ends (exit 4)."""
    max_workers: Count | None = None
    """Workers beyond `workers` that join as soon as the cluster has room, and make it grow where it
    can (null: none). The run starts without them."""
    cpus_per_worker: Annotated[float, Field(ge=0)] = 1.0
    """Ray CPUs a worker reserves."""
    threads_per_worker: Count = 1
    """torch threads of a worker."""

    @model_validator(mode="after")
    def _rules(self) -> RolloutConfig:
        _check_schedule("group_size", self.group_size, 1, whole=True)
        _check_schedule("temperature", self.temperature, 0.01, 100)
        _check_schedule("max_response_length", self.max_response_length, 1, whole=True)
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"`top_k: {self.top_k}` must be -1 (off) or ≥ 1")
        if self.min_workers > self.workers:
            raise ValueError(f"`min_workers: {self.min_workers}` is over `workers: {self.workers}`")
        if self.workers > self.most_workers:
            raise ValueError(
                f"`max_workers: {self.max_workers}` must be ≥ `workers: {self.workers}`"
            )
        if self.deterministic and self.weight_update != "retract":
            raise ValueError("`deterministic: true` needs `weight_update: retract`")
        self._engine_rules()
        return self

    @property
    def most_workers(self) -> int:
        """As many there may be at once."""
        return self.workers if self.max_workers is None else self.max_workers

    def _engine_rules(self) -> None:
        if self.engine == "torch":
            self.refuse_ignored(SGLANG_ONLY, "with `engine: torch`")
            if self.device != "cpu":
                raise ValueError(f"`device: {self.device}` needs `engine: sglang`")
            if self.weight_update == "abort_resume":
                raise ValueError("`weight_update: abort_resume` needs `engine: sglang`")
            return
        if self.deterministic:
            raise ValueError("`deterministic: true` needs `engine: torch`")
        self.refuse_ignored(["threads_per_worker"], "with `engine: sglang`")
        if self.tensor_parallel_size > 1 and self.device == "cpu":
            raise ValueError(
                f"`tensor_parallel_size: {self.tensor_parallel_size}` needs `device: cuda`"
            )
        if self.device == "cpu":
            self.refuse_ignored(["memory_fraction"], "with `device: cpu`")
        for name in self.engine_args or ():
            owner = OWNED_ENGINE_ARGS.get(name)
            if owner is not None:
                instead = f"it follows from {owner}" if owner.startswith("`") else owner
                raise ValueError(f"`engine_args` must not set `{name}`: {instead}")
        if self.engine_urls is None:
            self.refuse_ignored(["engine_token_file"], "without `engine_urls`")
            return
        self.refuse_ignored(
            ["memory_fraction", "engine_args", "max_workers"],
            "with `engine_urls`: those servers run already",
        )
        for url in self.engine_urls:
            if not re.fullmatch(r"https?://[^/?#@]+", url):
                raise ValueError(f"`engine_urls`: {url!r} must look like http://host:port")
        if len(set(self.engine_urls)) != len(self.engine_urls):
            raise ValueError("`engine_urls` names a server twice")
        if len(self.engine_urls) != self.workers:
            raise ValueError(
                f"`workers: {self.workers}` must be the number of `engine_urls`, "
                f"{len(self.engine_urls)}; leave it out"
            )


class RewardConfig(Section):
    """How responses are judged."""

    function: str
    """A registered name, or `module:function`."""
    args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the function."""
    processes: Annotated[int, Field(ge=0)] = 0
    """Killable child processes per worker; 0 calls the function in the worker itself (only for
    functions that are fast and trusted)."""
    timeout_s: Positive = 10.0
    """Longest judgement of one response; then its process is killed."""
    on_failure: Literal["drop", "retry"] = "drop"
    """A group with a failed reward is dropped, or judged again up to `retries` times first."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Used by `on_failure: retry`."""
    max_failure_share: Share = 0.5
    """Over 100 judgements: a larger share of failures ends the run (exit 2)."""
    min_score: float = -1e6
    """Scores below are invalid."""
    max_score: float = 1e6
    """Scores above are invalid."""
    permute: bool = False
    """A control for studies: deal the rewards at random within each group, so that there is
    nothing to learn."""

    @model_validator(mode="after")
    def _rules(self) -> RewardConfig:
        if self.on_failure == "drop":
            self.refuse_ignored(["retries"], "with `on_failure: drop`")
        if self.processes == 0:
            self.refuse_ignored(["timeout_s"], "with `processes: 0` (nothing can be killed)")
        if self.min_score >= self.max_score:
            raise ValueError(f"`min_score: {self.min_score}` must be below `max_score`")
        return self


class OverlongConfig(Section):
    """DAPO's punishment of overlong responses (eq. 13)."""

    mode: Literal["soft", "linear", "filter", "off"] = "soft"
    """`soft`: eq. 13. `linear`: factor · max(0, L − buffer). `filter`: truncated responses get
    loss mask 0. `off`: nothing."""
    buffer: Scheduled | None = None
    """Lb in tokens. soft: the last Lb tokens before the limit are punished (default: a fifth of
    the limit, as in the paper). linear: the length from which on punishment grows."""
    factor: Annotated[float, Field(ge=0)] | None = None
    """soft: punishment at the limit (default 1). linear: punishment per token."""

    @model_validator(mode="after")
    def _rules(self) -> OverlongConfig:
        if self.mode in ("off", "filter"):
            self.refuse_ignored(["buffer", "factor"], f"with `mode: {self.mode}`")
        elif self.buffer is not None:
            _check_schedule("buffer", self.buffer, 0 if self.mode == "linear" else 1, whole=True)
        if self.mode == "linear" and (self.buffer is None or self.factor is None):
            raise ValueError("`buffer` and `factor` (per token) are needed with `mode: linear`")
        return self


class FilterConfig(Section):
    """Dynamic sampling: only groups whose responses differ are trained."""

    enabled: bool = True
    """False: every group is trained."""
    metric: Literal["acc", "seq_reward", "seq_final_reward"] = "acc"
    """What must differ within a group: the task outcome, the score, or the score with the
    overlong penalty (warns: an all-wrong group can survive by length)."""
    min_pass: Share = 0.0
    """Keep a group only if the mean of the metric is at least this."""
    max_pass: Share = 1.0
    """Keep a group only if the mean of the metric is at most this."""
    starvation: Literal["wait", "train_short", "stop"] = "wait"
    """What to do once `starved_after_groups` groups were filtered while the learner waited."""
    starved_after_groups: Count = 2048
    """Groups filtered since the last batch, while the learner waits, that count as starvation."""
    starved_after_s: Positive = 3600.0
    """Longest starvation under `wait` or `train_short` before the run ends (exit 3)."""

    @model_validator(mode="after")
    def _rules(self) -> FilterConfig:
        if not self.enabled:
            ignored = set(type(self).model_fields) - {"enabled"}
            self.refuse_ignored(sorted(ignored), "with `enabled: false`")
        if self.min_pass > self.max_pass:
            raise ValueError(f"`min_pass: {self.min_pass}` is over `max_pass: {self.max_pass}`")
        if self.metric != "acc":
            self.refuse_ignored(["min_pass", "max_pass"], "unless `metric: acc`")
        return self


class AlgorithmConfig(Section):
    """Advantage and policy loss."""

    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std", "gae"] = "group_std"
    """group_std: DAPO/GRPO. group_mean: Dr.GRPO. leave_one_out: RLOO. batch_std:
    REINFORCE++-baseline. gae: needs a critic, which doesn't exist yet."""
    clip_low: Scheduled = 0.2
    """ε_low of clip-higher."""
    clip_high: Scheduled = 0.28
    """ε_high of clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """c: bounds the loss of tokens with a negative advantage; null is off."""
    aggregation: Literal[
        "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "token_sum_norm"
    ] = "token_mean"
    """How token losses become one number, over the whole optimizer update."""
    token_sum_norm: Positive | None = None
    """The constant of `aggregation: token_sum_norm`."""
    proximal: Literal["recompute", "behavior", "loglinear"] = "recompute"
    """Where the proximal log-probs come from: a forward at the start of the step, the behavior
    log-probs, or a log-linear mix of behavior and current by staleness."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """KL to a reference model; must be 0 until reference models exist."""

    @model_validator(mode="after")
    def _rules(self) -> AlgorithmConfig:
        _check_schedule("clip_low", self.clip_low, 0, 1)
        _check_schedule("clip_high", self.clip_high, 0)
        if self.advantage == "gae":
            raise ValueError("`advantage: gae` needs a critic, which doesn't exist yet")
        if self.kl_coef > 0:
            raise ValueError(f"`kl_coef: {self.kl_coef}` needs a reference model, not built yet")
        if self.aggregation == "token_sum_norm" and self.token_sum_norm is None:
            raise ValueError("`token_sum_norm` is needed with `aggregation: token_sum_norm`")
        if self.aggregation != "token_sum_norm":
            self.refuse_ignored(["token_sum_norm"], f"with `aggregation: {self.aggregation}`")
        return self


class OffPolicyConfig(Section):
    """The weight proximal/behavior that corrects for the age of the samples."""

    action: Literal["truncate", "mask", "none"] = "truncate"
    """truncate: min(w, cap). mask: w outside [low, high] gets loss mask 0 (IcePop). none."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight per token, the product per sequence, or its geometric mean."""
    cap: Positive | None = None
    """C of `truncate` (default 2)."""
    low: Annotated[float, Field(ge=0)] | None = None
    """Lower end of `mask` (default 0.5)."""
    high: Positive | None = None
    """Upper end of `mask` (default 2)."""
    veto: Positive | None = None
    """A sequence with any token weight below this is masked; null is off."""

    @model_validator(mode="after")
    def _rules(self) -> OffPolicyConfig:
        if self.action != "truncate":
            self.refuse_ignored(["cap"], f"with `action: {self.action}`")
        if self.action != "mask":
            self.refuse_ignored(["low", "high"], f"with `action: {self.action}`")
        if self.action == "none":
            self.refuse_ignored(["level"], "with `action: none`")
        if self.action == "mask" and self.mask_low >= self.mask_high:
            raise ValueError(f"`low: {self.mask_low}` must be below `high: {self.mask_high}`")
        return self

    @property
    def truncate_cap(self) -> float:
        return 2.0 if self.cap is None else self.cap

    @property
    def mask_low(self) -> float:
        return 0.5 if self.low is None else self.low

    @property
    def mask_high(self) -> float:
        return 2.0 if self.high is None else self.high


class ReplayConfig(Section):
    """The staleness contract (docs/staleness.md)."""

    max_staleness: Annotated[int, Field(ge=0)] = 2
    """η: no sample is trained more than this many versions after its oldest token. 0 is exactly
    synchronous training."""
    depth: Positive | None = None
    """Live groups allowed, in steps' worth, 1 … η+1 (default min(2, η+1)): the typical age."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Draws beyond what a step needs; surplus informative groups are dropped, latest draw first."""

    @model_validator(mode="after")
    def _rules(self) -> ReplayConfig:
        if not 1 <= self.steps_deep <= self.max_staleness + 1:
            raise ValueError(
                f"`depth: {self.depth}` must be between 1 and max_staleness + 1 = "
                f"{self.max_staleness + 1}"
            )
        return self

    @property
    def steps_deep(self) -> float:
        return float(min(2, self.max_staleness + 1)) if self.depth is None else self.depth


class WeightsConfig(Section):
    """How new weights reach the workers."""

    transport: Literal["shared_memory", "relay", "disk", "nccl"] = "shared_memory"
    """shared_memory: one machine. relay: one copy per node in its shared memory, sent while engines
    go on generating. disk: `dir`, a folder that every node sees. nccl: straight from the learner
    into the engines (sglang), one after another; gloo with `rollout.device: cpu`."""
    dir: str | None = None
    """The folder of `transport: disk`."""
    canary_tolerance: Positive | None = None
    """After an update the engine's log-probs of a fixed text may differ from the learner's by this
    much on average, else the engine is quarantined (default .01 in fp32, .05 in fp16, .2 in
    bf16)."""
    broadcast_interval: Count = 1
    """Publish when the learner is this many versions ahead of the last published one."""
    delay: Annotated[int, Field(ge=0)] = 0
    """For studies: workers serve version max(0, v − delay)."""
    publish_timeout_s: Positive = 300.0
    """Longest snapshot, and longest publication of one, before the run ends (exit 7)."""
    max_publish_failures: Count = 30
    """Publishes that fail in a row before the run ends (exit 7)."""
    update_timeout_s: Positive = 300.0
    """Longest weight update of one worker before it counts as lost."""

    @model_validator(mode="after")
    def _rules(self) -> WeightsConfig:
        if self.transport != "disk":
            self.refuse_ignored(["dir"], f"with `transport: {self.transport}`")
        elif self.dir is None:
            raise ValueError("`transport: disk` needs `dir`, a folder that every node sees")
        return self


class LearnerConfig(Section):
    """The learner: DeepSpeed ranks and their optimizer."""

    ranks: Count = 1
    """Learner processes."""
    nodes: Count = 1
    """Nodes of a cluster that the ranks are on, equally many on each, in order. With several, all
    must see `run.dir`, and the ranks meet on the network between them, without a password."""
    sequence_parallel_size: Count = 1
    """Ranks that share the tokens of one micro-batch (Ulysses); divides `ranks`, and the model's
    attention and key-value heads. The others are data-parallel."""
    zero_stage: Literal[1, 2, 3] = 1
    """What ranks share out: the optimizer (1), the gradients too (2), the parameters too (3)."""
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = "none"
    """What a rank on a GPU keeps in the machine's memory; parameters only at `zero_stage: 3`."""
    gradient_checkpointing: bool = False
    """Keep only the input of each layer and compute the rest again in the backward."""
    deepspeed: str | None = None
    """A DeepSpeed JSON, on every machine with a rank, for what has no key here."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute; cuda is one GPU each."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute precision. Below fp32, gradients and optimizer stay in fp32; fp16 scales the loss,
    and a scale that was too high skips an update."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after the warm-up."""
    lr_min_share: Share = 0.0
    """Share of `lr` that a cosine or linear schedule ends at."""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Learner steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW weight decay."""
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """AdamW betas."""
    eps: Positive = 1e-8
    """AdamW epsilon."""
    grad_clip: Positive | None = 1.0
    """Gradient norm limit; null is off."""
    minibatches: Count = 1
    """Optimizer updates per epoch of a step; groups are dealt to them whole, in draw order."""
    epochs: Count = 1
    """Passes over the step's groups."""
    max_tokens_per_microbatch: Count = 8192
    """Hard cap of one forward, prompt and response tokens, over all ranks that share it."""
    logprob_tokens_per_microbatch: Count | None = None
    """The same for forwards without a backward; null takes the training's micro-batches."""
    logprob_chunk: Count = 512
    """Tokens whose logits exist at once."""
    max_skipped_updates: Count = 5
    """Non-finite updates in a row that end the run (exit 5)."""
    step_timeout_s: Positive = 3600.0
    """Longest learner step."""
    start_timeout_s: Positive = 300.0
    """Longest start of the learner."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often the ranks start anew, from the newest checkpoint, when one of them has died. The
    run ends (exit 4) after more, where there is no checkpoint, and with `weights.transport: nccl`.
    """
    cpus_per_rank: Annotated[float, Field(ge=0)] = 1.0
    """Ray CPUs a rank reserves."""
    threads_per_rank: Count = 1
    """torch threads of a rank."""

    @model_validator(mode="after")
    def _rules(self) -> LearnerConfig:
        if self.lr_schedule == "constant":
            self.refuse_ignored(["lr_min_share"], "with `lr_schedule: constant`")
        if self.ranks % self.sequence_parallel_size:
            raise ValueError(
                f"`sequence_parallel_size: {self.sequence_parallel_size}` must divide "
                f"`ranks: {self.ranks}`"
            )
        if self.ranks % self.nodes:
            raise ValueError(f"`nodes: {self.nodes}` must divide `ranks: {self.ranks}`")
        if self.offload == "optimizer_and_parameters" and self.zero_stage != 3:
            raise ValueError(
                f"`offload: {self.offload}` needs `zero_stage: 3`: below it every rank computes "
                f"with whole parameters, and this is stage {self.zero_stage}"
            )
        return self

    @property
    def replicas(self) -> int:
        """Data-parallel groups of ranks, each with micro-batches of its own."""
        return self.ranks // self.sequence_parallel_size


class EvalConfig(Section):
    """Evaluation on `data.eval`."""

    every: Annotated[int, Field(ge=0)] = 0
    """Learner steps between evaluations; 0: only before and after."""
    limit: Count | None = None
    """Use only the first rows."""
    temperature: Positive = 1.0
    """Sampling temperature of the headline accuracy."""
    greedy: bool = True
    """Also report greedy accuracy."""
    timeout_s: Positive = 1800.0
    """Longest evaluation."""


class CheckpointConfig(Section):
    """Checkpoints to resume from, in the run's folder. One is always written at the end."""

    every: Annotated[int, Field(ge=0)] = 0
    """Learner steps between checkpoints; 0: only at the end, also when a signal ends the run."""
    keep_last: Count = 2
    """Newest checkpoints to keep; the older ones serve where the newest is damaged."""
    keep_best: bool = False
    """Also keep the one with the best evaluation; needs `data.eval`, and `every` a multiple of
    `eval.every` to be of use."""
    max_failures: Count = 3
    """Saves that fail in a row before the run ends (exit 6)."""


class TrainerConfig(Section):
    """The run as a whole."""

    steps: Annotated[int, Field(ge=0)]
    """Learner steps."""
    groups_per_step: Scheduled = 32
    """B, groups trained per step (a number or stages)."""
    stall_timeout_s: Positive = 1800.0
    """With no progress at all for this long the run ends (exit 7)."""
    save_timeout_s: Positive = 1800.0
    """Longest save of a checkpoint; a run that ends early has at most a minute for its last."""
    log_samples_every: Annotated[int, Field(ge=0)] = 10
    """Steps between sampled answers in samples.jsonl; 0 is never."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Status display: auto is live on a terminal and plain lines elsewhere."""

    @model_validator(mode="after")
    def _rules(self) -> TrainerConfig:
        _check_schedule("groups_per_step", self.groups_per_step, 1, whole=True)
        return self


RAYS_OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")


class RayConfig(Section):
    """The cluster."""

    address: str = "local"
    """`local`: a private Ray on this machine, ended with the run. `auto` or `host:port`: a cluster
    that runs already."""
    placement_timeout_s: Positive = 300.0
    """Longest wait until the cluster has room for `rollout.workers` and all ranks (exit 2), and
    later for `rollout.min_workers`, when nodes were lost (exit 4)."""
    learner_resource: Annotated[str, Field(min_length=1)] | None = None
    """Custom Ray resource of the nodes that learner ranks may be placed on; null: any node."""
    rollout_resource: Annotated[str, Field(min_length=1)] | None = None
    """The same for rollout workers."""

    @model_validator(mode="after")
    def _rules(self) -> RayConfig:
        if not re.fullmatch(r"local|auto|[^/:\s]+:[0-9]+|\[[0-9a-f:]+\]:[0-9]+", self.address):
            raise ValueError(f"`address: {self.address}` must be local, auto or host:port")
        if self.address == "local":
            only_joined = ["placement_timeout_s", "learner_resource", "rollout_resource"]
            self.refuse_ignored(only_joined, "with `address: local`")
        for name in ("learner_resource", "rollout_resource"):
            if getattr(self, name) in RAYS_OWN_RESOURCES:
                raise ValueError(
                    f"`{name}: {getattr(self, name)}` must be a resource of your own: Ray counts "
                    "that one itself"
                )
        return self


class Config(Section):
    """One run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    overlong: OverlongConfig | None = OverlongConfig()
    filter: FilterConfig = FilterConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    replay: ReplayConfig = ReplayConfig()
    weights: WeightsConfig = WeightsConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ray: RayConfig = RayConfig()
    trainer: TrainerConfig

    @model_validator(mode="after")
    def _rules(self) -> Config:
        _check_groups(self)
        _check_lengths(self)
        if self.ray.address == "local":
            self.rollout.refuse_ignored(
                ["max_workers"], "with `ray.address: local`, where no room is added"
            )
        _check_weights(self)
        _check_learner(self)
        if self.data.eval is None:
            self.eval.refuse_ignored(type(self.eval).model_fields, "without `data.eval`")
            if self.checkpoint.keep_best:
                raise ValueError("`checkpoint.keep_best: true` needs `data.eval`")
        return self

    @property
    def overlong_or_off(self) -> OverlongConfig:
        return self.overlong or OverlongConfig(mode="off")


def _check_groups(config: Config) -> None:
    smallest = min(values(config.rollout.group_size))
    if smallest < 2:
        raise ValueError(
            f"`rollout.group_size: {smallest:g}` must be ≥ 2: the advantage compares the "
            "responses of one group, and a group of one gives no signal"
        )
    for groups in values(config.trainer.groups_per_step):
        if groups < config.learner.minibatches:
            raise ValueError(
                f"`learner.minibatches: {config.learner.minibatches}` is over "
                f"`trainer.groups_per_step: {groups:g}`: a minibatch would be empty"
            )
    if config.rollout.deterministic and config.rollout.slots < max(
        values(config.rollout.group_size)
    ):
        raise ValueError("`rollout.deterministic: true` needs `rollout.slots` ≥ `group_size`")


def _check_lengths(config: Config) -> None:
    longest = max(values(config.rollout.max_response_length))
    total = config.data.max_prompt_tokens + longest
    context = config.rollout.context_length
    if context is not None and context < total:
        raise ValueError(
            f"`rollout.context_length: {context}` must be ≥ `data.max_prompt_tokens` + "
            f"`rollout.max_response_length` = {total:g}"
        )
    cap = config.learner.max_tokens_per_microbatch
    if total > cap:
        raise ValueError(
            f"`data.max_prompt_tokens: {config.data.max_prompt_tokens}` + "
            f"`rollout.max_response_length: {longest:g}` = {total:g} is over "
            f"`learner.max_tokens_per_microbatch: {cap}`: a full sample would not fit"
        )
    passes = config.learner.logprob_tokens_per_microbatch
    if passes is not None and total > passes:
        raise ValueError(
            f"`learner.logprob_tokens_per_microbatch: {passes}` must be ≥ `data.max_prompt_tokens` "
            f"+ `rollout.max_response_length` = {total:g}: a full sample would not fit"
        )
    overlong = config.overlong_or_off
    if overlong.mode == "soft" and overlong.buffer is not None:
        shortest = min(values(config.rollout.max_response_length))
        if max(values(overlong.buffer)) > shortest:
            raise ValueError(
                f"`overlong.buffer: {max(values(overlong.buffer)):g}` is over "
                f"`rollout.max_response_length: {shortest:g}`"
            )


def _check_learner(config: Config) -> None:
    learner = config.learner
    if learner.nodes > 1:
        if config.ray.address == "local":
            raise ValueError(f"`learner.nodes: {learner.nodes}` needs a cluster, `ray.address`")
        if config.weights.transport == "shared_memory":
            raise ValueError(
                f"`learner.nodes: {learner.nodes}` needs another `weights.transport`: "
                "`shared_memory` keeps all of a run on one node"
            )
    if config.model.attention == "flash_attention_2":
        if learner.device == "cpu":
            raise ValueError(
                "`model.attention: flash_attention_2` needs `learner.device: cuda`: its kernels "
                "run on GPUs only"
            )
        if learner.precision == "fp32":
            raise ValueError(
                "`model.attention: flash_attention_2` needs `learner.precision: bf16` or `fp16`"
            )
    if learner.logprob_tokens_per_microbatch is not None:
        updates = learner.minibatches * learner.epochs
        if config.algorithm.proximal != "recompute" or updates == 1:
            learner.refuse_ignored(
                ["logprob_tokens_per_microbatch"],
                "without `algorithm.proximal: recompute` and several `learner.minibatches`: there "
                "is no forward without a backward",
            )


def _check_weights(config: Config) -> None:
    interval, bound = config.weights.broadcast_interval, config.replay.max_staleness
    if interval > bound + 1:
        raise ValueError(
            f"`weights.broadcast_interval: {interval}` must be ≤ `replay.max_staleness` + 1 = "
            f"{bound + 1}: older weights could start no group in time"
        )
    if config.weights.delay > bound:
        raise ValueError(
            f"`weights.delay: {config.weights.delay}` must be ≤ `replay.max_staleness: {bound}`"
        )
    marks = {config.ray.learner_resource, config.ray.rollout_resource}
    if config.weights.transport == "shared_memory" and len(marks) > 1:
        raise ValueError(
            "`weights.transport: shared_memory` keeps all of a run on one node: "
            "`ray.learner_resource` and `ray.rollout_resource` must then be equal; "
            "`relay` spreads it"
        )
    if config.weights.transport == "shared_memory":
        one_node = "with `weights.transport: shared_memory`, which keeps all of a run on one node"
        config.rollout.refuse_ignored(["max_workers"], one_node)
    if config.weights.delay and interval != 1:
        raise ValueError("`weights.delay` needs `weights.broadcast_interval: 1`")
    if config.weights.transport == "nccl":
        config.learner.refuse_ignored(["max_restarts"], "with `weights.transport: nccl`")
        if config.rollout.engine != "sglang":
            raise ValueError("`weights.transport: nccl` needs `rollout.engine: sglang`")
        if config.weights.delay:
            raise ValueError("`weights.delay` needs a transport that keeps versions, not `nccl`")
        if config.rollout.weight_update == "keep_kv" and config.rollout.tensor_parallel_size > 1:
            raise ValueError(
                "`weights.transport: nccl` with `rollout.weight_update: keep_kv` needs "
                "`rollout.tensor_parallel_size: 1`: a forward may still be under way when the "
                "weights come, and two NCCL groups at once on a GPU can wait for ever"
            )


def warnings(config: Config) -> list[str]:
    """What is legal but likely not meant, one sentence each."""
    found: list[str] = []
    if config.weights.broadcast_interval == config.replay.max_staleness + 1 > 1:
        found.append(
            "weights.broadcast_interval = replay.max_staleness + 1 is legal, but generation and "
            "training will not overlap around a broadcast"
        )
    if config.filter.enabled and config.filter.metric == "seq_final_reward":
        found.append(
            "filter.metric: seq_final_reward includes the length penalty, so an all-wrong group "
            "can survive the filter by its lengths alone"
        )
    if config.rollout.top_p < 1 or config.rollout.top_k != -1:
        found.append(
            "top_p/top_k cut the sampled distribution, but log-probs are of the full one: the "
            "ratio of behavior and proximal policy is biased"
        )
    if config.rollout.deterministic and config.replay.max_staleness > 0:
        found.append(
            f"rollout.deterministic: true with replay.max_staleness: {config.replay.max_staleness} "
            "repeats no run: which version samples a token depends on timing; only "
            "max_staleness: 0 is repeatable"
        )
    return found


WHOLE_SCHEDULES = (
    ("rollout", "group_size"),
    ("rollout", "max_response_length"),
    ("overlong", "buffer"),
    ("trainer", "groups_per_step"),
)
"""Those of whole numbers (`_check_schedule`)."""

# ---- reading ---------------------------------------------------------------------------------


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and dotted overrides (`learner.lr=3e-4`).

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, broken rule; every problem found
            is named with its field, value and rule.
    """
    tree = read_tree(Path(path))
    for override in overrides:
        apply_override(tree, override)
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> Config:
    """A `Config` from plain data.

    Raises:
        ConfigError: as `load`.
    """
    try:
        return Config.model_validate(_with_engine(tree))
    except ValidationError as error:
        raise ConfigError(
            "\n".join(["the configuration is refused:", *problems(error, Config)])
        ) from None


def _with_engine(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """`tree` with `rollout.engine: auto` replaced by what this machine can do, and the number of
    workers that follows from `rollout.engine_urls`."""
    rollout: Any = tree.get("rollout", {})
    if not isinstance(rollout, Mapping):
        return tree
    changed: dict[str, Any] = dict(cast(Mapping[str, Any], rollout))
    urls: Any = changed.get("engine_urls")
    if changed.get("engine", "auto") == "auto":
        changed["engine"] = "sglang" if urls or _sglang_on_gpu() else "torch"
    if changed["engine"] == "sglang" and "device" not in changed and not urls and _sglang_on_gpu():
        changed["device"] = "cuda"
    if isinstance(urls, list) and "workers" not in changed:
        changed["workers"] = len(cast(list[Any], urls))
    return {**tree, "rollout": changed}


def gpus() -> int:
    """NVIDIA GPUs of this machine, without loading torch."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _sglang_on_gpu() -> bool:
    """There is a GPU, and the SGLang that is installed can use it."""
    return gpus() > 0 and all(importlib.util.find_spec(name) for name in ("sglang", "sgl_kernel"))


def dump(config: Config) -> str:
    """The resolved configuration as YAML that `load` reads back to an equal config."""
    tree = config.model_dump(mode="json")
    for section, key in WHOLE_SCHEDULES:
        fields: dict[str, Any] = tree[section] or {}
        fields[key] = _as_whole(fields.get(key))
    _drop_ignored(config, tree)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _as_whole(schedule: Any) -> Any:
    """Plain data of a schedule that counts whole things, without `.0`."""
    if isinstance(schedule, list):
        stages = cast(list[dict[str, Any]], schedule)
        return [stage | {"value": int(stage["value"])} for stage in stages]
    return int(schedule) if isinstance(schedule, float) else schedule


def _drop_ignored(config: Section, tree: dict[str, Any]) -> None:
    """Leave out defaults of fields that the chosen path ignores: reading them back as set values
    would be refused."""
    for name in list(tree):
        value = getattr(config, name)
        if isinstance(value, Section):
            _drop_ignored(value, tree[name])
            if not tree[name] and name not in config.model_fields_set:
                del tree[name]
        elif value is None and type(config).model_fields[name].default is None:
            del tree[name]
        elif name not in config.model_fields_set:
            trial = {k: v for k, v in tree.items() if k in config.model_fields_set or k == name}
            try:
                type(config).model_validate(trial)
            except ValidationError:
                del tree[name]
    if isinstance(config, Config) and config.data.eval is None:
        tree.pop("eval", None)
