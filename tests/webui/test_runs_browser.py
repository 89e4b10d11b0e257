"""The life of a run in a browser: outlives page and server, stops, resumes, is reported. test_first_hour goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from patience import until

from halftune.core.status import read_status

pytestmark = pytest.mark.nightly

RECIPE = """\
model: {name_or_path: builtin:qwen2-tiny}
precision: fp32
adapter: {type: lora, rank: 4}
data: {train: rows.jsonl, max_length: 48, packing: false}
training:
  output_dir: runs/adder
  max_steps: 300
  per_device_train_batch_size: 1
  logging_steps: 1
  save_steps: 1000
"""


def step_of(run: Path) -> int:
    status = read_status(run / "status.json")
    return status.step if status is not None else -1


class Held:
    """A run that stands still but when it is told to go on: no page is too slow for it, and it ends under none."""

    def __init__(self, run: Path) -> None:
        status = read_status(run / "status.json")
        assert status is not None
        self.run, self.pid = run, status.pid
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets it make a step that its status tells of, or some."""
        seen = step_of(self.run)
        os.kill(self.pid, signal.SIGCONT)
        until(lambda: step_of(self.run) > seen, f"a step after step {seen}")
        os.kill(self.pid, signal.SIGSTOP)

    def release(self) -> None:
        """Lets it go."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


@contextmanager
def held(run: Path) -> Iterator[Held]:
    """The run from its first step on."""
    until(lambda: step_of(run) >= 1, "the first step of the run")
    one = Held(run)
    try:
        yield one
    finally:
        one.release()


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


POINTS = "Number(document.querySelector('[data-chart=loss] path.main')?.dataset.points)"


def grows(page: Any, held_run: Held) -> None:
    """The curve of the loss gets another point."""
    line = page.locator("[data-chart=loss] path.main")
    line.wait_for(state="attached")  # a line through one point is nothing that can be seen
    before = page.evaluate(POINTS)
    held_run.go_on()
    page.wait_for_function(f"before => {POINTS} > before", arg=before)
    line.wait_for()


def progresses(page: Any, held_run: Held) -> None:
    """The bar moves."""
    seen = step_of(held_run.run)
    held_run.go_on()
    bar = "document.querySelector('#run-cards [role=progressbar]')"
    page.wait_for_function(f"seen => Number({bar}?.ariaValueNow) > seen", arg=seen)


def card(page: Any) -> Any:
    return page.locator("#run-cards .card")


@pytest.fixture(scope="module")
def own_web_ui(start_web_ui: Callable[..., Any]) -> Any:
    """In a folder without runs; it may be killed."""
    return start_web_ui()


def test_a_run_that_dies_shows_why(own_web_ui: Any, open_page: Callable[..., Any]) -> None:
    (own_web_ui.folder / "rows.jsonl").write_text(
        json.dumps({"prompt": "Add 1 and 2.", "completion": "It is 3."}) + "\n"
    )
    text = RECIPE.replace("max_length: 48", "max_length: 8").replace("max_steps: 300", "max_steps: 2")
    page = open_page(own_web_ui.url, recipe=text)
    page.get_by_text("max_length: 8").wait_for()
    page.locator("#start:enabled").click()
    card(page).get_by_text("failed", exact=True).wait_for()
    card(page).locator(".cause", has_text="no rows left to train on").wait_for()
    card(page).locator("pre").wait_for(state="visible")  # what it printed last, unfolded when it died
    page.on("dialog", lambda dialog: dialog.accept())
    card(page).get_by_role("button", name="Delete").click()
    page.locator("#run-list .empty").wait_for()
    assert not (own_web_ui.folder / "runs" / "adder").exists()


def test_a_run_from_start_to_report(
    own_web_ui: Any, start_web_ui: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    rows = [{"prompt": f"Add {n} and {n + 1}.", "completion": f"It is {2 * n + 1}."} for n in range(40)]
    (own_web_ui.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = own_web_ui.folder / "runs" / "adder"

    page = open_page(own_web_ui.url, recipe=RECIPE)
    page.get_by_text("output_dir: runs/adder").wait_for()
    page.locator("#start:enabled").click()
    with held(run) as running:
        card(page).get_by_text("training", exact=True).wait_for()
        grows(page, running)

        page.context.close()  # the page goes, the run goes on
        running.go_on()
        again = open_page(own_web_ui.url)
        tab(again, "Runs")
        card(again).get_by_text("running", exact=True).wait_for()
        progresses(again, running)

        again.seen.expected.append("net::ERR_")  # what the browser itself writes when the server is gone
        own_web_ui.stop(signal.SIGKILL)  # so does the server
        running.go_on()
        second = start_web_ui(folder=own_web_ui.folder)
        page, other = open_page(second.url), open_page(second.url, width=900)  # two browsers on one run
        for one in (page, other):
            tab(one, "Runs")
            card(one).get_by_text("running", exact=True).wait_for()
        seen = step_of(run)
        card(page).get_by_role("button", name="Stop", exact=True).click()
        for one in (page, other):
            card(one).get_by_text("stopping", exact=True).wait_for()
    for one in (page, other):
        card(one).get_by_text("stopped", exact=True).wait_for()
    other.context.close()
    stopped = step_of(run)
    assert seen <= stopped < 300
    assert (run / f"checkpoint-{stopped}" / "checkpoint.json").exists()
    card(page).get_by_text(f"after step {stopped}").first.wait_for()

    card(page).get_by_role("button", name="Resume").click()
    card(page).get_by_text("finished", exact=True).wait_for()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 301))
    card(page).get_by_role("button", name="Report").click()
    report = page.frame_locator("#run-report iframe")
    report.get_by_text("halftune run report").wait_for()
    report.locator("a[href$='#curves']").first.click()  # stays in the report
    report.locator("#curves:target").wait_for(state="attached")
    report.get_by_text("halftune run report").wait_for()
