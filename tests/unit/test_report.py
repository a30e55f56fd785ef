"""The run report: its numbers are those of the run's files, whatever state the run is in."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo_async.cli import app
from dapo_async.errors import ConfigError
from dapo_async.metrics import JsonlSink, read_jsonl
from dapo_async.spans import read_spans
from dapo_async.studies.report import write_report
from dapo_async.studies.report_data import read_run
from tests.fakes import World
from tests.recorded_run import record

EVIL = '<script>alert(1)</script><img src="http://example.invalid/x" onerror="alert(2)">&$\\frac$'


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fake"
    record(folder, World(steps=12, eval_every=4, crash_rate=0.05))
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(recorded, tmp_path / "fake", ignore=shutil.ignore_patterns("trace*"))


class Page(HTMLParser):
    """What a page holds: cells by key, the data block, its text and its tags."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.cells: list[tuple[str, str]] = []
        self.tags: Counter[str] = Counter()
        self.texts: list[str] = []
        self.sources: list[str] = []
        self._in = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags[tag] += 1
        self._in = tag
        if found.get("data-key"):
            self.cells.append((found["data-key"] or "", found["data-value"] or ""))
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.data = json.loads(data)
            self._in = ""
        elif self._in != "style":
            self.texts.append(data)

    def cell(self, key: str) -> float:
        (value,) = [value for name, value in self.cells if name == key]
        return float(value)


def page_of(*folders: Path) -> Page:
    out = folders[0] / "report.html"
    return Page(write_report(folders, out).page)


@pytest.fixture(scope="module")
def page(recorded: Path) -> Page:
    return page_of(recorded)


# ---- its numbers -------------------------------------------------------------------------------


def test_the_series_in_the_page_are_those_of_metrics_jsonl(recorded: Path, page: Page) -> None:
    (data,) = page.data["runs"]
    rows = read_jsonl(recorded / "metrics.jsonl")
    assert {"eval/acc", "reward/acc_mean", "staleness/max", "filter/kept"} <= set(data["series"])
    for name, (steps, values) in data["series"].items():
        assert [(row["step"], row[name]) for row in rows if name in row] == list(
            zip(steps, values, strict=True)
        )


def test_the_table_of_metrics_has_first_last_smallest_and_largest(
    recorded: Path, page: Page
) -> None:
    rows = read_jsonl(recorded / "metrics.jsonl")
    names = {name for row in rows for name in row} - {"step", "time_s"}
    assert len(names) > 30
    for name in names:
        values = [row[name] for row in rows if name in row]
        found = [page.cell(f"{name} {which}") for which in ("first", "last", "min", "max")]
        assert found == [values[0], values[-1], min(values), max(values)]


def test_the_ledger_in_the_page_is_that_of_the_summary_and_balances(
    recorded: Path, page: Page
) -> None:
    ledger = json.loads((recorded / "summary.json").read_text())["ledger"]
    shown = page.data["runs"][0]["ledger"]
    for name in ("drawn", "trained", "live", "filtered", "dropped"):
        assert shown[name] == ledger[name]
    for name in ("drawn", "trained", "live"):
        assert page.cell(f"ledger {name}") == ledger[name]
    for kind, count in ledger["filtered"].items():
        assert page.cell(f"ledger filtered {kind}") == count
    assert "It balances." in page.text


