"""The training step in plain torch, for comparison: one forward per sample, the loss written out
from its formula, AdamW on all parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dapo_async.config import Config
from dapo_async.types import Batch, DrawId, Group

Work = list[tuple[Batch, dict[DrawId, Group]]]


def scored(model: Any, group: Group, index: int, temperature: float) -> Tensor:
    """Log-probs of one response, by the whole vocabulary's softmax; one forward, no padding."""
    response = group.trajectories[index].completion.token_ids_T
    prompt = group.prompt_token_ids
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0] / temperature
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0]


def sample_loss(
    current: Tensor, proximal: Tensor, behavior: Tensor, advantage: float, per_token: bool
) -> Tensor:
    """−min(w, 2)·min(r·A, clip(r, .8, 1.28)·A), dual clip 3; summed, or the mean of the tokens."""
    weight = (proximal - behavior).exp().clamp(max=2.0)
    ratio = (current - proximal).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    if advantage < 0:
        loss = loss.clamp(max=-3 * advantage)
    total = (weight * loss).sum()
    return total if per_token else total / len(loss)


def reference(
    path: str, config: Config, work: Work, temperature: float, aggregation: str = "token_mean"
) -> dict[str, Tensor]:
    """The parameters after training these batches from the start, by `config.learner`'s AdamW."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    learner = config.learner
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1.0,
        betas=(learner.betas[0], learner.betas[1]),
        eps=learner.eps,
        weight_decay=learner.weight_decay,
    )
    for batch, groups in work:
        with torch.no_grad():
            proximal = {
                (draw, index): scored(model, group, index, temperature)
                for draw, group in groups.items()
                for index in range(len(group.trajectories))
            }
        for minibatch in batch.minibatches:
            refs = [ref for rank in minibatch.micro_batches for micro in rank for ref in micro]
            losses: list[Tensor] = []
            for ref in refs:
                group, index = groups[ref.draw_id], ref.trajectory_index
                current = scored(model, group, index, temperature)
                behavior = torch.tensor(group.trajectories[index].completion.logprobs_T)
                per_token = aggregation != "sequence_mean_token_mean"
                losses.append(
                    sample_loss(
                        current, proximal[ref.draw_id, index], behavior, ref.advantage, per_token
                    )
                )
            tokens = sum(len(proximal[ref.draw_id, ref.trajectory_index]) for ref in refs)
            count = tokens if aggregation == "token_mean" else len(refs)
            optimizer.zero_grad()
            (torch.stack(losses).sum() / count).backward()
            if learner.grad_clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), learner.grad_clip)
            optimizer.param_groups[0]["lr"] = batch.lr
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def initial(path: str) -> dict[str, Tensor]:
    """The parameters that training starts from."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], path: str) -> float:
    """|found − expected| over the length of the way from the start to expected."""
    start = initial(path)
    assert found.keys() == expected.keys() == start.keys()
    gap = sum(float((found[name] - expected[name]).double().square().sum()) for name in start)
    way = sum(float((expected[name] - start[name]).double().square().sum()) for name in start)
    return (gap / way) ** 0.5
