"""The first hour with a file of one's own, by keyboard alone, on a wide and on a narrow screen; and many runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import until

pytestmark = pytest.mark.nightly


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def card(page: Any) -> Any:
    return page.locator("#run-cards .card[data-card]")


# Where something to be reached lies as seen from the focus.
WHERE = """(selector) => {
  const now = document.activeElement, every = [...document.querySelectorAll(selector)];
  const there = every.find((one) => one.checkVisibility());
  if (!there) return 'nowhere';
  if (now === there) return 'found';
  const follows = there.compareDocumentPosition(now) & Node.DOCUMENT_POSITION_FOLLOWING;
  return now !== document.body && follows ? 'before' : 'behind';
}"""
# What has the focus: it has a ring, lies in the window, nothing covers it, and no list of another field is left open.
SEEN = """() => {
  const now = document.activeElement, look = getComputedStyle(now), box = now.getBoundingClientRect();
  const on = document.elementFromPoint(box.x + box.width / 2, box.y + Math.min(box.height, 30) / 2);
  return [look.outlineStyle !== 'none' && parseFloat(look.outlineWidth) >= 2,
    box.left >= 0 && box.right <= innerWidth + 1, Boolean(on) && (now.contains(on) || on.contains(now)),
    [...document.querySelectorAll(".options")].every((one) => !one.checkVisibility() || one.parentNode.contains(now))];
}"""


class Keyboard:
    """A reader without a mouse: goes from field to field, types, presses."""

    def __init__(self, page: Any, shots: Path | None) -> None:
        self.page, self.shots, self.taken = page, shots, 0

    def go(self, selector: str) -> None:
        """Presses Tab, or Shift and Tab, until the focus is there; it can be seen then."""
        self.page.locator(selector).first.wait_for()
        for _ in range(200):
            where = self.page.evaluate(WHERE, selector)
            if where == "found":
                break
            self.page.keyboard.press("Shift+Tab" if where == "before" else "Tab")
        else:
            raise AssertionError(f"no key leads to {selector}")
        assert self.page.evaluate(SEEN) == [True] * 4, selector

    def press(self, selector: str, key: str = "Enter") -> None:
        """Goes there and presses a key."""
        self.go(selector)
        self.page.keyboard.press(key)

    def write(self, selector: str, text: str, end: str = "Tab") -> None:
        """Types a text in place of the one that is there."""
        self.go(selector)
        if self.page.evaluate("document.activeElement.matches('input, textarea')"):
            self.page.keyboard.press("Control+A")
        self.page.keyboard.type(text)
        self.page.keyboard.press(end)

    def put(self, path: str, text: str) -> None:
        """Types a value into the form, which reaches the recipe."""
        self.write(f'.row[data-path="{path}"] :is(input, select)', text)
        self.says(f"{path.rpartition('.')[2]}: {text}")

    def says(self, text: str) -> None:
        """Waits until the recipe says it."""
        self.page.wait_for_function("text => window.halftuneRecipe?.includes(text)", arg=text)

    def tab(self, name: str) -> None:
        """Opens a tab; on a narrow screen it may be behind the three points."""
        if not self.page.locator(f"#tab-{name}-button").is_visible():
            self.press("#tabs .overflow-menu > button")
            label = name.capitalize()
            places = self.page.locator("#tabs .overflow-dropdown button").all_inner_texts()
            self.press(f"#tabs .overflow-dropdown button:nth-of-type({places.index(label) + 1})")
        else:
            self.press(f"#tab-{name}-button")
        self.page.locator(f"#tab-{name}").wait_for()

    def shot(self) -> None:
        """A picture to be looked at, where HALFTUNE_PICTURES names a folder."""
        self.taken += 1
        if self.shots:
            width = self.page.viewport_size["width"]
            self.page.screenshot(path=self.shots / f"hour-{width}-{self.taken:02}.png")


def test_the_first_hour_by_keyboard(
    start_web_ui: Callable[..., Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    """Own data from the upload to the exported model, and no mouse; then the same way on a narrow screen."""
    rows = [{"prompt": f"Add {n} and 1.", "completion": f"It is {n + 1}."} for n in range(12)]
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    web_ui = start_web_ui()
    page = open_page(web_ui.url, width=1440)
    pictures = os.environ.get("HALFTUNE_PICTURES")
    keys = Keyboard(page, Path(pictures) if pictures else None)
    page.wait_for_function("document.querySelector('#recipes input')?.value.startsWith('own_data.yaml')")
    with page.expect_file_chooser() as chooser:
        keys.press(".ht-files .bar button:nth-of-type(2)")
    chooser.value.set_files(mine)
    keys.says("data/mine.jsonl")
    page.wait_for_function("!document.querySelector('#recipes input').value.startsWith('own_data.yaml')")
    assert (web_ui.folder / "data" / "mine.jsonl").read_text() == mine.read_text()
    keys.shot()

    keys.tab("data")
    keys.press("#look-at-data")
    page.locator("#data-report .sample .t", has_text="It is").first.wait_for()
    keys.shot()

    keys.tab("train")
    keys.put("data.eval_split", "64")  # told before anything is written
    page.locator('.row[data-path="data.eval_split"] .problem', has_text="64").wait_for()
    page.wait_for_selector("#start:disabled")
    keys.put("data.eval_split", "0")
    keys.write("#machine input", "Tesla T4", "Enter")  # what a T4 cannot run does not keep this one from starting
    page.locator(".ht-plan .subject", has_text="Tesla T4").wait_for()
    keys.write('.row[data-path="precision.compute"] select', "bf16")
    page.locator(".ht-plan .problem").wait_for()
    page.wait_for_selector(".ht-problems.fine", state="attached")
    page.wait_for_selector("#start:enabled")
    keys.shot()
    keys.write('.row[data-path="precision.compute"] select', "fp32")
    keys.says("precision: fp32")
    keys.put("data.max_length", "64")
    keys.put("training.max_steps", "9999")

    page.wait_for_selector("#start:enabled")
    keys.press("#start")
    page.locator("[data-chart=loss] path.main").wait_for()
    keys.shot()
    keys.press("#run-cards [data-act=stop]")
    card(page).get_by_text("stopped", exact=True).wait_for()
    keys.press("#run-cards [data-act=edit]")
    keys.says("output_dir: runs/own-data-2")
    keys.put("training.max_steps", "3")
    page.wait_for_selector("#start:enabled")
    keys.press("#start")
    card(page).get_by_text("finished", exact=True).wait_for()

    keys.press("#run-list tbody tr:not(.open) input", "Space")
    page.locator(".differences", has_text="max_steps").wait_for()
    keys.shot()

    keys.press("#run-cards [data-act=chat]")
    page.locator("#chat [data-chat$=own-data-2]").wait_for(state="attached")
    keys.write("#chat-message", "Add 3 and 1.", "Enter")
    page.locator("#trained p.user + p").wait_for()
    page.wait_for_selector("#chat-again:enabled")
    keys.shot()

    keys.tab("export")
    page.wait_for_function("document.querySelector('#export-run input')?.value === 'own-data-2'")
    keys.press("#export-start")
    page.locator("#exports").get_by_text("finished", exact=True).wait_for()
    keys.shot()
    assert (web_ui.folder / "models" / "own-data-2" / "model.safetensors").stat().st_size > 0
    recipe = page.evaluate("window.halftuneRecipe")
    on_a_narrow_screen(Keyboard(open_page(web_ui.url, width=390, recipe=recipe), keys.shots))


def on_a_narrow_screen(keys: Keyboard) -> None:
    """Every field of the first hour is reached and seen; nothing is started again."""
    keys.go(".ht-files .bar button:nth-of-type(2)")
    keys.tab("data")
    keys.go("#look-at-data")
    keys.tab("train")
    keys.write("#machine input", "Tesla T4", "Enter")
    keys.page.locator(".ht-plan .subject", has_text="Tesla T4").wait_for()
    keys.put("training.max_steps", "4")
    keys.write('.row[data-path="precision.compute"] select', "fp32")
    keys.shot()
    keys.tab("runs")
    keys.press("#run-list tbody tr:not(.open) input", "Space")
    keys.page.locator(".differences", has_text="max_steps").wait_for()
    for action in ("edit", "chat"):
        keys.go(f"#run-cards [data-act={action}]")
    keys.shot()
    keys.press("#run-cards [data-act=chat]")
    keys.go("#chat-message")
    keys.shot()
    keys.tab("export")
    keys.go("#export-start")
    keys.shot()


DROP = """([name, text]) => {
  const data = new DataTransfer(), box = document.querySelector('#form .ht-files');
  data.items.add(new File([text], name));
  const options = {dataTransfer: data, bubbles: true, cancelable: true};
  const send = (kind) => box.dispatchEvent(new DragEvent(kind, options));
  return [send('dragover'), document.querySelectorAll('.ht-files.over').length, send('drop')];
}"""


def test_a_file_that_is_dropped_is_taken(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(web_ui.url)
    page.wait_for_function("window.halftuneRecipe?.includes('python-docs')")
    text = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    # the browser itself opens no file: both events are taken
    assert page.evaluate(DROP, ["dropped.jsonl", text]) == [False, 1, False]
    page.wait_for_function("window.halftuneRecipe?.includes('data/dropped.jsonl')")
    assert (web_ui.folder / "data" / "dropped.jsonl").read_text() == text
    assert page.locator(".ht-files.over").count() == 0
    page.seen.expected.append("status of 400")  # what the browser itself writes of the refusal
    page.evaluate(DROP, ["dropped.exe", "x"])  # no data
    page.locator(".ht-files .problem").wait_for()
    assert not (web_ui.folder / "data" / "dropped.exe").exists()


def test_a_dropped_row_unfolds(web_ui: Any, open_page: Callable[..., Any]) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "<img src=x> " + "long " * 99, "completion": "b"}]
    (web_ui.folder / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = "model: {name_or_path: builtin:qwen2-tiny}\ndata: {train: two.jsonl, max_length: 32}\n"
    page = open_page(f"{web_ui.url}/#tab=data", recipe=f"{recipe}training: {{output_dir: runs/two}}\n")
    page.locator("#data-subject b", has_text="two.jsonl").wait_for()
    page.locator("#look-at-data").click()
    row = page.locator("#data-report details")
    row.locator("summary").wait_for()
    assert not row.locator("pre").is_visible()
    row.locator("summary").press("Enter")
    row.locator("pre", has_text="<img src=x>").wait_for()  # as text
    assert page.locator("#data-report .old").count() == 0
    tab(page, "Train")
    limit = page.locator('.row[data-path="data.max_length"] input')
    limit.fill("64")
    limit.press("Tab")
    tab(page, "Data")
    page.locator("#data-report .old .stale").wait_for()  # the report is of another recipe now
    assert row.locator("pre").is_visible()


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
    start_web_ui: Callable[..., Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path.resolve()
    for number in range(120):
        make(folder / "runs", number)
    page = open_page(start_web_ui(folder=folder).url, width=1440)
    tab(page, "Runs")
    listed(page, 50)
    page.get_by_role("button", name="Show more").hover()
    page.mouse.down()
    answers = list[Any]()
    page.on("response", lambda answer: answers.append(answer) if "/run/predict" in answer.url else None)
    make(folder / "runs", 120)  # the list changes between press and release

    def told() -> bool:
        page.wait_for_timeout(50)
        return any("sweep-120" in answer.text() for answer in answers)

    until(told, "an answer with the new run")
    page.mouse.up()
    listed(page, 100)
    assert page.locator("#run-list .list").bounding_box()["height"] < 450
    assert page.locator("#run-list .name").first.inner_text() == "sweep-120"

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
    last.get_by_role("button", name="Unpin").wait_for()
    search.fill("keep")
    listed(page, 1)
    page.locator("#run-list .pin").wait_for()

    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete the 3 ticked").click()
    page.locator("#run-cards .card").first.wait_for(state="detached")
    left = [path.name for path in (folder / "runs").iterdir() if path.name.startswith("sweep")]
    assert len(left) == 118
    assert not {"sweep-012", "sweep-015"} & set(left)
