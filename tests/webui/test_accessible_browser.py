"""Every tab by axe-core, by keyboard and on small screens."""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halftune_webui.runs.started import ANSWER, Process, folder_of, note_exit, note_job, note_process
from halftune_webui.tabs import TABS

pytestmark = pytest.mark.nightly
ROWS = [{"prompt": f"Add {n} and {n + 1}.", "completion": f"It is {2 * n + 1}."} for n in range(12)]
RECIPE = """\
model: {name_or_path: builtin:qwen2-tiny}
data: {train: rows.jsonl, max_length: 48}
training: {output_dir: runs/adder}
"""


VERDICT = {
    "lines": [["tokens", "the same in 4 of 4 probes"], ["weights", "far"]],
    "findings": [dict.fromkeys(("what", "cause", "remedy", "source"), "words") | {"code": "weights.base"}],
    "numbers": {"to_trained": 1.0, "to_base": 0.0, "expected": 0.01},
}
METRIC = {"loss": {"value": 2.0, "error": None, "difference": -1.0, "difference_error": 0.1}}
MODEL = {"base": False, "compute": "fp32", "rows": 4, "tokens": 9, "prompts": 4}
SCORES = {
    "rows": "rows.jsonl",
    "models": [{**MODEL, "name": name, "metrics": METRIC} for name in ("a", "b")],
    "notes": ["note"],
    "files": ["scores.png", "answers-a.jsonl", "answers-b.jsonl"],
}
PLOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def used(own: Path, run: Path) -> None:
    """What was done with a result: an export whose check differs, and an evaluation."""
    export, evaluation = own / "exports" / "1-good", own / "evaluations" / "1-good"
    gone = Process(os.getpid(), "another boot", Process.of(os.getpid()).host)
    for job, verb, answer in (
        (export, ["export", str(run), "--output", "models/good"], {}),
        (export / "check", ["verify", "--json"], VERDICT),
        (evaluation, ["evaluate", str(run), "--json"], SCORES),
    ):
        job.mkdir(parents=True)
        note_job(job, verb, own, 1.0)
        note_process(job, gone, gone)
        note_exit(job, 0, 2.0, out_of_memory=False)
        (folder_of(job) / ANSWER).write_text(json.dumps(answer))
    (export / "status.json").write_text(json.dumps({"state": "finished", "phase": "", "pid": 0}))
    (evaluation / "scores.png").write_bytes(b64decode(PLOT))
    for name in ("a", "b"):
        row = {"prompt": [{"role": "user", "content": "Add 1 and 2."}], "reference": "It is 3.", "answer": "3"}
        (evaluation / f"answers-{name}.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture(scope="module", params=["en", "zh"])
def filled_web_ui(request: Any, start_web_ui: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A web UI with data, a finished run with curves, and one that failed."""
    folder = tmp_path_factory.mktemp("accessible")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, end in (("good", {"state": "finished"}), ("bad", {"state": "failed", "error": "no row is left"})):
        run = folder / "runs" / name
        (run / ("final" if name == "good" else "checkpoint-1")).mkdir(parents=True)
        (run / "resolved.yaml").write_text(RECIPE)
        steps = [json.dumps({"step": step, "loss": 1 / step, "time": 1.0}) for step in range(1, 9)]
        (run / "metrics.jsonl").write_text("\n".join(steps) + "\n")
        (run / "status.json").write_text(json.dumps({"step": 8, "total": 8, **end}))
        if name == "good":
            (run / "finished.json").write_text(json.dumps({"step": 8}))
    used(folder / "runs" / ".webui", folder / "runs" / "good")
    web_ui = start_web_ui("--lang", request.param, folder=folder)
    web_ui.language = request.param
    return web_ui


# Of what is the same in both: colours and keys have no words.
in_english = pytest.mark.parametrize("filled_web_ui", ["en"], indirect=True)


# Colours change slowly; what turns for ever is left out.
SETTLED = """() => new Promise((done) => {
  const ends = (one) => one.playState === 'running' && Number.isFinite(one.effect.getComputedTiming().endTime);
  const look = () => (document.getAnimations().some(ends) ? requestAnimationFrame(look) : done());
  requestAnimationFrame(() => requestAnimationFrame(look));
})"""


def opened(open_page: Callable[..., Any], web_ui: Any, **options: Any) -> Any:
    page = open_page(web_ui.url, recipe=RECIPE, **options)
    page.wait_for_selector(".ht-plan .memory")
    page.wait_for_selector('.row[data-path="training.output_dir"].set')
    return page


def to(page: Any, name: str) -> None:
    """Opens a tab, and waits for what it shows by itself."""
    page.locator(f"#tab-{name}-button").click()
    there = {
        "runs": "#run-cards .card",
        "export": "#exports .verdict.differs",
        "evaluate": "#evaluation .scores",
        "data": "#data-subject b",
        "doctor": "#machine-facts table",
    }
    page.locator(there.get(name, f"#tab-{name} h2")).first.wait_for(state="attached")
    page.evaluate(SETTLED)


@pytest.mark.parametrize(("filled_web_ui", "scheme"), [("en", "light"), ("zh", "dark")], indirect=["filled_web_ui"])
def test_no_tab_has_a_serious_fault(filled_web_ui: Any, open_page: Callable[..., Any], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    page = opened(open_page, filled_web_ui, color_scheme=scheme)
    page.evaluate(Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    assert page.evaluate("document.documentElement.lang") == filled_web_ui.language
    found = []
    for name in TABS:
        to(page, name)
        for one in page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]:
            if one["impact"] in ("serious", "critical"):
                found += [(name, one["id"], node["html"][:120]) for node in one["nodes"]]
    assert not found


SMALL = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), small = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility() || node.closest('script, style')) continue;
    if (parseFloat(getComputedStyle(node).fontSize) < 13) small.push(texts.currentNode.data.trim().slice(0, 40));
  }
  return small;
}"""
UNMARKED = """() => [...document.querySelectorAll('input, select, textarea, button, summary, a, [tabindex="0"]')]
  .filter((node) => {
    if (!node.checkVisibility() || node.disabled) return false;
    node.focus({focusVisible: true});
    const look = getComputedStyle(node.matches('.cm-content') ? node.closest('.cm-editor') : node);
    return document.activeElement === node && (look.outlineStyle === 'none' || parseFloat(look.outlineWidth) < 2);
  }).map((node) => node.outerHTML.slice(0, 120))"""

# Tabs whose ring reaches over an edge at which something around them cuts it off.
CLIPPED = """() => [...document.querySelectorAll('#tabs [role=tab]')].filter((node) => {
  if (!node.checkVisibility() || node.tabIndex < 0) return false;
  node.focus({focusVisible: true});
  const look = getComputedStyle(node), ring = parseFloat(look.outlineWidth) + parseFloat(look.outlineOffset);
  const box = node.getBoundingClientRect();
  for (let outer = node.parentElement; outer.id !== 'tabs'; outer = outer.parentElement) {
    const edge = outer.getBoundingClientRect();
    if (getComputedStyle(outer).overflowY === 'visible') continue;
    if (box.top - ring < edge.top - .5 || box.bottom + ring > edge.bottom + .5) return true;
  }
  return false;
}).map((node) => node.innerText)"""


def test_the_ring_of_a_tab_is_whole(filled_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, filled_web_ui, width=390)
    assert page.evaluate(CLIPPED) == []


@in_english
def test_every_field_shows_the_focus_and_no_text_is_tiny(filled_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, filled_web_ui)
    for name in TABS:
        to(page, name)
        assert page.evaluate(UNMARKED) == [], name
        assert page.evaluate(SMALL) == [], name
        assert page.locator("h1:visible, h2:visible").count() == 2, name


@in_english
def test_tab_leaves_the_editor_and_leaves_the_recipe_alone(filled_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, filled_web_ui)
    editor = page.locator("#recipe .cm-content")
    before = editor.inner_text()
    editor.focus()
    page.keyboard.press("Shift+Tab")
    assert not page.evaluate("Boolean(document.activeElement.closest('.cm-editor'))")
    editor.focus()
    page.keyboard.press("Tab")
    assert not page.evaluate("Boolean(document.activeElement.closest('.cm-editor'))")
    assert editor.inner_text() == before
    field = page.locator('.row[data-path="training.output_dir"]')
    order = field.evaluate("node => [...node.querySelectorAll('input, .reset')].map((one) => one.className)")
    assert order[-1] == "reset"  # after what it resets


def test_small_screens_say_whether_it_fits(filled_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, filled_web_ui, width=768)
    form, plan = (page.locator(one).bounding_box() for one in ("#form", "#plan"))
    assert plan["y"] > form["y"] + form["height"]
    page.set_viewport_size({"width": 390, "height": 844})
    line = page.locator(".ht-brief")
    for _ in range(2):
        box = line.bounding_box()
        assert box["y"] + box["height"] <= 844
        page.evaluate("window.scrollTo(0, 600)")
    assert "·" in line.inner_text()
    line.click()
    page.wait_for_function("document.querySelector('#plan').getBoundingClientRect().top < 300")


def test_buttons_keep_their_place_on_small_screens(filled_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, filled_web_ui, width=768)
    to(page, "runs")
    card = page.locator("#run-cards .card[data-card] .command").first
    code, copy = (card.locator(one).bounding_box() for one in ("code", "button"))
    assert copy["y"] < code["y"] + code["height"], "Copy stands beside its command"
    page.set_viewport_size({"width": 390, "height": 844})
    to(page, "data")
    row = page.locator(".ht-row:has(#look-at-data)")
    whole, buttons = row.bounding_box(), [one.bounding_box() for one in row.locator("> button").all()]
    assert max(one["x"] + one["width"] for one in buttons[:2]) > whole["x"] + whole["width"] - 2
    assert buttons[-1]["width"] > whole["width"] - 2  # alone in its line


@in_english
def test_the_address_brings_back_tab_and_compared_runs(filled_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, filled_web_ui)
    to(page, "runs")
    for box in page.locator("#run-list input[type=checkbox]:not(:checked)").all():
        box.click()
    page.wait_for_function("document.querySelectorAll('#run-cards [data-card]').length === 2")
    page.wait_for_function("new URLSearchParams(location.hash.slice(1)).getAll('open').length === 2")
    page.reload()
    page.wait_for_function("document.querySelectorAll('#run-cards [data-card]').length === 2")
    page.wait_for_function("document.querySelector('#tabs [aria-selected=true]').id === 'tab-runs-button'")
