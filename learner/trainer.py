"""The learner's training step on DeepSpeed ZeRO: one `Trainer` per rank.

    step(batch, groups)
      1  check      every sample of this rank's share; one bad sample refuses the step on all ranks
      2  proximal   log-probs at the start of the step, where they don't come free (see below)
      3  per minibatch, the unit of one optimizer update:
           forward, off-policy correction, loss, backward   per micro-batch
           agree      is the loss finite on all ranks?
           update     is the gradient? then it is clipped, and AdamW
                      if either isn't, all skip and nothing changes
      4  report     one collective over sums and maxima: equal on every rank

The first minibatch of a step is the policy at the start of the step, so its proximal log-probs
are those of its own forward and its ratio is exactly 1. With `proximal: recompute` the later
minibatches get a forward without gradient before the first update; further epochs use the same
values again.

With `learner.sequence_parallel_size` sp, ranks i·sp … i·sp + sp − 1 are one replica: they get the
same micro-batches and each computes a slice of the tokens (`learner.sequence_parallel`).

Shape suffixes: S samples of a micro-batch, R their response tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dapo_async import off_policy
from dapo_async.config import Config
from dapo_async.errors import ConfigError, DivergedError, GateError, RunError
from dapo_async.loss import LossParams, LossSums, policy_loss, proximal_logprobs
from dapo_async.types import TORCH_NAMES, Batch, DrawId, Group, Minibatch, SampleRef, StepReport
from learner.deepspeed_config import check_device, drop_gradients, start_engine
from learner.model import Policy, load_policy
from learner.pool import Pool
from learner.samples import MicroBatch, SampleKey, build, check_share, log_prob_passes
from learner.sequence_parallel import SequenceParallel, check_heads

# What a rank tells the others when it refuses its share; the worst is raised everywhere.
_REFUSALS: tuple[type[RunError], ...] = (RunError, ConfigError, GateError)


class Trainer:
    """One learner rank: the model, its share of the optimizer and the training step.

    Args:
        rank, world: of all ranks; with `world` > 1 every rank makes a Trainer and calls the same
            methods in the same order.
        master_addr, master_port: where rank 0 is met; not used when torch.distributed is already
            initialised.
        version: completed steps (after a resume).

    Raises:
        ConfigError: a model that can't be loaded, isn't supported or can't be split into
            `learner.sequence_parallel_size`, or settings that this machine can't do.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        world: int = 1,
        *,
        master_addr: str = "127.0.0.1",
        master_port: int | None = None,
        version: int = 0,
    ) -> None:
        self.config = config
        self.rank, self.world = rank, world
        self.version = version
        self.torn = False
        """Weights between two versions: a step was updating, or failed after an update."""
        self.skipped_in_a_row = 0
        learner = config.learner
        check_device(config)
        torch.set_num_threads(learner.threads_per_rank)
        self._owns_group = not torch.distributed.is_initialized()
        policy = load_policy(
            config.model.path,
            config.model.attention,
            getattr(torch, TORCH_NAMES[learner.precision]),
            chunk=learner.logprob_chunk,
            checkpointing=learner.gradient_checkpointing,
        )
        size = learner.sequence_parallel_size
        check_heads(policy.config, size)
        self.replica, self.replicas = rank // size, world // size
        """Which micro-batches are ours, and of how many."""
        self.engine: Any = start_engine(config, policy, rank, world, master_addr, master_port)
        self.device = torch.device(self.engine.device)
        if size > 1:
            policy.sequence_parallel = SequenceParallel(rank, world, size)

    @property
    def policy(self) -> Policy:
        return cast(Policy, self.engine.module)

    @property
    def model(self) -> nn.Module:
        """The Hugging Face model with the current weights: whole on every rank up to ZeRO-2, in
        shares at ZeRO-3 (see `learner.publisher.whole_weights`)."""
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
            for refs in minibatch.micro_batches[self.replica]:
                if refs not in built:  # every epoch repeats the same micro-batches
                    built[refs] = self._to_device(build(batch, groups, refs))
                plan[-1].append(built[refs])
        pool = self._empty_pool()
        self._count_samples(pool, share, batch.version, groups)
        proximal = self._recompute(batch, groups, plan)
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
            _check_plan(batch, self.version, self.replicas)
            once: dict[SampleKey, SampleRef] = {
                (ref.draw_id, ref.trajectory_index): ref
                for minibatch in batch.minibatches
                for refs in minibatch.micro_batches[self.replica]
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

    def _recompute(
        self, batch: Batch, groups: Mapping[DrawId, Group], plan: Sequence[Sequence[MicroBatch]]
    ) -> dict[SampleKey, Tensor]:
        """Proximal log-probs of all samples that are first trained after an update."""
        proximal: dict[SampleKey, Tensor] = {}
        if self.config.algorithm.proximal != "recompute" or len(plan) == 1:
            return proximal
        cap = self.config.learner.logprob_tokens_per_microbatch
        if cap is None:
            first = {key for micro in plan[0] for key in micro.keys_S}
            passes: list[MicroBatch] = []
            for micro in (micro for minibatch in plan[1:] for micro in minibatch):
                if not first.issuperset(micro.keys_S):
                    passes.append(micro)
                    first.update(micro.keys_S)
        else:
            passes = [
                self._to_device(build(batch, groups, refs))
                for refs in log_prob_passes(batch.minibatches, self.replica, cap)
            ]
        if self.config.learner.zero_stage == 3:  # a forward gathers parameters from all ranks
            dummies = self._highest(len(passes)) - len(passes)
            passes += [self._to_device(build(batch, groups, ()))] * dummies
        for micro in passes:
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
        pool: Pool,
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
        if self._highest(0 if math.isfinite(loss) else 1):
            drop_gradients(self.engine)
            return self._skip(batch)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = batch.lr
        before, self.torn = self.torn, True
        self.engine.step()
        if not self.engine.was_step_applied():  # the norm of the whole gradient was not finite
            self.torn = before
            return self._skip(batch)
        self.skipped_in_a_row = 0
        norm = float(self.engine.get_global_grad_norm())
        one = 1.0 / self.replicas
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

    def _empty_pool(self) -> Pool:
        names = ["learner/loss", "learner/grad_norm", "learner/tokens", "learner/trained_tokens"]
        names += ["learner/samples", "learner/empty_responses"]
        names += [f"staleness/{n}" for n in range(self.config.replay.max_staleness + 1)]
        return Pool(sums=dict.fromkeys(names, (0.0, 0.0)), maxima={"learner/grad_norm_max": 0.0})

    def _count_samples(
        self, pool: Pool, share: Sequence[SampleRef], version: int, groups: Mapping[DrawId, Group]
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

    def _report(self, batch: Batch, pool: Pool, skipped: int) -> StepReport:
        pooled = pool.over_ranks(self.world, self.device, self.world // self.replicas)
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
        if self.policy.sequence_parallel is not None:
            self.policy.sequence_parallel.close()
        if self._owns_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _remember(proximal: dict[SampleKey, Tensor], micro: MicroBatch, logprobs_R: Tensor) -> None:
    if micro.keys_S:
        parts = logprobs_R.split(micro.packed.response_lengths_S)
        for key, part in zip(micro.keys_S, parts, strict=True):
            proximal[key] = part


def _check_plan(batch: Batch, version: int, replicas: int) -> None:
    if batch.version != version:
        raise GateError(f"a batch for version {batch.version} came to a learner at {version}")
    for index, minibatch in enumerate(batch.minibatches):
        counts = [len(rank) for rank in minibatch.micro_batches]
        if len(counts) != replicas or len(set(counts)) != 1 or counts[0] == 0:
            raise GateError(
                f"minibatch {index} of batch {version} has micro-batches {counts} for {replicas} "
                "ranks: every rank needs the same number, at least one"
            )
        if not minibatch.denominator > 0:
            raise GateError(
                f"minibatch {index} of batch {version}: denominator {minibatch.denominator}"
            )
