"""A first hour with a file of one's own, in a browser: upload, a wrong try, the way back, a result; and many runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LONG = 120_000  # milliseconds: torch is imported by each process, on a busy machine


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def field(page: Any, path: str) -> Any:
    return page.locator(f'.row[data-path="{path}"]')


def put(page: Any, path: str, text: str) -> None:
    field(page, path).locator("input").fill(text)
    page.keyboard.press("Tab")
    has(page, f"{path.rpartition('.')[2]}: {text}")


def has(page: Any, text: str) -> None:
    """Waits until the recipe says it."""
    page.wait_for_function("text => document.querySelector('#recipe .cm-content')?.innerText.includes(text)", arg=text)


def card(page: Any) -> Any:
    return page.locator("#run-cards .card[data-card]")


def test_own_data_from_upload_to_result(board: Any, open_page: Callable[..., Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"Add {n} and 1.", "completion": f"It is {n + 1}."} for n in range(30)]
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = open_page(board.url)
    page.wait_for_function("document.querySelector('#recipes input')?.value.startsWith('own_data.yaml')")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Upload…").click()
    chooser.value.set_files(mine)
    has(page, "data/mine.jsonl")
    page.wait_for_function("!document.querySelector('#recipes input').value.startsWith('own_data.yaml')")
    assert (board.folder / "data" / "mine.jsonl").read_text() == mine.read_text()

    put(page, "data.eval_split", "64")  # told before anything is written
    field(page, "data.eval_split").locator(".problem", has_text="64").wait_for()
    page.wait_for_selector("#start:disabled")
    put(page, "data.eval_split", "0")
    page.wait_for_selector("#start:enabled")

    page.locator("#machine input").click()  # what a T4 cannot run does not keep this machine from starting
    page.get_by_role("option", name="Tesla T4").click()
    page.locator(".ht-plan .subject", has_text="Tesla T4").wait_for()
    field(page, "precision.compute").locator("select").select_option("bf16")
    page.locator(".ht-plan .problem").wait_for()
    page.wait_for_selector(".ht-problems.fine", state="attached")
    page.wait_for_selector("#start:enabled")
    field(page, "precision.compute").locator("select").select_option("fp32")
    has(page, "precision: fp32")

    put(page, "data.max_length", "8")  # nothing is left of a row in so few tokens: it fails after its start
    put(page, "training.max_steps", "2")
    page.locator("#start:enabled").click()
    card(page).get_by_text("failed", exact=True).wait_for(timeout=LONG)
    page.on("dialog", lambda dialog: dialog.accept())
    card(page).get_by_role("button", name="Edit and run again").click()
    page.locator("#form").wait_for(state="visible")
    has(page, "max_length: 8")
    has(page, "output_dir: runs/own-data")  # no step was made: the folder is used again
    put(page, "data.max_length", "128")
    page.locator("#start:enabled").click()
    card(page).get_by_text("finished", exact=True).wait_for(timeout=2 * LONG)

    tab(page, "Train")  # the folder is in use now, and the field says so
    field(page, "training.output_dir").locator(".problem", has_text="runs/own-data-2").wait_for()
    page.wait_for_selector("#start:disabled")
    tab(page, "Runs")
    card(page).get_by_role("button", name="Try in Chat").click()
    page.locator("#chat-load").wait_for(state="visible")
    page.wait_for_function("document.querySelector('#chat-run input')?.value === 'own-data'")
    tab(page, "Runs")
    card(page).get_by_role("button", name="Export", exact=True).click()
    page.wait_for_function("document.querySelector('#export-run input')?.value === 'own-data'")


def make(runs: Path, number: int) -> None:
    """A finished or failed run, as training leaves it."""
    run = runs / f"sweep-{number:03}"
    run.mkdir(parents=True)
    recipe = f"training:\n  output_dir: {run}\n  seed: {number}\n"
    (run / "resolved.yaml").write_text(recipe)
    lines = [{"step": n, "loss": 1 / n, "tokens": 100, "seconds": 1.0} for n in range(1, 30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if number % 3:
        (run / "finished.json").write_text('{"step": 29}')
    os.utime(run, (1e9 + number, 1e9 + number))


def listed(page: Any, count: int) -> None:
    page.wait_for_function("count => document.querySelectorAll('#run-list tbody tr').length === count", arg=count)


def test_many_runs_are_found_compared_named_and_deleted(
    start_board: Callable[..., Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path.resolve()
    for number in range(120):
        make(folder / "runs", number)
    page = open_page(start_board(folder=folder).url, width=1440)
    tab(page, "Runs")
    listed(page, 50)
    page.get_by_role("button", name="Show more").click()
    listed(page, 100)
    assert page.locator("#run-list .list").bounding_box()["height"] < 450
    assert page.locator("#run-list .name").first.inner_text() == "sweep-119"

    search = page.locator("#run-query").get_by_role("textbox")
    search.fill("sweep-01")
    listed(page, 10)
    page.locator("#run-kind input").click()
    page.get_by_role("option", name="failed").click()
    listed(page, 3)  # 12, 15, 18
    for name in ("sweep-012", "sweep-015"):
        page.locator("#run-list tr", has_text=name).locator("input").check()
    page.locator(".differences td", has_text="15").wait_for()
    tick, line = "#run-list tr:has-text('sweep-015') input", "#curves [data-chart=loss] path.main >> nth=-1"
    colour = page.locator(tick).evaluate("node => getComputedStyle(node).backgroundColor")
    assert colour == page.locator(line).evaluate("node => getComputedStyle(node).stroke")

    page.locator("#curves [name=axis]").select_option("tokens")
    page.locator("#curves text", has_text="2,000").first.wait_for(state="attached")
    with page.expect_download() as download:
        page.locator("[data-chart=loss] [data-save=CSV]").click()
    first = Path(download.value.path()).read_text().splitlines()[:2]
    assert first[0] == "run,step,tokens,seconds,loss"
    with page.expect_download() as download:
        page.locator("[data-chart=loss] [data-save=PNG]").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")

    last = card(page).last
    last.get_by_text("Name, tags, note").click()
    last.locator("input[name=name]").fill("The best one")
    last.locator("input[name=tags]").fill("keep, small")
    last.get_by_role("button", name="Save").click()
    card(page).get_by_role("heading", name="The best one").wait_for()
    last.get_by_role("button", name="Pin").click()
    search.fill("keep")
    listed(page, 1)
    page.locator("#run-list .pin").wait_for()

    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete the 3 ticked").click()
    page.locator("#run-cards .card").first.wait_for(state="detached")
    left = [path.name for path in (folder / "runs").iterdir() if path.name.startswith("sweep")]
    assert len(left) == 117
    assert not {"sweep-012", "sweep-015"} & set(left)
