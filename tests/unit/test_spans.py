"""Spans: what is written while a run goes on, and what is left after it was broken off."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from dapo_async import spans as spans_module
from dapo_async.spans import LEARNER, Span, SpanFile, read_spans
from tests.fakes import World
from tests.recorded_run import record

STATES = {"start", "generate", "evaluate", "update", "wait", "idle"}


def lanes(spans: list[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.what in STATES:
            found.setdefault(span.who, []).append(span)
    return found


@pytest.mark.parametrize(
    "world",
    [
        World(steps=8, eval_every=3),
        World(seed=3, steps=8, crash_rate=0.15, workers=3),
        World(seed=4, steps=6, eta=0),
    ],
    ids=["quiet", "crashes", "synchronous"],
)
def test_every_worker_is_in_one_state_at_every_moment_of_the_run(
    tmp_path: Path, world: World
) -> None:
    outcome, _ = record(tmp_path, world)
    assert outcome is not None
    by_worker = lanes(list(read_spans(tmp_path / "spans.jsonl")))
    assert set(by_worker) == {f"worker{i}" for i in range(world.workers)}
    for states in by_worker.values():
        assert states[0].start == 0 and states[0].what == "start"
        assert states[-1].end == pytest.approx(outcome.seconds, abs=1e-5)
        for before, after in pairwise(states):
            assert after.start == before.end
        assert {"generate", "update"} <= {span.what for span in states}


def test_groups_and_steps_agree_with_the_ledger(tmp_path: Path) -> None:
    outcome, _ = record(tmp_path, World(steps=8, crash_rate=0.1))
    assert outcome is not None
    ledger = outcome.pipeline.queue.ledger
    spans = list(read_spans(tmp_path / "spans.jsonl"))
    trains = [span for span in spans if span.what == "train"]
    assert [span.details["step"] for span in trains] == list(range(1, 9))
    trained = [draw for span in trains for draw in span.details["draws"]]
    assert len(trained) == len(set(trained)) == ledger.trained
    outcomes = Counter(span.details["outcome"] for span in spans if span.what == "group")
    assert {kind: outcomes[kind] for kind in ledger.filtered} == dict(ledger.filtered)
    kept = {s.details["draw"] for s in spans if s.details.get("outcome") == "kept"}
    assert set(trained) <= kept


def test_the_learner_does_one_thing_at_a_time(tmp_path: Path) -> None:
    record(tmp_path, World(steps=8, publish_fail_rate=0.3))
    mine = [span for span in read_spans(tmp_path / "spans.jsonl") if span.who == LEARNER]
    assert {"train", "publish", "saved"} <= {span.what for span in mine}
    busy = sorted((span.start, span.end) for span in mine if span.what != "saved")
    for before, after in pairwise(busy):
        assert after[0] >= before[1]


def test_a_synchronous_worker_waits_for_weights_and_a_far_ahead_one_for_a_slot(
    tmp_path: Path,
) -> None:
    def spent(world: World) -> Counter[str]:
        record(tmp_path / str(world.eta), world)
        total: Counter[str] = Counter()
        for span in read_spans(tmp_path / str(world.eta) / "spans.jsonl"):
            total[span.what] += int(1e6 * span.seconds)
        return total

    calm = {"filter_rate": 0.0, "straggler_rate": 0.0, "steps": 12, "train_s": 20.0}
    synchronous = spent(World(eta=0, **calm))  # type: ignore[arg-type]
    ahead = spent(World(eta=8, depth=2.0, **calm))  # type: ignore[arg-type]
    assert synchronous["wait"] > 5 * synchronous["idle"]
    assert ahead["idle"] > 5 * ahead["wait"]


def test_a_resumed_run_counts_no_group_twice(tmp_path: Path) -> None:
    world = World(steps=10)
    broken, saver = record(tmp_path, world, seconds=30.0)
    assert broken is None and saver.kept
    checkpoint = saver.kept[len(saver.kept) // 2]
    assert checkpoint[0] < saver.kept[-1][0]  # steps after it are done again
    outcome, _ = record(tmp_path, world, resume=checkpoint, origin=-1000.0)
    assert outcome is not None
    ledger = outcome.pipeline.queue.ledger
    spans = list(read_spans(tmp_path / "spans.jsonl"))
    steps = [span.details["step"] for span in spans if span.what == "train"]
    assert steps == list(range(1, 11))
    trained = [draw for span in spans for draw in span.details.get("draws", ())]
    assert len(set(trained)) == len(trained) == ledger.trained
    outcomes = Counter(span.details["outcome"] for span in spans if span.what == "group")
    assert {kind: outcomes[kind] for kind in ledger.filtered} == dict(ledger.filtered)
    lives = Counter(draw.split("/")[0] for draw in trained)
    assert set(lives) == {"0", "1"}


def span(number: int) -> Span:
    return Span("generate", "worker0", number, number + 1)


def test_broken_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    file = SpanFile(path, 0.0)
    file.write(span(1))
    file.close()
    good = path.read_text()
    for bad in (
        '{"what":"generate","who":"worker0","start":3',
        "[]",
        "7",
        "null",
        '{"what":"generate","who":"worker0","start":4,"end":3}',
        '{"what":"generate","who":1,"start":4,"end":5}',
        '{"what":"generate","who":"worker0","start":NaN,"end":5}',
        '{"what":"generate","who":"worker0","start":"4","end":5}',
        "\xff\xfe",
    ):
        path.write_text(f"{bad}\n{good}{bad}")
        assert list(read_spans(path)) == [span(1)]


def test_times_are_those_of_the_run(tmp_path: Path) -> None:
    file = SpanFile(tmp_path / "spans.jsonl", 100.0)
    file.write(Span("generate", "worker0", 101.5, 103.0))
    file.close()
    assert list(read_spans(tmp_path / "spans.jsonl")) == [Span("generate", "worker0", 1.5, 3.0)]


def test_the_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "MAX_BYTES", 1000)
    path = tmp_path / "spans.jsonl"
    file = SpanFile(path, 0.0)
    for number in range(1000):
        file.write(span(number))
    file.close()
    assert 1000 <= path.stat().st_size < 1100
    found = list(read_spans(path))
    assert found == [span(number) for number in range(len(found))]


def test_spans_that_can_not_be_written_cost_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spans.jsonl").mkdir()
    file = SpanFile(tmp_path / "spans.jsonl", 0.0)
    for number in range(3):
        file.write(span(number))
    file.close()
    assert len(caplog.records) == 1
