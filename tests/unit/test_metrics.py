"""Pooling is exact whatever the parts, and no sink ever stops a run."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_async import off_policy
from dapo_async.metrics import (
    METRICS,
    JsonlSink,
    Pool,
    TensorBoardSink,
    describe,
    eval_metrics,
    group_metrics,
    read_jsonl,
)
from dapo_async.types import DrawId, EvalReport, GroupMeta, LeaseId

REPO = Path(__file__).resolve().parents[2]

# ---- pooling ---------------------------------------------------------------------------------


def test_shares_are_pooled_over_tokens_not_averaged_over_micro_batches() -> None:
    pool = Pool()
    for clipped, tokens in [(1, 10), (9, 90), (2, 2)]:
        pool.mean("share", clipped, tokens)
    assert pool.result() == {"share": 12 / 102}
    assert pool.result()["share"] != pytest.approx((0.1 + 0.1 + 1.0) / 3)


def test_a_part_of_weight_zero_changes_nothing_and_alone_gives_no_value() -> None:
    pool = Pool()
    pool.mean("share", 0.0, 0.0)
    assert pool.result() == {}
    pool.mean("share", 3.0, 4.0)
    pool.mean("share", 0.0, 0.0)
    pool.each("share", [])
    assert pool.result() == {"share": 0.75}


def test_sums_and_extremes_are_kept_as_they_are() -> None:
    pool = Pool()
    for value in (3.0, -7.0, 5.0):
        pool.sum("sum", value)
        pool.max("max", value)
        pool.min("min", value)
        pool.each("mean", [value])
    assert pool.result() == {"max": 5.0, "mean": 1 / 3, "min": -7.0, "sum": 1.0}


def test_a_maximum_of_negative_values_is_not_zero() -> None:
    pool = Pool()
    pool.max("max", -2.0)
    assert pool.result() == {"max": -2.0}


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_is_never_hidden(values: list[float]) -> None:
    pool = Pool()
    for value in values:
        pool.max("max", value)
        pool.min("min", value)
        pool.sum("sum", value)
        pool.each("mean", [value])
    assert all(math.isnan(value) for value in pool.result().values())
    assert len(pool.result()) == 4


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"`a/b`: weight .* must be finite and ≥ 0"):
        Pool().mean("a/b", 1.0, weight)


def test_a_name_keeps_its_kind() -> None:
    pool = Pool()
    pool.sum("a/b", 1.0)
    with pytest.raises(ValueError, match="`a/b` is a sum and can't become a mean"):
        pool.mean("a/b", 1.0, 1.0)


@given(
    values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_any_split_over_ranks_in_any_order_gives_the_same_result(
    values: list[int], cuts: list[int], order: Any
) -> None:
    edges = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    parts: list[Pool] = []
    for low, high in itertools.pairwise(edges):
        part = Pool()
        part.each("mean", values[low:high])
        part.sum("sum", sum(values[low:high]))
        part.max("max", max(values[low:high]))
        part.min("min", min(values[low:high]))
        parts.append(Pool(part.entries()))
    order.shuffle(parts)
    whole = Pool()
    for part in parts:
        whole.merge(part)
    assert whole.result() == {
        "max": max(values),
        "mean": sum(values) / len(values),
        "min": min(values),
        "sum": sum(values),
    }


def meta(position: int, lengths: list[int], accs: list[float], **over: Any) -> GroupMeta:
    size = len(lengths)
    fields: dict[str, Any] = {
        "lease_id": LeaseId(DrawId("r", 0, position), 0),
        "worker_id": "w0",
        "prompt_tokens": 5,
        "response_tokens_G": tuple(lengths),
        "scores_G": tuple(2 * acc - 1 for acc in accs),
        "accs_G": tuple(accs),
        "penalties_G": (0.0,) * size,
        "statuses_G": ("ok",) * size,
        "finish_reasons_G": ("stop",) * size,
        "reward_sums": {},
        "oldest_version": 0,
        "newest_version": 0,
        "generate_s": 1.0,
        "reward_s": 0.5,
    }
    return GroupMeta(**(fields | over))


def test_groups_of_unequal_size_are_pooled_over_responses() -> None:
    found = group_metrics(
        [
            meta(0, [2, 4], [1.0, 1.0], penalties_G=(0.0, -0.5)),
            meta(1, [0, 9, 9, 40, 6, 6], [0.0] * 6, finish_reasons_G=("stop",) * 5 + ("length",)),
        ]
    ).result()
    assert found["reward/acc_mean"] == 2 / 8
    assert found["reward/score_mean"] == (2 - 6) / 8
    assert found["reward/penalty_mean"] == -0.5 / 8
    assert found["rollout/response_length_mean"] == 76 / 8
    assert found["rollout/response_length_max"] == 40
    assert found["rollout/truncated_share"] == 1 / 8
    assert found["rollout/empty_responses"] == 1
    assert (found["rollout/groups"], found["rollout/tokens"]) == (2, 76)
    assert set(found) <= set(METRICS)


def test_a_failed_judgement_is_no_reward_of_zero() -> None:
    group = meta(0, [2, 2, 2], [1.0, 1.0, 0.0], statuses_G=("ok", "ok", "timeout"))
    found = group_metrics([group]).result()
    assert found["reward/acc_mean"] == 1.0
    assert found["reward/failed_share"] == 1 / 3


def test_numbers_of_the_reward_function_are_pooled_under_its_names() -> None:
    groups = [
        meta(0, [2, 2, 2], [1.0] * 3, reward_sums={"drafts": (5.0, 2.0)}),
        meta(1, [2], [1.0], reward_sums={"drafts": (4.0, 2.0)}),
    ]
    found = group_metrics(groups).result()
    assert found["reward/drafts"] == 9 / 4
    assert describe("reward/drafts") is not None


def test_no_group_gives_no_metric() -> None:
    assert group_metrics([]).result() == {}


# ---- names -----------------------------------------------------------------------------------


def test_every_metric_name_is_a_group_and_a_word_with_one_line_of_meaning() -> None:
    for name, meaning in METRICS.items():
        group, _, word = name.partition("/")
        assert group.replace("_", "").isalpha() and word.replace("_", "").isalnum(), name
        assert 10 < len(meaning) < 110 and "\n" not in meaning, name
        assert not meaning.endswith("."), name


def test_every_metric_of_the_off_policy_correction_has_a_meaning() -> None:
    import torch

    from dapo_async.config import OffPolicyConfig

    logprobs_T = torch.tensor([-1.0, -2.0])
    correction = off_policy.correct(
        OffPolicyConfig(),
        behavior_logprobs_T=logprobs_T,
        proximal_logprobs_T=logprobs_T,
        mask_T=torch.ones(2, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 2]),
        staleness_S=[1],
        max_staleness=1,
    )
    sums, maxima = correction.read()
    named = {name.replace("weight_sq", "ess") for name in [*sums, *maxima]}
    assert [name for name in sorted(named) if describe(name) is None] == []


def test_a_name_nobody_knows_has_no_meaning() -> None:
    assert describe("train/nonsense") is None
    assert describe("policy/nonsense/staleness_1") is None
    assert describe("loss") is None
    assert describe("reward/") is None
    assert describe("filter/below_min_pass") is not None


@pytest.mark.parametrize("greedy", [None, 0.5])
def test_an_evaluation_becomes_metrics(greedy: float | None) -> None:
    report = EvalReport(
        version=7,
        n=4,
        correct=1,
        acc=0.25,
        low=0.05,
        high=0.7,
        greedy_acc=greedy,
        mean_length=8.5,
        truncated=0.25,
    )
    found = eval_metrics(report)
    assert found["eval/acc"] == 0.25
    assert found.get("eval/greedy_acc") == greedy
    assert set(found) <= set(METRICS)


# ---- JSONL -----------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_each_step_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new" / "metrics.jsonl")
    sink.write(1, 0.12345, {"learner/loss": 0.5, "train/tokens": 17})
    assert lines(sink.path) == [
        {"step": 1, "time_s": 0.123, "learner/loss": 0.5, "train/tokens": 17}
    ]
    sink.write(2, 1.0, {})
    assert len(lines(sink.path)) == 2
    sink.close()


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, 0.0, {"a/b": np.float32(0.5), "a/c": np.int64(3)})  # type: ignore[dict-item]
    sink.close()
    assert lines(sink.path)[0]["a/b"] == 0.5
    assert lines(sink.path)[0]["a/c"] == 3


def test_values_json_does_not_have_are_null_named_and_counted(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, 0.0, {"a/ok": 1.0, "a/nan": math.nan, "a/inf": -math.inf})
    sink.write(2, 0.0, {"a/ok": 1.0, "a/nan": math.nan, "a/inf": 2.0})
    sink.close()
    first, second = lines(sink.path)
    assert (first["a/ok"], first["a/nan"], first["a/inf"]) == (1.0, None, None)
    assert first["non_finite"] == ["a/inf", "a/nan"]
    assert second["non_finite"] == ["a/nan"]
    assert sink.non_finite == {"a/nan": 2, "a/inf": 1}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_costs_one_warning_and_no_run(caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonlSink(Path("/dev/full"))
    for step in range(5):
        sink.write(step, 0.0, {"a/b": 1.0})
    sink.close()
    assert len(warnings_in(caplog)) == 1
    assert "/dev/full" in warnings_in(caplog)[0]
    assert sink.lost_lines == 5


def test_a_closed_file_costs_one_warning_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.close()
    sink.write(1, 0.0, {"a/b": 1.0})
    sink.write(2, 0.0, {"a/b": 1.0})
    sink.close()
    assert len(warnings_in(caplog)) == 1


def test_a_folder_that_cannot_be_made_costs_one_warning_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    sink = JsonlSink(tmp_path / "file" / "metrics.jsonl")
    sink.write(1, 0.0, {"a/b": 1.0})
    sink.close()
    assert len(warnings_in(caplog)) == 1


def test_after_a_disk_was_full_later_lines_are_whole_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Filling:
        """A disk that takes a few bytes of the second line, then none of the third."""

        def __init__(self, file: Any) -> None:
            self.file = file
            self.calls = 0

        def write(self, data: bytes) -> int:
            self.calls += 1
            if self.calls == 2:
                return int(self.file.write(data[:9]))
            if self.calls == 3:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data))

        def close(self) -> None:
            self.file.close()

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink._file = Filling(sink._file)  # a real full disk can't be had here
    for step in range(1, 6):
        sink.write(step, 0.0, {"a/b": float(step)})
    sink.close()
    assert [row["step"] for row in read_jsonl(sink.path)] == [1, 4, 5]
    assert len(warnings_in(caplog)) == 1
    assert sink.lost_lines == 2


def test_a_line_torn_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a/b": 1.0}\n{"step": 2, "a/')
    sink = JsonlSink(path)
    sink.write(3, 0.0, {"a/b": 3.0})
    sink.close()
    assert [row["step"] for row in read_jsonl(path)] == [1, 3]


def test_appending_to_whole_lines_adds_no_empty_line(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.write(step, 0.0, {})
        sink.close()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_resumed_run_forgets_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 8):
        sink.write(step, 0.0, {"a/b": 1.0})
    sink.close()
    sink = JsonlSink(path, resume_step=4)
    sink.write(5, 0.0, {"a/b": 2.0})
    sink.close()
    found = [(row["step"], row["a/b"]) for row in lines(path)]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_reading_merges_the_lines_of_a_step_and_skips_what_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2, "a/b": 1}\nnonsense\n[3]\n{"a/b": 4}\n{"step": true}\n\n'
        '{"step": 1, "a/b": 9}\n{"step": 2, "a/c": 5}\n{"step": 2, "a/b": 7}\n'
    )
    assert read_jsonl(path) == [{"step": 1, "a/b": 9}, {"step": 2, "a/b": 7, "a/c": 5}]


# ---- TensorBoard -----------------------------------------------------------------------------


def events(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    (file,) = folder.iterdir()
    return [event_pb2.Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]


def test_tensorboard_reads_back_every_scalar(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tb")
    sink.write(1, 0.0, {"a/b": 0.5, "a/c": math.nan})
    sink.write(2, 0.0, {"a/b": 0.25})
    found = events(tmp_path / "tb")  # before close: nothing waits in a buffer
    sink.close()
    assert found[0].file_version == "brain.Event:2"
    scalars = [(e.step, v.tag, v.simple_value) for e in found[1:] for v in e.summary.value]
    assert scalars[0] == (1, "a/b", 0.5)
    assert scalars[1][1] == "a/c" and math.isnan(scalars[1][2])
    assert scalars[2] == (2, "a/b", 0.25)


def test_tensorboard_that_cannot_be_written_costs_one_warning_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    sink = TensorBoardSink(tmp_path / "file" / "tb")
    sink.write(1, 0.0, {"a/b": 1.0})
    sink.write(2, 0.0, {"a/b": 1.0})
    sink.close()
    assert len(warnings_in(caplog)) == 1


def test_tensorboard_that_breaks_later_costs_one_warning_and_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = TensorBoardSink(tmp_path / "tb")
    sink._writer.close()
    sink.write(1, 0.0, {"a/b": 1.0})
    sink.write(2, 0.0, {"a/b": 1.0})
    sink.close()
    assert len(warnings_in(caplog)) == 1


def test_metrics_need_no_heavy_library(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dapo_async import metrics; "
        "early = [m for m in ('torch', 'tensorboard') if m in sys.modules]; "
        f"metrics.TensorBoardSink(Path({str(tmp_path)!r})).write(1, 0.0, {{'a/b': 1.0}}); "
        "print(early, [m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    answer = subprocess.run(
        command, check=False, cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "[] []", answer.stderr
