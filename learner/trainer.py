"""The learner's training step on DeepSpeed ZeRO-1: one `Trainer` per rank.

    step(batch, groups)
      1  check      every sample of this rank's share; one bad sample refuses the step on all ranks
      2  proximal   log-probs at the start of the step, where they don't come free (see below)
      3  per minibatch, the unit of one optimizer update:
           forward, off-policy correction, loss, backward   per micro-batch, gradients stay local
           agree      all ranks finite? else all skip, and nothing changes
           update     gradients are averaged over ranks, clipped, AdamW
      4  report     one collective over sums and maxima: equal on every rank

The first minibatch of a step is the policy at the start of the step, so its proximal log-probs
are those of its own forward and its ratio is exactly 1. With `proximal: recompute` the later
minibatches get a forward without gradient before the first update; further epochs use the same
values again.

Shape suffixes: S samples of a micro-batch, R their response tokens.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn

from dapo_async import off_policy
from dapo_async.config import Config
from dapo_async.errors import ConfigError, DivergedError, GateError, RunError
from dapo_async.loss import LossParams, LossSums, policy_loss, proximal_logprobs
from dapo_async.types import Batch, DrawId, Group, Minibatch, SampleRef, StepReport
from learner.model import Policy, load_policy
from learner.samples import MicroBatch, SampleKey, build, check_share

REDUCE_BUCKET = 50_000_000
"""Elements of one gradient all-reduce."""

# What a rank tells the others when it refuses its share; the worst is raised everywhere.
_REFUSALS: tuple[type[RunError], ...] = (RunError, ConfigError, GateError)


@dataclass(slots=True)
class _Pool:
    """Sums, weights and maxima of a step, pooled over micro-batches and then over ranks."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    maxima: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, sums: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, weight) in sums.items():
            old_total, old_weight = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (old_total + total, old_weight + weight)

    def raise_to(self, maxima: Mapping[str, float]) -> None:
        for name, value in maxima.items():
            self.maxima[name] = max(value, self.maxima.get(name, value))

    def over_ranks(self, world: int, device: torch.device) -> _Pool:
        """One collective. The names follow from the config, so every rank has the same."""
        names, tops = sorted(self.sums), sorted(self.maxima)
        flat = [x for name in names for x in self.sums[name]] + [self.maxima[top] for top in tops]
        mine = torch.tensor(flat, dtype=torch.float64, device=device)
        ranks = [torch.empty_like(mine) for _ in range(world)]
        torch.distributed.all_gather(ranks, mine)
        table = torch.stack(ranks)
        split = 2 * len(names)
        pairs = table[:, :split].sum(0).view(-1, 2).tolist()
        return _Pool(
            sums={
                name: (total, weight) for name, (total, weight) in zip(names, pairs, strict=True)
            },
            maxima=dict(zip(tops, table[:, split:].amax(0).tolist(), strict=True)),
        )

    def metrics(self) -> dict[str, float]:
        """Pooled means (of what was measured at all), maxima, effective sample sizes."""
        found = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        squares = [name for name in found if "/weight_sq" in name]
        for name in squares:
            plain, share = (name.replace("weight_sq", new) for new in ("weight", "ess"))
            found[share] = off_policy.effective_share(self.sums[plain], self.sums[name])
            del found[name]
        tops = {
            name: value
            for name, value in self.maxima.items()
            if name.replace("weight_max", "weight") in found or "weight_max" not in name
        }
        return found | tops


