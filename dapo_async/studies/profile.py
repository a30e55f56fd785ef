"""Profile: what a machine, a model and a task cost in seconds. The simulator's only numbers.

A profile is a YAML file of its own, measured from a run (`dapo-async profile`) or written by hand
with the source of every number. A config says what a run does, a profile how long that takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError, model_validator

from dapo_async.config import Count, Positive, Section, Share
from dapo_async.config_files import problems, read_tree
from dapo_async.errors import ConfigError
from dapo_async.preflight.model import ModelShape

NotNegative = Annotated[float, Field(ge=0)]


class GpuProfile(Section):
    """One GPU. Only the planner reads it, and the engines' room for KV cache."""

    memory_gb: Positive
    """Memory in 10⁹ bytes."""
    per_node: Count = 8
    """GPUs of one machine; no engine spans machines."""
    usd_per_hour: Positive | None = None
    """Price of one GPU; with it `tune` gives a million tokens in dollars, too."""


class ModelProfile(Section):
    """The policy's shape. Only the planner reads it, and the engines' room for KV cache."""

    parameters: Positive
    """Number of parameters."""
    layers: Count
    """Transformer layers."""
    hidden_size: Count
    """Width of a layer."""
    attention_heads: Count
    """Divisible by the GPUs of an engine."""
    kv_heads: Count
    """Key-value heads of a layer."""
    head_size: Count = 128
    """Width of a head."""

    @property
    def shape(self) -> ModelShape:
        """As `preflight.memory` takes it; vocabulary and MLP are not known here."""
        return ModelShape(**self.model_dump(), source="the profile")


class EngineProfile(Section):
    """One inference engine. A forward pass that samples one token for each of n running sequences
    takes `overhead + weights + n·sequence + Σ context·context_token` seconds; all but the overhead
    shrink with more GPUs per engine."""

    tensor_parallel_size: Count = 1
    """GPUs of the engine that the numbers below were measured on."""
    tensor_parallel_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the ideal speed-up that each doubling of the GPUs of an engine keeps."""
    decode_overhead_s: NotNegative = 0.0
    """Per pass, however many GPUs: launches, scheduling, sampling."""
    decode_weights_s: NotNegative
    """Per pass: reading the weights."""
    decode_sequence_s: NotNegative = 0.0
    """Per pass and running sequence: its share of the matrix products."""
    decode_context_token_s: NotNegative = 0.0
    """Per pass and token of context: reading the KV cache."""
    prefill_token_s: NotNegative = 0.0
    """Per prompt token, and per token whose KV cache is computed again; decoding waits."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Share of GPU memory for weights and KV cache where the config leaves it to the engine."""
    resend_s: NotNegative = 0.0
    """Per update under `weight_update: abort_resume`: breaking off and sending again."""

    @model_validator(mode="after")
    def _rules(self) -> EngineProfile:
        if self.decode_overhead_s + self.decode_weights_s + self.decode_sequence_s == 0:
            raise ValueError(
                "`decode_overhead_s`, `decode_weights_s` and `decode_sequence_s` are all 0: a "
                "forward pass must take some time"
            )
        return self


class LearnerProfile(Section):
    """One learner rank. A micro-batch takes `overhead + (tokens·token + Σ length²·token_squared) /
    sequence_parallel_size` seconds, and all ranks wait for the slowest."""

    token_s: NotNegative
    """Forward and backward of one token on one rank."""
    token_squared_s: NotNegative = 0.0
    """Forward and backward attention: per squared token of a sample."""
    microbatch_overhead_s: NotNegative = 0.0
    """Per micro-batch: launches, and collectives that don't overlap."""
    update_s: NotNegative = 0.0
    """Per optimizer update: reduction of gradients, optimizer."""
    step_overhead_s: NotNegative = 0.0
    """Per learner step: fetching payloads, building micro-batches, reporting."""
    forward_share: Share = 1 / 3
    """What a forward alone costs of forward and backward (1/3: a backward is twice a forward; 1/4
    with activations computed again)."""


