"""The report in a real browser: drawn, without an error, without the network, with the run's
numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dapo_async.metrics import read_jsonl
from dapo_async.studies.report import write_report
from tests.fakes import World
from tests.recorded_run import record

pytestmark = pytest.mark.system

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BREAK_IN = """() => {
    const script = document.createElement("script");
    script.textContent = "document.title = 'broken into'";
    document.body.append(script);
    const image = new Image();
    image.src = "http://127.0.0.1:9/";
    document.body.append(image); }"""
EVIL = '<script>document.title = "broken into"</script><img src="http://127.0.0.1:9/x">'


class Opened(NamedTuple):
    """What the browser saw of the page."""

    folder: Path
    console: list[str]
    requests: list[str]
    images: list[tuple[str, int, int]]
    """(alternative text, width, height in pixels) of every image that was decoded."""
    cells: dict[str, str]
    data: dict[str, Any]
    title: str
    text: str
    after: tuple[str, list[str | None]]
    """After `BREAK_IN`: the title, and why requests have failed."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """The page of a recorded run, opened from the disk by a browser that is offline."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.skip("no Chromium: apt-get install -y --no-install-recommends chromium")
    from playwright.sync_api import sync_playwright

    folder = tmp_path_factory.mktemp("runs") / "fake"
    record(folder, World(steps=12, eval_every=4, crash_rate=0.05))
    sample = {"step": 1, "kind": "train", "prompt": EVIL, "response": EVIL}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page_path = write_report([folder]).page
    console: list[str] = []
    requests: list[str] = []
    failures: list[str | None] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox"],  # there is none for root in a container; the page is our own
        )
        context = browser.new_context(offline=True)
        page = context.new_page()
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        page.route(lambda url: not url.startswith(("file:", "data:")), lambda route: route.abort())
        page.on("request", lambda request: requests.append(request.url))
        page.on("requestfailed", lambda request: failures.append(request.failure))
        page.goto(page_path.as_uri())
        page.wait_for_load_state("load")
        images = page.evaluate(
            """async () => { const found = [];
            for (const image of document.images) {
                await image.decode();
                found.push([image.alt, image.naturalWidth, image.naturalHeight]); }
            return found }"""
        )
        cells = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("td[data-key]")].map(
                cell => [cell.dataset.key, cell.dataset.value]))"""
        )
        data = json.loads(page.locator("#data").text_content() or "")
        title, text = page.title(), page.locator("main").inner_text()
        seen = list(console), list(requests)
        page.evaluate(BREAK_IN)
        page.wait_for_timeout(100)
        after = page.title(), failures
        browser.close()
    return Opened(folder, *seen, [tuple(i) for i in images], cells, data, title, text, after)


def test_the_page_opens_without_an_error_and_every_plot_is_drawn(opened: Opened) -> None:
    assert opened.console == []
    assert opened.title == "Run fake"
    assert len(opened.images) >= 4
    for text, width, height in opened.images:
        assert text and width > 500 and height > 50


def test_the_page_asks_the_network_for_nothing(opened: Opened) -> None:
    asked = [url for url in opened.requests if not url.startswith("data:")]
    assert asked == [(opened.folder / "report.html").as_uri()]


def test_its_policy_would_stop_a_script_and_a_request(opened: Opened) -> None:
    title, failures = opened.after
    assert title == opened.title
    assert failures == ["csp"]


def test_its_numbers_are_those_of_metrics_and_ledger(opened: Opened) -> None:
    (run,) = opened.data["runs"]
    rows = read_jsonl(opened.folder / "metrics.jsonl")
    assert len(run["series"]) > 15
    for name, (steps, values) in run["series"].items():
        found = [(row["step"], row[name]) for row in rows if name in row]
        assert found == list(zip(steps, values, strict=True))
        assert float(opened.cells[f"{name} last"]) == found[-1][1]
    ledger = json.loads((opened.folder / "summary.json").read_text())["ledger"]
    for name in ("drawn", "trained", "live"):
        assert run["ledger"][name] == ledger[name] == int(opened.cells[f"ledger {name}"])
    for kind, count in ledger["filtered"].items():
        assert int(opened.cells[f"ledger filtered {kind}"]) == count
    assert f"{ledger['drawn']:,}" in opened.text


def test_what_a_model_wrote_is_text(opened: Opened) -> None:
    assert opened.title != "broken into"
    page = (opened.folder / "report.html").read_text()
    assert EVIL not in page and "&lt;script&gt;document.title" in page
