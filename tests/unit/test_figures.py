"""The report is drawn from whatever a run left behind."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from dapo_async.errors import ConfigError
from dapo_async.metrics import METRICS, JsonlSink, read_jsonl
from dapo_async.studies import figures
from dapo_async.studies.figures import Run, draw, render_report, rolling_max, smooth

TITLES = [
    "Accuracy",
    "Reward",
    "Response length",
    "Policy entropy",
    "Staleness of trained samples",
    "Replay queue",
    "Idle time",
    "Dynamic filter",
]
LABELS = {
    "Accuracy": ["training", "held-out, sampled (95 %)", "held-out, greedy"],
    "Reward": ["task reward", "overlong penalty"],
    "Response length": ["mean", "longest"],
    "Policy entropy": ["policy entropy"],
    "Staleness of trained samples": ["mean", "max", "bound (2)"],
    "Replay queue": ["live", "ready to train", "capacity"],
    "Idle time": ["learner", "rollout workers"],
    "Dynamic filter": ["kept", "all right", "all wrong", "uniform"],
}


def row(step: int) -> dict[str, float]:
    metrics = {
        "reward/acc_mean": 0.3 + step / 200,
        "reward/score_mean": -0.4 + step / 100,
        "reward/penalty_mean": -0.02,
        "rollout/response_length_mean": 12.0 - step / 20,
        "rollout/response_length_max": 40 - step % 7,
        "policy/entropy": 0.5 / (1 + step),
        "staleness/mean": 1.2,
        "staleness/max": 2 - step % 2,
        "staleness/bound": 2,
        "replay/live": 30 + step % 3,
        "replay/ready": step % 9,
        "replay/capacity": 32,
        "perf/learner_idle_share": 0.2,
        "perf/worker_idle_share": 0.1,
        "filter/kept": 16,
        "filter/all_right": step // 5,
        "filter/all_wrong": 3,
        "filter/uniform": 0,
    }
    assert set(metrics) <= set(METRICS)
    return metrics


def evaluation(step: int) -> dict[str, float]:
    acc = 0.3 + step / 200
    return {
        "eval/acc": acc,
        "eval/low": acc - 0.04,
        "eval/high": acc + 0.05,
        "eval/greedy_acc": acc + 0.2,
    }


def run_folder(tmp_path: Path, steps: int = 100) -> Path:
    folder = tmp_path / "toy-run"
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.write(0, 0.0, evaluation(0))
    for step in range(1, steps + 1):
        sink.write(step, step * 0.5, row(step) | (evaluation(step) if step % 25 == 0 else {}))
    sink.close()
    return folder


def sheet(folder: Path) -> Figure:
    return draw(Run(read_jsonl(folder / "metrics.jsonl"), {}), folder.name)


def panel(figure: Figure, title: str) -> Any:
    (found,) = [ax for ax in figure.axes if ax.get_title(loc="left") == title]
    return found


def labels(ax: Any) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_the_report_is_a_readable_picture(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    report = render_report(folder)
    assert report == folder / "report.png"
    data = report.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 1000 and height > 1000
    assert len(data) > 50_000


def test_every_panel_shows_its_series_with_unit_and_legend(tmp_path: Path) -> None:
    figure = sheet(run_folder(tmp_path))
    assert [ax.get_title(loc="left") for ax in figure.axes] == TITLES
    for title in TITLES:
        ax = panel(figure, title)
        assert labels(ax) == LABELS[title]
        assert ax.get_ylabel()
        assert ax.get_xlim() == (0, 100)
    assert [ax.get_xlabel() for ax in figure.axes[-2:]] == ["learner step"] * 2


def test_the_headline_names_run_length_and_gain(tmp_path: Path) -> None:
    headline = sheet(run_folder(tmp_path)).get_suptitle()
    for part in ("toy-run", "100 steps", "50 s", "30.0% → 80.0%"):
        assert part in headline


def test_evaluations_are_drawn_where_they_were_made_with_their_interval(tmp_path: Path) -> None:
    ax = panel(sheet(run_folder(tmp_path)), "Accuracy")
    (sampled,) = [line for line in ax.lines if line.get_label().startswith("held-out, sampled")]
    assert list(sampled.get_xdata()) == [0, 25, 50, 75, 100]
    assert list(sampled.get_ydata()) == pytest.approx([0.3, 0.425, 0.55, 0.675, 0.8])
    (bars,) = ax.collections
    first = bars.get_segments()[0]
    assert first[:, 0].tolist() == [0, 0]
    assert first[:, 1].tolist() == pytest.approx([0.26, 0.35])


def test_legends_lie_outside_the_data_area(tmp_path: Path) -> None:
    figure = sheet(run_folder(tmp_path))
    figure.canvas.draw()
    for ax in figure.axes:
        legend, area = ax.get_legend(), ax.get_window_extent()
        assert legend is not None
        assert legend.get_window_extent().y0 >= area.y1 - 1
        assert legend.get_window_extent().x1 <= area.x1 + 20


def test_filter_shares_are_of_all_judged_groups_and_fill_the_panel(tmp_path: Path) -> None:
    ax = panel(sheet(run_folder(tmp_path)), "Dynamic filter")
    top = max(path.vertices[:, 1].max() for c in ax.collections for path in c.get_paths())
    assert top == pytest.approx(1.0)
    kept = ax.collections[0].get_paths()[0].vertices
    at_50 = kept[kept[:, 0] == 50][:, 1].max()
    assert at_50 == pytest.approx(16 / (16 + 9.8 + 3), abs=0.01)


def test_filter_shares_are_pooled_not_averaged() -> None:
    # 1 of 1 kept, then 0 of 99: 1 %, not 50 %.
    rows: list[dict[str, Any]] = [
        {"step": 1, "filter/kept": 1, "filter/all_wrong": 0},
        {"step": 2, "filter/kept": 0, "filter/all_wrong": 99},
        {"step": 3, "filter/kept": 0, "filter/all_wrong": 0},
    ]
    ax = panel(draw(Run(rows, {}), "r"), "Dynamic filter")
    kept = ax.collections[0].get_paths()[0].vertices
    assert kept[kept[:, 0] == 2][:, 1].max() == pytest.approx(0.01)


@pytest.mark.parametrize("title", TITLES)
def test_a_panel_without_data_says_so_and_the_others_are_drawn(tmp_path: Path, title: str) -> None:
    wanted = {
        "Accuracy": ("reward/acc", "eval/"),
        "Reward": ("reward/score", "reward/penalty"),
        "Response length": ("rollout/",),
        "Policy entropy": ("policy/",),
        "Staleness of trained samples": ("staleness/",),
        "Replay queue": ("replay/",),
        "Idle time": ("perf/",),
        "Dynamic filter": ("filter/",),
    }[title]
    rows = [
        {name: value for name, value in line.items() if not name.startswith(wanted)}
        for line in read_jsonl(run_folder(tmp_path) / "metrics.jsonl")
    ]
    figure = draw(Run(rows, {}), "r")
    for ax in figure.axes:
        said = [text.get_text() for text in ax.texts]
        empty = ax.get_title(loc="left") == title
        assert said == (["no data"] if empty else [])
        assert bool(labels(ax)) != empty


@pytest.mark.parametrize(
    "name", ["eval/acc", "eval/low", "eval/high", "filter/kept", "staleness/bound", "staleness/max"]
)
def test_any_single_series_may_be_missing_or_alone(tmp_path: Path, name: str) -> None:
    rows = read_jsonl(run_folder(tmp_path, steps=30) / "metrics.jsonl")
    without = [{key: value for key, value in line.items() if key != name} for line in rows]
    only = [{key: value for key, value in line.items() if key in ("step", name)} for line in rows]
    for remaining in (without, only):
        assert len(draw(Run(remaining, {}), "r").axes) == len(TITLES)


@pytest.mark.parametrize("text", ["", "torn", '{"step": 0}\n', '{"step": 4, "eval/acc": 0.5}\n'])
def test_a_run_that_hardly_began_is_drawn(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert render_report(tmp_path).stat().st_size > 1000


def test_null_and_odd_values_leave_a_gap(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "policy/entropy": 0.5},
        {"step": 2, "policy/entropy": None},
        {"step": 3, "policy/entropy": "high"},
        {"step": 4, "policy/entropy": math.nan},
        {"step": 5, "policy/entropy": 0.25},
    ]
    (line,) = panel(draw(Run(lines, {}), "r"), "Policy entropy").lines
    assert list(line.get_xdata()) == [1, 5]


def test_the_bound_comes_from_the_summary_where_the_metrics_lack_it(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    rows = [
        {name: value for name, value in line.items() if name != "staleness/bound"}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
    ax = panel(draw(Run(rows, {"max_staleness": 4}), "r"), "Staleness of trained samples")
    assert labels(ax) == ["mean", "max", "bound (4)"]
    assert ax.get_ylim()[1] > 4
    ax = panel(draw(Run(rows, {}), "r"), "Staleness of trained samples")
    assert labels(ax) == ["mean", "max"]


@pytest.mark.parametrize("content", ["[]", "{", json.dumps({"max_staleness": "two"})])
def test_an_odd_summary_does_not_stop_the_report(tmp_path: Path, content: str) -> None:
    folder = run_folder(tmp_path, steps=3)
    (folder / "summary.json").write_text(content)
    assert render_report(folder).exists()


def test_a_folder_without_metrics_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: No such file.*is this a run\?"):
        render_report(tmp_path)


def test_smoothing_neither_shifts_nor_invents() -> None:
    line = np.arange(20.0)
    assert smooth(line, 5)[2:-2] == pytest.approx(line[2:-2])
    assert smooth(line, 1).tolist() == line.tolist()
    assert smooth(np.ones(4), 9).tolist() == [1, 1, 1, 1]
    spike = np.zeros(9)
    spike[4] = 3.0
    assert smooth(spike, 3).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert rolling_max(spike, 3).tolist() == [0, 0, 0, 3, 3, 3, 0, 0, 0]


def test_every_series_of_the_report_has_a_documented_name() -> None:
    source = Path(figures.__file__).read_text(encoding="utf-8")
    used = {
        word for word in source.split('"') if "/" in word and word.replace("/", "").isidentifier()
    }
    assert len(used) > 15
    assert used <= set(METRICS)
