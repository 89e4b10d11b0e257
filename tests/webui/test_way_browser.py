"""The way through the page in a browser, from an empty form to scores. test_first_hour_browser goes by keyboard."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from patience import LIMIT

SCRIPT = re.compile(r"/assets/HTML-[^/]*\.js$")  # Gradio's component of all that the server writes, and of the form
VALUES = {
    "data.train[0].path": "way.jsonl",
    "data.max_length": "64",
    "training.output_dir": "runs/way",
    "training.max_steps": "4",
    "training.logging_steps": "1",
    "generation.max_new_tokens": "4",
}


def field(page: Any, path: str) -> Any:
    return page.locator(f'.row[data-path="{path}"]').locator("input, select").first


def opened_late(open_page: Callable[..., Any], url: str) -> Any:
    """A page whose form comes after its recipe: Gradio then runs the form's script before it has its properties."""
    held, answers = list[Any](), list[Any]()

    def hold(page: Any) -> None:
        page.route(SCRIPT, lambda route: held.append(route))
        page.on("response", lambda answer: answers.append(answer) if "/run/predict" in answer.url else None)

    page = open_page(url, before=hold)
    end = time.monotonic() + LIMIT
    while not (held and answers):
        assert time.monotonic() < end, "the page asks for no recipe"
        page.wait_for_timeout(20)
    answers[0].finished()
    for route in held:
        route.continue_()
    page.unroute(SCRIPT)  # a reload is not held
    return page


@pytest.mark.nightly
@pytest.mark.parametrize(("tab", "drawn"), [("chat", "#chat-load"), ("runs", "#run-list .ht-live > *")])
def test_a_script_that_runs_late_draws_its_tab(
    web_ui: Any, open_page: Callable[..., Any], tab: str, drawn: str
) -> None:
    page = opened_late(open_page, f"{web_ui.url}/#tab={tab}")
    page.wait_for_selector(drawn)


@pytest.mark.slow
def test_from_an_empty_form_to_scores(web_ui: Any, open_page: Callable[..., Any]) -> None:
    rows = [{"prompt": f"Add {n} and 1.", "completion": f"It is {n + 1}."} for n in range(12)]
    (web_ui.folder / "way.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = opened_late(open_page, web_ui.url)
    page.wait_for_selector('.row[data-path="training.output_dir"].set')
    assert field(page, "training.output_dir").input_value() == "runs/own-data"
    for group in page.locator("details.group:not([hidden]) > summary").all():
        group.click()
    for path, value in VALUES.items():
        field(page, path).fill(value)
        field(page, path).press("Tab")
        says = f"{path.rpartition('.')[2]}: {value}"
        page.wait_for_function("says => window.halftuneRecipe?.includes(says)", arg=says)
    field(page, "precision.compute").select_option("fp32")
    page.locator('tr[data-plan="compute"]:has(.chip.fp32)').wait_for()

    page.locator("#start:enabled").click()
    card = page.locator("#run-cards .card[data-card$='/way']")
    card.get_by_text("finished", exact=True).wait_for()
    page.locator("[data-chart=loss] path.main").wait_for()
    assert len((web_ui.folder / "runs" / "way" / "metrics.jsonl").read_text().splitlines()) == 4
    card.get_by_role("button", name="Report").click()
    page.frame_locator("#run-report iframe").get_by_text("halftune run report").wait_for()

    card.get_by_role("button", name="Chat").click()
    page.locator("#chat [data-chat$='/way']").wait_for(state="attached")
    page.locator("#chat-message").fill("Add 3 and 1.")
    page.keyboard.press("Enter")
    for side in ("trained", "base"):
        page.locator(f"#{side} p.user + p.assistant, #{side} p.user + p.help").wait_for()
    page.wait_for_selector("#chat-again:enabled")
    assert "tokens/s" in page.locator("#trained .foot").inner_text()

    page.get_by_role("tab", name="Runs", exact=True).click()
    assert f"halftune serve {web_ui.folder / 'runs' / 'way'}" in card.locator(".command code").all_inner_texts()
    card.get_by_role("button", name="Export", exact=True).click()
    page.wait_for_function("document.querySelector('#export-output :is(textarea, input)')?.value === 'models/way'")
    page.locator("#export-start").click()
    export = page.locator("#exports .exported", has_text="models/way")
    export.get_by_text("finished", exact=True).wait_for()
    export.get_by_role("button", name="Check", exact=True).click()
    export.locator(".verdict.same p.ok").wait_for()
    assert export.locator(".verdict tbody th").all_inner_texts() == ["Tokens", "Ends of answers", "Answers", "Rounding"]

    page.get_by_role("tab", name="Runs", exact=True).click()
    card.get_by_role("button", name="Evaluate", exact=True).click()
    page.locator("#evaluate-run").get_by_text("way", exact=True).wait_for()
    page.get_by_label("Exact match", exact=True).check()
    page.locator("#evaluate-start").click()
    scores = page.locator("#evaluation .scores")
    scores.wait_for()
    assert scores.locator("thead th").all_inner_texts() == ["", "base\nfp32", "way\nfp32"]
    assert scores.locator("tbody th").all_inner_texts() == ["Loss per token", "Perplexity", "Exact match"]
    assert "best" in scores.locator("tbody tr").first.locator("td").nth(1).inner_text()  # it has learned something
    page.wait_for_function("document.querySelector('#evaluation .plot img')?.naturalWidth > 0")
    assert page.locator("#evaluation .answers tbody tr").count() == 6
    page.reload()
    page.locator("#evaluation .scores").wait_for()  # the address says which one