class Transfer(Section):
    """Moving the weights once: `overhead_s + bytes / bytes_per_s`."""

    overhead_s: NotNegative = 0.0
    """Whatever the size."""
    bytes_per_s: Positive | None = None
    """Bandwidth; null: the overhead is all."""


class WeightsProfile(Section):
    """The way of a new version to the engines."""

    bytes: Positive
    """Size of one version as it is sent."""
    snapshot: Transfer = Transfer()
    """Copying the weights aside; the learner waits."""
    commit: Transfer = Transfer()
    """Making the snapshot visible; beside the next step."""
    broadcast: Transfer = Transfer()
    """To all machines with engines at once; engines go on (nothing with `shared_memory` and
    `disk`)."""
    pull: Transfer = Transfer()
    """Into one GPU of an engine, which stands still; every GPU loads its share."""


class LengthProfile(Section):
    """Response lengths before the limit: a prompt's median is log-normal around `median`, its
    responses are log-normal around that, and some run on as a Pareto tail."""

    median: Positive
    """Median length in tokens."""
    prompt_sigma: NotNegative = 0.0
    """Spread of the prompts' medians, standard deviation of the logarithm."""
    sigma: NotNegative = 0.0
    """Spread of the responses to one prompt, likewise."""
    tail_share: Share = 0.0
    """Share of responses that are multiplied by a Pareto number ≥ 1."""
    tail_exponent: Positive = 1.5
    """Exponent of that Pareto number: the smaller, the heavier."""


class WorkloadProfile(Section):
    """The task as the policy meets it."""

    prompt_tokens: Count
    """Tokens of a prompt."""
    lengths: LengthProfile
    """Response lengths."""
    pass_alpha: Positive = 1.0
    """The pass rate of each prompt is drawn from Beta(pass_alpha, pass_beta), whose mean is
    pass_alpha / (pass_alpha + pass_beta): a lower mean makes prompts harder."""
    pass_beta: Positive = 1.0
    """See pass_alpha. The smaller both are, the more prompts are all easy or hopeless, and the more
    groups the filter takes out."""
    reward_s: NotNegative = 0.0
    """From a group's last token until it is judged and stored: a delay, however many groups there
    are. `reward.processes` and `reward.timeout_s` aren't simulated."""


class DriverProfile(Section):
    """What lies between the pipeline and a worker."""

    call_s: NotNegative = 0.0
    """One way of a call."""


class FailureProfile(Section):
    """What goes wrong."""

    worker_crash_hours: Positive | None = None
    """Mean hours between two crashes of one worker, exponential; null: never."""
    worker_start_s: NotNegative = 0.0
    """Start of a worker, the first one and every later one."""
    reward_failure_share: Share = 0.0
    """Groups whose judgement fails."""
    publish_failure_share: Share = 0.0
    """Publications that fail."""


class Profile(Section):
    """Machine, model and task, in seconds and bytes."""

    name: str
    """Shown beside every result."""
    sources: Annotated[list[str], Field(min_length=1)]
    """Where the numbers come from, one sentence each."""
    gpu: GpuProfile | None = None
    """Needed by `tune`."""
    model: ModelProfile | None = None
    """Needed by `tune`."""
    engine: EngineProfile
    learner: LearnerProfile
    weights: WeightsProfile
    workload: WorkloadProfile
    driver: DriverProfile = DriverProfile()
    failures: FailureProfile = FailureProfile()

    @model_validator(mode="after")
    def _rules(self) -> Profile:
        if (self.gpu is None) != (self.model is None):
            raise ValueError("`gpu` and `model` belong together: give both or neither")
        return self


def load_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, broken rule.
    """
    try:
        return Profile.model_validate(read_tree(path, what="profile"))
    except ValidationError as error:
        lines = [f"the profile {path} is refused:", *problems(error, Profile)]
        raise ConfigError("\n".join(lines)) from None


def dump_profile(profile: Profile) -> str:
    """The profile as YAML that `load_profile` reads back."""
    tree = profile.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