def test_a_ledger_that_does_not_balance_is_told(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    summary["ledger"]["trained"] += 1
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "It does NOT balance." in page_of(folder).text


def test_tokens_per_kept_group_are_all_generated_ones_over_the_kept(
    recorded: Path, page: Page
) -> None:
    rows = read_jsonl(recorded / "metrics.jsonl")
    tokens = sum(row.get("rollout/tokens", 0) for row in rows)
    kept = sum(row.get("filter/kept", 0) for row in rows)
    groups = sum(row.get("rollout/groups", 0) for row in rows)
    assert kept < groups
    assert page.cell("generated_tokens") == tokens
    assert page.cell("tokens_per_kept") == pytest.approx(tokens / kept)
    assert page.cell("factor") == pytest.approx(groups / kept)


def test_ages_are_those_of_the_summary_and_of_the_groups_alike(folder: Path) -> None:
    shown = page_of(folder).data["runs"][0]["ages"]
    histogram = json.loads((folder / "summary.json").read_text())["staleness"]["histogram"]
    assert shown == histogram and sum(shown.values()) > 0
    (folder / "summary.json").unlink()
    assert page_of(folder).data["runs"][0]["ages"] == histogram


def test_time_by_state_is_that_of_the_spans(recorded: Path, page: Page) -> None:
    total: Counter[str] = Counter()
    for span in read_spans(recorded / "spans.jsonl"):
        if span.what not in ("group", "saved"):
            total[f"seconds {span.who} {span.what}"] += span.seconds
    for key, seconds in total.items():
        assert page.cell(key) == pytest.approx(seconds)
    learner = page.data["runs"][0]["seconds"]["learner"]
    worker = page.data["runs"][0]["seconds"]["worker0"]
    assert learner["wait"] > 0
    assert sum(learner.values()) == pytest.approx(sum(worker.values()), rel=1e-6)


def test_between_the_lives_of_a_resumed_run_nobody_waits(tmp_path: Path) -> None:
    world = World(steps=10)
    _, saver = record(tmp_path, world, seconds=30.0)
    version, state = saver.kept[-1]
    record(tmp_path, world, resume=(version, state), origin=-1000.0)
    timeline = read_run(tmp_path).timeline
    assert timeline is not None
    spans = sorted(span for lane in timeline.lanes.values() for span in lane)
    assert {start >= 1000 for start, _, _ in spans} == {False, True}
    assert not [span for span in spans if span[0] < 1000 < span[1]]


def test_the_metrics_give_the_ledger_while_there_is_no_summary(folder: Path) -> None:
    (folder / "summary.json").unlink()
    page = page_of(folder)
    last = read_jsonl(folder / "metrics.jsonl")[-1]
    assert page.cell("ledger drawn") == last["replay/drawn"]
    assert page.cell("ledger trained") == last["replay/trained"]
    assert "It balances." in page.text and "no summary.json yet" in page.text
    assert "running, or cut short" in page.text


def test_several_runs_have_a_column_and_a_section_each(recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    record(other, World(seed=5, steps=5))
    page = Page(write_report([recorded, other], tmp_path / "both.html").page)
    assert [run["name"] for run in page.data["runs"]] == ["fake", "other"]
    assert [value for key, value in page.cells if key == "steps"] == ["12", "5", "12", "5"]
    assert page.tags["article"] == 2
    assert (other / "trace.json").is_file()


# ---- whatever the run left ---------------------------------------------------------------------


def spoil_nothing(folder: Path) -> None:
    """As it is."""


def no_summary(folder: Path) -> None:
    (folder / "summary.json").unlink()


def no_spans(folder: Path) -> None:
    (folder / "spans.jsonl").unlink()


def only_metrics(folder: Path) -> None:
    for name in ("summary.json", "spans.jsonl", "config.yaml"):
        (folder / name).unlink()


def only_an_evaluation(folder: Path) -> None:
    no_summary(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(
        "\n".join(line for line in lines if '"step": 0' in line) + "\n"
    )
    lines = (folder / "spans.jsonl").read_text().splitlines()
    (folder / "spans.jsonl").write_text("\n".join(lines[:3]) + "\n")


def no_evaluation(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def cut_short(folder: Path) -> None:
    no_summary(folder)
    for name in ("metrics.jsonl", "spans.jsonl"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])


def not_finite(folder: Path) -> None:
    sink = JsonlSink(folder / "metrics.jsonl")
    names = {name for row in read_jsonl(folder / "metrics.jsonl") for name in row}
    numbers = dict.fromkeys(names - {"step", "time_s"}, float("nan"))
    for step in range(13, 16):
        sink.write(step, 99.0, numbers)
    sink.close()


def nothing_finite(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(1, 20):
        sink.write(step, step, {"reward/acc_mean": float("inf"), "policy/entropy": float("nan")})
    sink.close()


def strange_values(folder: Path) -> None:
    (folder / "summary.json").write_text(
        '{"ledger": 3, "staleness": {"histogram": {"²": 1, "x": 2, "1": NaN}}, "idle_share": [],'
        ' "max_staleness": "two", "exit_reason": {"a": 1}, "train_wall_s": NaN}'
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "time_s": "x", "rollout/tokens": "many", "reward/acc_mean": []}\n')
        file.write('{"step": "15"}\nnonsense\n[]\n')
    with (folder / "spans.jsonl").open("a") as file:
        for details in ('"tokens":"x"', '"tokens":[-1],"accs":[],"cut":0,"oldest":0'):
            file.write('{"what":"group","who":"w","start":1,"end":2,"draw":1,"outcome":"kept",')
            file.write(details + "}\n")
        file.write('{"what":"train","who":"learner","start":1,"end":2,"step":"x","draws":7}\n')
        file.write('{"what":"dance","who":"worker0","start":1,"end":2}\n')
    (folder / "samples.jsonl").write_text('7\n{"step": 1}\nnonsense\n')


def damaged_summary(folder: Path) -> None:
    (folder / "summary.json").write_text('{"ledger": {')


def empty_spans(folder: Path) -> None:
    (folder / "spans.jsonl").write_text("")


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_nothing,
        no_summary,
        no_spans,
        only_metrics,
        only_an_evaluation,
        no_evaluation,
        cut_short,
        not_finite,
        nothing_finite,
        strange_values,
        damaged_summary,
        empty_spans,
    ],
)
def test_every_state_of_a_run_gives_a_page(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    page = page_of(folder)
    assert page.data["runs"][0]["name"] == "fake"
    assert page.tags["img"] >= 2
    assert "NaN" not in json.dumps(page.data)
    traced = (folder / "trace.json").exists()
    assert traced == (read_run(folder).timeline is not None)


def test_a_broken_summary_is_told_from_none(folder: Path) -> None:
    damaged_summary(folder)
    assert "summary.json is broken" in page_of(folder).text


def test_a_run_that_is_named_twice_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        write_report([folder, folder / ".." / folder.name])


def test_what_comes_from_a_run_is_text_in_the_page(recorded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(recorded, tmp_path / "<b>$x_<i>")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 13, f"reward/{EVIL}": 1.0}) + "\n")
    sample = dict.fromkeys(("kind", "prompt", "response", "answer", "score"), EVIL)
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, **sample}) + "\n")
    (folder / "config.yaml").write_text(EVIL)
    with (folder / "spans.jsonl").open("a") as file:
        file.write(json.dumps({"what": EVIL, "who": EVIL, "start": 1, "end": 2}) + "\n")
    summary = json.loads((folder / "summary.json").read_text())
    summary["exit_reason"] = EVIL
    summary["ledger"]["dropped"] = {EVIL: 3}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = page_of(folder, recorded)
    assert page.tags["script"] == 1 and page.tags["i"] == 0
    assert page.text.count("alert(1)") >= 7
    assert all(source.startswith("data:") for source in page.sources)