class Trainer:
    """One learner rank: the model, its ZeRO-1 optimizer and the training step.

    Args:
        rank, world: of the data-parallel group; with `world` > 1 every rank makes a Trainer and
            calls the same methods in the same order.
        master_addr, master_port: where rank 0 is met; not used when torch.distributed is already
            initialised.
        model_path: instead of `config.model.path` (a checkpoint's model).
        version: completed steps (after a resume).

    Raises:
        ConfigError: a model that can't be loaded or isn't supported, or no GPU for
            `learner.device: cuda`.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world: int = 1,
        *,
        master_addr: str = "127.0.0.1",
        master_port: int | None = None,
        model_path: str | None = None,
        version: int = 0,
    ) -> None:
        self.config = config
        self.rank, self.world = rank, world
        self.version = version
        self.torn = False
        """Weights between two versions: a step was updating, or failed after an update."""
        self.skipped_in_a_row = 0
        if config.learner.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "`learner.device: cuda` needs a GPU, and torch "
                f"{torch.__version__} sees none in rank {rank}"
            )
        torch.set_num_threads(config.learner.threads_per_rank)
        self._owns_group = not torch.distributed.is_initialized()
        bf16 = config.learner.precision == "bf16"
        policy = load_policy(
            model_path or config.model.path,
            config.model.attention,
            torch.bfloat16 if bf16 else torch.float32,
            chunk=config.learner.logprob_chunk,
        )
        self.engine: Any = _start_engine(config, policy, rank, world, master_addr, master_port)
        self.device = torch.device(self.engine.device)

    @property
    def policy(self) -> Policy:
        return cast(Policy, self.engine.module)

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model with the current weights, whole on every rank."""
        return self.policy.model

    # ---- the step ----------------------------------------------------------------------------

    def step(self, batch: Batch, groups: Mapping[DrawId, Group]) -> StepReport:
        """Train one batch; `groups` holds at least the groups of this rank's samples.

        Every rank returns an equal report. The version goes up by one.

        Raises:
            GateError, ConfigError, RunError: a sample that must not be trained (see
                `learner.samples`); raised on all ranks, nothing was trained.
            DivergedError: `learner.max_skipped_updates` updates in a row were not finite.
        """
        share = self._check(batch, groups)
        built: dict[tuple[SampleRef, ...], MicroBatch] = {}
        plan: list[list[MicroBatch]] = []
        for minibatch in batch.minibatches:
            plan.append([])
            for refs in minibatch.micro_batches[self.rank]:
                if refs not in built:  # every epoch repeats the same micro-batches
                    built[refs] = self._to_device(build(batch, groups, refs))
                plan[-1].append(built[refs])
        pool = self._empty_pool()
        self._count_samples(pool, share, batch.version, groups)
        proximal = self._recompute(plan)
        skipped = 0
        for index, micro_batches in enumerate(plan):
            started = index > 0
            minibatch = batch.minibatches[index]
            applied = self._update(batch, minibatch, micro_batches, proximal, started, pool)
            skipped += not applied
        return self._report(batch, pool, skipped)

    def _check(self, batch: Batch, groups: Mapping[DrawId, Group]) -> list[SampleRef]:
        """This rank's samples, each once.

        Ranks refuse together: one that stopped alone would leave the others waiting.
        """
        refusal: RunError | None = None
        share: list[SampleRef] = []
        try:
            _check_plan(batch, self.version, self.world)
            once: dict[SampleKey, SampleRef] = {
                (ref.draw_id, ref.trajectory_index): ref
                for minibatch in batch.minibatches
                for refs in minibatch.micro_batches[self.rank]
                for ref in refs
            }
            share = list(once.values())
            check_share(self.config, batch, groups, share, self.policy.vocab_size)
        except RunError as error:
            refusal = error
        code = 0 if refusal is None else 1 + _REFUSALS.index(type(refusal))
        worst = self._highest(code)
        if refusal is not None:
            raise refusal
        if worst:
            raise _REFUSALS[worst - 1](
                f"another learner rank refused its share of batch {batch.version}"
            )
        return share

    def _recompute(self, plan: Sequence[Sequence[MicroBatch]]) -> dict[SampleKey, Tensor]:
        """Proximal log-probs of all samples that are first trained after an update."""
        proximal: dict[SampleKey, Tensor] = {}
        if self.config.algorithm.proximal != "recompute" or len(plan) == 1:
            return proximal
        first = {key for micro in plan[0] for key in micro.keys_S}
        for micro in (micro for minibatch in plan[1:] for micro in minibatch):
            if all(key in first or key in proximal for key in micro.keys_S):
                continue
            with torch.no_grad():
                logprobs_R, _ = self.policy(micro.packed, micro.temperature)
            _remember(proximal, micro, logprobs_R)
        return proximal

    def _update(
        self,
        batch: Batch,
        minibatch: Minibatch,
        micro_batches: Sequence[MicroBatch],
        proximal: dict[SampleKey, Tensor],
        started: bool,
        pool: _Pool,
    ) -> bool:
        """One optimizer update; False: all ranks skipped it, nothing has changed."""
        scale = self.world / minibatch.denominator
        losses: list[Tensor] = []
        for micro in micro_batches:
            loss, corrections, sums = self._micro_step(batch, micro, proximal, started, scale)
            losses.append(loss)
            totals, maxima = corrections.read()
            pool.add(totals)
            pool.raise_to(maxima)
            pool.add(sums.read())
        loss = float(torch.stack(losses).double().sum()) / minibatch.denominator
        fine = math.isfinite(loss) and self._gradients_finite()
        if self._highest(0 if fine else 1):
            # Not reduced yet: dropping the local gradients undoes the whole minibatch.
            self.engine.optimizer.zero_grad()
            return self._skip(batch)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = batch.lr
        before, self.torn = self.torn, True
        self.engine.step()
        if not self.engine.was_step_applied():  # finite on every rank, but the sum was not
            self.torn = before
            return self._skip(batch)
        self.skipped_in_a_row = 0
        norm = float(self.engine.get_global_grad_norm())
        one = 1.0 / self.world
        pool.add({"learner/loss": (loss, one), "learner/grad_norm": (norm * one, one)})
        pool.raise_to({"learner/grad_norm_max": norm})
        return True

    def _micro_step(
        self,
        batch: Batch,
        micro: MicroBatch,
        proximal: dict[SampleKey, Tensor],
        started: bool,
        scale: float,
    ) -> tuple[Tensor, off_policy.Correction, LossSums]:
        current_R, entropy_R = self.engine(micro.packed, micro.temperature, entropy=True)
        recompute = self.config.algorithm.proximal == "recompute"
        known_R = None
        if recompute and started and micro.keys_S:
            known_R = torch.cat([proximal[key] for key in micro.keys_S])
        elif recompute:
            _remember(proximal, micro, current_R.detach())
        proximal_R = proximal_logprobs(
            self.config.algorithm.proximal,
            behavior_logprobs_T=micro.behavior_R,
            current_logprobs_T=current_R,
            staleness_T=micro.token_staleness_R,
            recomputed_logprobs_T=known_R,
        )
        correction = off_policy.correct(
            self.config.off_policy,
            behavior_logprobs_T=micro.behavior_R,
            proximal_logprobs_T=proximal_R,
            mask_T=micro.mask_R,
            cu_seqlens=micro.cu_seqlens,
            staleness_S=micro.staleness_S,
            max_staleness=self.config.replay.max_staleness,
        )
        sums = policy_loss(
            LossParams(
                clip_low=batch.clip_low,
                clip_high=batch.clip_high,
                dual_clip=self.config.algorithm.dual_clip,
                aggregation=self.config.algorithm.aggregation,
            ),
            current_logprobs_T=current_R,
            proximal_logprobs_T=proximal_R,
            advantages_T=micro.advantages_R,
            mask_T=micro.mask_R,
            cu_seqlens=micro.cu_seqlens,
            weight_T=correction.weight_T,
            keep_T=correction.keep_T,
            entropy_T=entropy_R,
        )
        self.engine.backward(sums.loss * scale, scale_wrt_gas=False)
        return sums.loss.detach(), correction, sums

    # ---- agreement ---------------------------------------------------------------------------

    def _highest(self, code: int) -> int:
        """The highest code of all ranks."""
        flag = torch.tensor([code], device=self.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return int(flag)

    def _gradients_finite(self) -> bool:
        """This rank's gradients, before they are averaged over ranks."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "get_grads_for_reduction"):  # bf16: float32 gradients beside it
            grads = list(optimizer.get_grads_for_reduction()[0])
        else:
            parameters = self.engine.module.parameters()
            grads = [optimizer.get_gradient_for_reduction(p) for p in parameters]
        norms = torch._foreach_norm([grad for grad in grads if grad is not None])  # pyright: ignore[reportPrivateUsage]
        return bool(torch.stack(norms).isfinite().all())

    def _skip(self, batch: Batch) -> bool:
        self.skipped_in_a_row += 1
        limit = self.config.learner.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            raise DivergedError(
                f"loss or gradient was not finite in {self.skipped_in_a_row} updates in a row, up "
                f"to version {batch.version} (`learner.max_skipped_updates: {limit}`)"
            )
        return False

    # ---- the report --------------------------------------------------------------------------

    def _empty_pool(self) -> _Pool:
        names = ["learner/loss", "learner/grad_norm", "learner/tokens", "learner/trained_tokens"]
        names += ["learner/samples", "learner/empty_responses"]
        names += [f"staleness/{n}" for n in range(self.config.replay.max_staleness + 1)]
        return _Pool(sums=dict.fromkeys(names, (0.0, 0.0)), maxima={"learner/grad_norm_max": 0.0})

    def _count_samples(
        self, pool: _Pool, share: Sequence[SampleRef], version: int, groups: Mapping[DrawId, Group]
    ) -> None:
        """Counts of each sample once, however many epochs train it: sums of weight 0."""
        counts: Counter[str] = Counter()
        for ref in share:
            completion = groups[ref.draw_id].trajectories[ref.trajectory_index].completion
            counts["learner/samples"] += 1
            counts["learner/tokens"] += ref.tokens
            if len(completion.versions_T):
                counts["learner/trained_tokens"] += ref.trained * len(completion.token_ids_T)
                counts[f"staleness/{version - int(completion.versions_T.min())}"] += 1
            else:
                counts["learner/empty_responses"] += 1
        pool.add({name: (count, 0.0) for name, count in counts.items()})

    def _report(self, batch: Batch, pool: _Pool, skipped: int) -> StepReport:
        pooled = pool.over_ranks(self.world, self.device)
        counts = {name: total for name, (total, weight) in pooled.sums.items() if not weight}
        staleness = {
            n: int(counts.get(f"staleness/{n}", 0))
            for n in range(self.config.replay.max_staleness + 1)
        }
        metrics = pooled.metrics()
        for name in ("learner/tokens", "learner/samples", "learner/empty_responses"):
            metrics[name] = counts[name]
        metrics["learner/lr"] = batch.lr
        metrics["learner/skipped_updates"] = float(skipped)
        self.version, self.torn = batch.version + 1, False
        return StepReport(
            version=self.version,
            metrics=metrics,
            trained_tokens=int(counts["learner/trained_tokens"]),
            staleness={n: count for n, count in staleness.items() if count},
            skipped_updates=skipped,
        )

    def _to_device(self, micro: MicroBatch) -> MicroBatch:
        if self.device.type == "cpu":
            return micro
        from dataclasses import fields, replace

        moved = {
            f.name: value.to(self.device)
            for f in fields(micro)
            if isinstance(value := getattr(micro, f.name), Tensor)
        }
        return replace(micro, packed=micro.packed.to(self.device), **moved)

    def close(self) -> None:
        """Free the engine, and the process group if this trainer made it: DeepSpeed can't start
        in this process again then."""
        self.engine.destroy()
        if self._owns_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _remember(proximal: dict[SampleKey, Tensor], micro: MicroBatch, logprobs_R: Tensor) -> None:
    if micro.keys_S:
        parts = logprobs_R.split(micro.packed.response_lengths_S)
        for key, part in zip(micro.keys_S, parts, strict=True):
            proximal[key] = part


def _check_plan(batch: Batch, version: int, world: int) -> None:
    if batch.version != version:
        raise GateError(f"a batch for version {batch.version} came to a learner at {version}")
    for index, minibatch in enumerate(batch.minibatches):
        counts = [len(rank) for rank in minibatch.micro_batches]
        if len(counts) != world or len(set(counts)) != 1 or counts[0] == 0:
            raise GateError(
                f"minibatch {index} of batch {version} has micro-batches {counts} for {world} "
                "ranks: every rank needs the same number, at least one"
            )
        if not minibatch.denominator > 0:
            raise GateError(
                f"minibatch {index} of batch {version}: denominator {minibatch.denominator}"
            )


def _start_engine(
    config: Config,
    policy: Policy,
    rank: int,
    world: int,
    master_addr: str,
    master_port: int | None,
) -> Any:
    on_gpu = config.learner.device == "cuda"
    os.environ["DS_ACCELERATOR"] = config.learner.device  # else DeepSpeed takes a GPU it finds
    local = rank % torch.cuda.device_count() if on_gpu else rank
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR=master_addr,
    )
    if master_addr == "127.0.0.1":
        # Otherwise gloo listens on the interface of the host's name, which others may reach.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    backend = "nccl" if on_gpu else "gloo"
    timeout = timedelta(seconds=config.learner.step_timeout_s)
    if not torch.distributed.is_initialized():
        store = _store(rank, world, master_addr, master_port, timeout)
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timeout
        )
    with warnings.catch_warnings():
        # DeepSpeed's start meets deprecations within torch, which are not ours to mend.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return _initialize(config, policy, backend, timeout)


def _store(
    rank: int, world: int, master_addr: str, master_port: int | None, timeout: timedelta
) -> Any:
    """Where the ranks meet. By itself torch listens on every interface; this one listens on
    `master_addr` only, and a single rank not at all."""
    if world == 1:
        return torch.distributed.HashStore()
    if master_port is None:
        raise ValueError(f"master_port is needed for {world} ranks to meet")
    if rank > 0:
        return torch.distributed.TCPStore(
            master_addr, master_port, world, is_master=False, timeout=timeout
        )
    listener = socket.create_server((master_addr, master_port))
    return torch.distributed.TCPStore(
        master_addr,
        master_port,
        world,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _initialize(config: Config, policy: Policy, backend: str, timeout: timedelta) -> Any:
    import deepspeed  # pyright: ignore[reportMissingTypeStubs]

    ds: Any = deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Otherwise starting on gloo compiles an extension, which takes a minute and a compiler.
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ds.init_distributed(
        dist_backend=backend,
        timeout=timeout,
        verbose=False,
    )
    engine, *_ = ds.initialize(
        model=policy, model_parameters=policy.parameters(), config=_engine_config(config, policy)
    )
    return engine


def _engine_config(config: Config, policy: Policy) -> dict[str, Any]:
    learner = config.learner
    numel = sum(parameter.numel() for parameter in policy.parameters())
    settings: dict[str, Any] = {
        # The losses are summed and divided by us: DeepSpeed must not average over micro-batches.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": learner.grad_clip or 0.0,
        "zero_optimization": {
            "stage": learner.zero_stage,
            "reduce_bucket_size": min(numel + 1, REDUCE_BUCKET),
            "contiguous_gradients": False,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learner.lr,
                "betas": list(learner.betas),
                "eps": learner.eps,
                "weight_decay": learner.weight_decay,
                # The fused CPU kernel would be compiled at the first start, for minutes.
                "torch_adam": True,
            },
        },
        "steps_per_print": 10**9,
    }
    if learner.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        # Gradients of many micro-batches are summed: bfloat16 has too few digits for that.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
