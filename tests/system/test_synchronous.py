"""`max_staleness: 0` is the synchronous run: bit for bit a plain sequential loop.

The reference has no queue, no Ray, no pipeline: draw, generate one group after another, filter and
refill, update, load the weights. Engine and learner are the same.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_async import app, batching, dapo
from dapo_async.codec import decode_any, encode
from dapo_async.config import Config, validate
from dapo_async.inputs import Inputs, read_here
from dapo_async.prompts import PromptSource
from dapo_async.types import Batch, DrawId, Group, GroupMeta, LeaseId, Trajectory
from tests.system.conftest import tiny_run
from tests.system.plain_torch import Work, distance, reference

pytestmark = [pytest.mark.system, pytest.mark.long]


def deterministic_run(tiny: Path, folder: Path, name: str = "sync", **learner: Any) -> Config:
    return validate(
        tiny_run(
            tiny,
            name,
            folder,
            rollout={"deterministic": True},
            replay={"max_staleness": 0},
            off_policy={"action": "truncate"},
            learner=learner,
        )
    )


def sequential_reference(config: Config, out: str) -> None:
    """Runs in a process of its own: the same engine and DeepSpeed as the real run."""
    torch.set_num_threads(1)
    asyncio.run(_sequential(config, read_here(config), Path(out)))


async def _sequential(config: Config, inputs: Inputs, out: Path) -> None:
    from actors.torch_engine import TorchEngine
    from dapo_async.weights import WeightStore
    from learner.publisher import Publisher
    from learner.trainer import Trainer
    from tests.system.coin import even_sum

    engine = TorchEngine.from_path(
        config.model.path,
        stop_token_ids=inputs.stop_ids,
        slots=config.rollout.slots,
        max_context=16 + 12,
        deterministic=True,
        threads=1,
    )
    await engine.start()
    trainer = Trainer(config)
    tokenizer = _tokenizer(config)
    source = PromptSource(inputs.train, seed=config.run.seed)
    trained: list[bytes] = []
    with WeightStore.create() as store:
        publisher = Publisher(store)
        for version in range(config.trainer.steps):
            metas: list[GroupMeta] = []
            groups: dict[DrawId, Group] = {}
            while len(metas) < 4:
                epoch, position, prompt = source.draw()
                draw_id = DrawId(config.run.name, epoch, position)
                draw = batching.stamp_draw(config, draw_id, prompt, inputs.stop_ids, version)
                completions = await engine.generate(
                    f"{position}", prompt.token_ids, draw.group_size, draw.sampling
                )
                texts = [
                    tokenizer.decode(c.token_ids_T.tolist(), skip_special_tokens=True)
                    for c in completions
                ]
                accs = [float(even_sum(prompt, text, False)) for text in texts]
                if not dapo.is_informative(accs):
                    continue
                lengths = [int(c.token_ids_T.size) for c in completions]
                penalties = [dapo.overlong_penalty(n, 12, "soft", 4, 1.0) for n in lengths]
                lease_id = LeaseId(draw_id, 0)
                metas.append(
                    GroupMeta(
                        lease_id=lease_id,
                        worker_id="reference",
                        prompt_tokens=len(prompt.token_ids),
                        response_tokens_G=tuple(lengths),
                        scores_G=tuple(accs),
                        accs_G=tuple(accs),
                        penalties_G=tuple(penalties),
                        statuses_G=("ok",) * 4,
                        finish_reasons_G=tuple(c.finish_reason for c in completions),
                        reward_sums={},
                        oldest_version=version,
                        newest_version=version,
                        generate_s=0.0,
                        reward_s=0.0,
                    )
                )
                groups[draw_id] = Group(
                    lease_id=lease_id,
                    prompt_token_ids=np.asarray(prompt.token_ids, np.int32),
                    logprob_mode=draw.sampling.logprob_mode,
                    trajectories=tuple(
                        Trajectory(
                            completion=completion,
                            reward=_reward(acc),
                            overlong_penalty=penalty,
                        )
                        for completion, acc, penalty in zip(
                            completions, accs, penalties, strict=True
                        )
                    ),
                )
            batch = batching.plan_batch(config, version, metas)
            assert len(batch.minibatches) == 2
            assert all(len(m.micro_batches[0]) > 1 for m in batch.minibatches)
            trainer.step(batch, groups)
            trained += [encode(record) for record in (batch, *groups.values())]
            manifest = publisher.publish(version + 1, trainer.model).result(30)
            assert await engine.update_weights(manifest) == version + 1
        publisher.close()
    await engine.close()
    state = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    save_file(state, out / "reference.safetensors")
    (out / "trained").mkdir()
    for number, frame in enumerate(trained):
        (out / "trained" / f"{number:04d}").write_bytes(frame)
    trainer.close()


def _tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model.path)


def _reward(acc: float) -> Any:
    from dapo_async.types import Reward

    return Reward(score=acc, acc=acc)


@pytest.fixture(scope="module")
def folder(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real run's checkpoint and the reference's parameters and batches."""
    folder = tmp_path_factory.mktemp("sync")
    config = deterministic_run(tiny, folder)
    context = multiprocessing.get_context("spawn")
    for target, args in ((_real, (config,)), (sequential_reference, (config, str(folder)))):
        process = context.Process(target=target, args=args)
        process.start()
        process.join(240)
        assert process.exitcode == 0, f"{target.__name__} ended with {process.exitcode}"
    return folder


def _real(config: Config) -> None:
    raise SystemExit(app.train(config))


def test_it_is_bit_equal_to_a_sequential_loop(folder: Path) -> None:
    real = load_file(folder / "sync" / "checkpoint" / "model.safetensors")
    expected = load_file(folder / "reference.safetensors")
    shared = expected.keys() & real.keys()
    assert len(shared) == len(real)
    different = [name for name in shared if not torch.equal(real[name], expected[name])]
    assert different == []


def test_plain_torch_on_the_same_batches_ends_at_the_same_parameters(
    tiny: Path, folder: Path
) -> None:
    config = deterministic_run(tiny, folder)
    work: Work = []
    for path in sorted((folder / "trained").iterdir()):
        record = decode_any(path.read_bytes())
        if isinstance(record, Batch):
            work.append((record, {}))
        else:
            work[-1][1][record.lease_id.draw_id] = record
    assert [len(groups) for _, groups in work] == [4, 4, 4]
    real = load_file(folder / "sync" / "checkpoint" / "model.safetensors")
    path = config.model.path
    assert distance(real, reference(path, config, work, temperature=1.0), path) < 1e-4


def test_it_refilled_filtered_groups_and_trained_on_policy(folder: Path) -> None:
    summary = json.loads((folder / "sync" / "summary.json").read_text())
    assert summary["staleness"]["histogram"] == {"0": 48}
    assert sum(summary["ledger"]["filtered"].values()) > 0
    assert summary["ledger"]["trained"] == 12 and summary["ledger"]["live"] == 0
    assert summary["exit_reason"] == "done"


def test_two_ranks_with_a_share_of_every_weight_each_end_at_the_same_parameters(
    tiny: Path, folder: Path
) -> None:
    """Three versions gathered, published and proven by the engine, and a checkpoint."""
    settings = folder / "deepspeed.json"
    settings.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    config = deterministic_run(
        tiny, folder, "shares", ranks=2, zero_stage=3, deepspeed=str(settings)
    )
    process = multiprocessing.get_context("spawn").Process(target=_real, args=(config,))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    found = load_file(folder / "shares" / "checkpoint" / "model.safetensors")
    expected = load_file(folder / "sync" / "checkpoint" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert distance(found, expected, config.model.path) < 1e-3