def nothing_there(folder: Path) -> None:
    shutil.rmtree(folder)


def aborted_start(folder: Path) -> None:
    for name in ("metrics.jsonl", "summary.json", "spans.jsonl"):
        (folder / name).unlink()


def nothing_measured(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")


@pytest.mark.parametrize("spoil", [nothing_there, aborted_start, nothing_measured])
def test_a_folder_with_nothing_to_report_is_refused_by_its_path(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=str(folder / "metrics.jsonl")):
        write_report([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_can_not_be_written_is_refused_by_its_path(
    recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no-folder"):
        write_report([recorded], tmp_path / "no-folder" / "page.html")


def test_the_command_writes_page_and_trace_into_the_run(folder: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    written = [line.removeprefix("written to ") for line in result.output.split("\n") if line]
    assert [Path(path).name for path in written] == ["report.html", "trace.json"]
    assert all(Path(path).parent == folder and Path(path).is_file() for path in written)


# ---- trace.json --------------------------------------------------------------------------------


def events(folder: Path) -> list[dict[str, Any]]:
    write_report([folder])
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]


def test_the_trace_has_every_span_of_everybody(folder: Path) -> None:
    found = events(folder)
    names = {e["pid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    assert set(names.values()) == {"learner", "worker0", "worker1"}
    traced: Counter[tuple[str, str]] = Counter()
    for event in found:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            traced[names[event["pid"]], event["name"]] += round(event["dur"])
    for (who, what), micros in traced.items():
        spans = [s for s in read_spans(folder / "spans.jsonl") if (s.who, s.what) == (who, what)]
        assert micros == pytest.approx(1e6 * sum(s.seconds for s in spans), abs=len(spans) + 1)


def test_groups_in_the_trace_begin_and_end_once(folder: Path) -> None:
    found = events(folder)
    begun = Counter((e["pid"], e["id"]) for e in found if e["ph"] == "b")
    ended = Counter((e["pid"], e["id"]) for e in found if e["ph"] == "e")
    groups = [s for s in read_spans(folder / "spans.jsonl") if s.what == "group"]
    assert begun == ended
    assert set(begun.values()) == {1}
    assert len(begun) == len(groups)


def test_counters_in_the_trace_are_those_of_the_metrics(folder: Path) -> None:
    rows = read_jsonl(folder / "metrics.jsonl")
    found = [e for e in events(folder) if e["ph"] == "C" and e["name"] == "groups"]
    stepped = [row for row in rows if "replay/live" in row]
    assert [e["args"]["replay/live"] for e in found] == [row["replay/live"] for row in stepped]
    assert [e["ts"] for e in found] == pytest.approx([1e6 * row["time_s"] for row in stepped])
