"""What people see: a live status on a terminal, plain lines elsewhere, and the final table."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dapo_async.types import EvalReport

PLAIN_EVERY_S = 10.0


def set_up_logging(console: Console) -> None:
    """Warnings and news of ours on the console; other libraries' only from errors on."""
    handler = RichHandler(console=console, show_path=False, show_level=True, rich_tracebacks=False)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    logging.getLogger("dapo_async").setLevel(logging.INFO)


def say(console: Console, text: str, label: str = "") -> None:
    """Print a message as it is: brackets in it are no markup."""
    # Not wrapped: a terminal does that by itself, and whoever searches a log wants whole lines.
    console.print(Text.assemble((label, "red"), text), soft_wrap=True)


class Status:
    """Shows step, reward, staleness, queue and who waits for whom.

    Args:
        console: where to.
        mode: live | plain | off (auto decided by the caller).
        steps: learner steps of the run.
        describe: what the learner is doing now, and the queue, in one line.
    """

    def __init__(
        self, console: Console, mode: str, steps: int, describe: Callable[[], str]
    ) -> None:
        self._console = console
        self._describe = describe
        self._steps = steps
        self._last_plain = 0.0
        self._live: Live | None = None
        self._mode = mode
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            auto_refresh=False,
        )
        self._bar = self._progress.add_task("step", total=steps, numbers="")
        if mode == "live":
            self._live = Live(
                get_renderable=self._render, console=console, refresh_per_second=2, transient=True
            )
            self._live.start()

    def _render(self) -> Table:
        grid = Table.grid()
        grid.add_row(self._progress)
        grid.add_row(Text(self._describe(), style="dim"))
        return grid

    def step(self, version: int, metrics: Mapping[str, float]) -> None:
        numbers = (
            f"acc {metrics.get('reward/acc_mean', 0):.2f}  "
            f"reward {metrics.get('reward/score_mean', 0):+.2f}  "
            f"len {metrics.get('rollout/response_length_mean', 0):.1f}  "
            f"age {metrics.get('staleness/mean', 0):.2f}≤{metrics.get('staleness/max', 0):.0f}  "
            f"kept {metrics.get('filter/kept_share', 0):.0%}  "
            f"{metrics.get('rollout/tokens_per_s', 0):,.0f} tok/s  "
            f"waits {metrics.get('perf/learner_idle_share', 0):.0%}"
        )
        self._progress.update(self._bar, completed=version, numbers=numbers)
        now = time.monotonic()
        due = now - self._last_plain >= PLAIN_EVERY_S or version == self._steps
        if self._mode == "plain" and due:
            self._last_plain = now
            self.say(f"step {version}/{self._steps}  {numbers}")

    def say(self, text: str) -> None:
        if self._mode != "off":
            say(self._console, text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def display_mode(wanted: str) -> str:
    """`auto` is live on a terminal and plain elsewhere."""
    if wanted != "auto":
        return wanted
    return "live" if sys.stdout.isatty() else "plain"


def result_table(
    before: EvalReport | None, after: EvalReport | None, summary: Mapping[str, Any]
) -> Table:
    """The table at the end of a run: before, after, and how it went."""
    table = Table(title=f"run {summary['run']}", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    if before is not None and after is not None:
        table.add_row("accuracy, sampled", Text(_share(before)), Text(_share(after)))
        if before.greedy_acc is not None and after.greedy_acc is not None:
            table.add_row("accuracy, greedy", f"{before.greedy_acc:.3f}", f"{after.greedy_acc:.3f}")
        lengths = f"{before.mean_length:.1f}", f"{after.mean_length:.1f}"
        table.add_row("response length, tokens", *lengths)
        table.add_row("truncated", f"{before.truncated:.1%}", f"{after.truncated:.1%}")
        table.add_section()
    ledger = summary["ledger"]
    ages = ", ".join(f"{age}: {count}" for age, count in summary["staleness"]["histogram"].items())
    for name, value in (
        ("learner steps", f"{summary['steps']}"),
        ("wall / CPU seconds", f"{summary['wall_s']:.0f} / {sum(summary['cpu_s'].values()):.0f}"),
        ("rollout tokens/s", f"{summary['rollout_tokens_per_s']:,.0f}"),
        (
            "learner / workers idle",
            f"{summary['idle_share']['learner']:.0%} / {summary['idle_share']['workers']:.0%}",
        ),
        ("staleness (samples by age)", f"{ages or '-'}  (bound {summary['max_staleness']})"),
        ("groups drawn = trained", f"{ledger['drawn']} = {ledger['trained']}"),
        ("  + filtered", ", ".join(f"{k} {v}" for k, v in ledger["filtered"].items())),
        ("  + dropped", ", ".join(f"{k} {v}" for k, v in ledger["dropped"].items()) or "0"),
        ("  + live", f"{ledger['live']}"),
    ):
        table.add_row(name, "", Text(value))
    return table


def _share(report: EvalReport) -> str:
    return f"{report.acc:.3f} [{report.low:.3f}, {report.high:.3f}]"
