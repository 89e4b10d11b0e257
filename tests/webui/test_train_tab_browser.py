"""The Train tab as its user meets it, in a browser: form, text and plan stay in step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly


def written(page: Any, text: str, there: bool = True) -> None:
    """Waits until a text stands in the editor, or does no longer. What one change alters is not drawn in one moment."""
    editor = "document.querySelector('#recipe .cm-content')?.innerText"
    page.wait_for_function(f"([text, there]) => {editor}?.includes(text) === there", arg=[text, there])


def says(page: Any, selector: str, text: str) -> None:
    """Waits until something on the page says it."""
    page.locator(selector, has_text=text).first.wait_for()


def filled(page: Any, path: str, text: str) -> None:
    """Waits until a field shows the value."""
    page.wait_for_function(
        """([path, text]) => document.querySelector(`.row[data-path="${path}"] input`)?.value === text""",
        arg=[path, text],
    )


def field(page: Any, path: str) -> Any:
    """The row of a field."""
    return page.locator(f'.row[data-path="{path}"]')


def choose(page: Any, path: str, word: str) -> None:
    field(page, path).locator("select").first.select_option(word)


def pick(page: Any, recipe: str) -> None:
    page.locator("#recipes input").click()
    page.get_by_role("option", name=recipe).click()


def opened(open_page: Callable[..., Any], web_ui: Any, **options: Any) -> Any:
    """A page whose first recipe has reached every part of it."""
    page = open_page(web_ui.url, **options)
    page.wait_for_selector(".ht-plan .memory")
    page.wait_for_selector('.row[data-path="training.output_dir"].set')
    page.wait_for_selector(".ht-problems.fine", state="attached")
    written(page, "output_dir:")
    return page


def test_form_text_and_plan_follow_each_other(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, web_ui)
    pick(page, "quickstart_pretrain.yaml")
    written(page, "method: pretrain")
    field(page, "adapter.rank").wait_for(state="hidden")
    page.wait_for_function("document.querySelector('#recipes input').value.startsWith('quickstart_pretrain.yaml · ')")

    for method, shown in (("grpo", ":not([hidden])"), ("dpo", "[hidden]")):  # a list of sections, too
        choose(page, "method.type", method)
        page.wait_for_selector(f'.row[data-path="method.rewards"]{shown}', state="attached")
    choose(page, "method.type", "pretrain")
    choose(page, "precision.compute", "fp32")
    says(page, 'tr[data-plan="compute"]:has(.chip.fp32)', "asked for")
    written(page, "precision: fp32")
    written(page, "# ")  # comments are kept

    choose(page, "adapter.type", "lora")
    field(page, "adapter.rank").wait_for(state="visible")
    field(page, "adapter.rank").locator("input").fill("12")
    field(page, "adapter.rank").locator("input").press("Tab")
    written(page, "rank: 12")

    shorter = field(page, "data.max_length").locator("input").input_value()[:-1]
    assert shorter
    page.locator("#recipe .cm-line", has_text="max_length:").click()
    page.keyboard.press("End")
    page.keyboard.press("Backspace")
    filled(page, "data.max_length", shorter)


OPENINGS = int(os.environ.get("HALFTUNE_TEST_OPENINGS", "60"))


def test_the_form_is_filled_however_often_the_page_is_opened(web_ui: Any, open_page: Callable[..., Any]) -> None:
    """In which order the page's parts, its scripts and the first answers come is chance."""
    for _ in range(OPENINGS):
        page = opened(open_page, web_ui)
        assert field(page, "training.output_dir").locator("input").input_value() == "runs/own-data"
        page.context.close()


def test_a_recipe_of_ones_own_is_replaced_only_when_the_reader_says_so(
    web_ui: Any, open_page: Callable[..., Any]
) -> None:
    page, asked = opened(open_page, web_ui), list[str]()
    pick(page, "quickstart_pretrain.yaml")  # in place of a shipped one: no question
    written(page, "method: pretrain")
    field(page, "training.max_steps").locator("input").fill("77")
    field(page, "training.max_steps").locator("input").press("Tab")
    written(page, "max_steps: 77")
    page.wait_for_function("!document.querySelector('#recipes input').value.startsWith('quickstart')")
    mine = page.locator("#recipes input").input_value()

    def answered(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.accept() if len(asked) > 1 else dialog.dismiss()

    page.on("dialog", answered)
    pick(page, "own_data.yaml")
    page.wait_for_function("mine => document.querySelector('#recipes input').value === mine", arg=mine)
    written(page, "max_steps: 77")
    page.wait_for_function("performance.now() - window.halftunePicked.at > 1000")  # else it is the same choice
    pick(page, "own_data.yaml")
    written(page, "max_steps: 77", there=False)
    assert len(set(asked)) == 1
    assert len(asked) == 2


def test_problems_stand_beside_their_fields_all_at_once(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, web_ui)
    for path, text in (("training.learning_rate", "fast"), ("adapter.rank", "0"), ("data.max_length", "12.5")):
        field(page, path).locator("input").fill(text)
        field(page, path).locator("input").press("Tab")
    page.locator(".ht-problems li").nth(2).wait_for()
    page.wait_for_selector("#start:disabled")
    page.wait_for_selector('.row[data-path="data.max_length"].wrong')
    problem = field(page, "training.learning_rate").locator(".problem").inner_text()
    assert problem.startswith("training.learning_rate: ")
    assert "[config.invalid_value]" in problem
    assert "≥ 1" in field(page, "adapter.rank").locator(".problem").inner_text()
    assert page.locator(".ht-problems li").count() == 3
    assert "recipe.yaml:" in page.locator(".ht-problems li").first.inner_text()
    field(page, "training.learning_rate").locator(".reset").click()
    field(page, "adapter.rank").locator(".reset").click()
    field(page, "data.max_length").locator(".reset").click()
    page.wait_for_selector(".ht-problems.fine", state="attached")
    page.wait_for_selector("#start:enabled")


def test_broken_text_names_its_line_and_leaves_the_form(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, web_ui)
    before = field(page, "training.output_dir").locator("input").input_value()
    page.locator("#recipe .cm-line").nth(1).click()
    page.keyboard.press("Home")
    page.keyboard.insert_text("a: b: c\n")
    page.wait_for_selector(".ht-form.unreadable")
    says(page, ".ht-problems", "recipe.yaml:2")
    assert field(page, "training.output_dir").locator("input").input_value() == before


def test_another_machine_and_what_it_cannot_run(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, web_ui)
    page.locator("#machine input").click()
    page.get_by_role("option", name="Tesla T4").click()
    page.locator(".ht-plan .subject", has_text="Tesla T4").wait_for()
    says(page, ".ht-plan .elsewhere", "another machine")
    field(page, "precision.compute").locator("option[value=bf16]", has_text="✗").wait_for(state="attached")
    choose(page, "precision.compute", "bf16")
    says(page, ".ht-plan .problem", "bf16 is unavailable")
    says(page, '.row[data-path="precision.compute"] .problem', "bf16 is unavailable")
    choose(page, "precision.compute", "fp16")
    page.wait_for_selector('tr[data-plan="compute"] .chip.fp16')


def test_every_field_can_be_reached_and_lists_grow(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, web_ui)
    for group in page.locator("details.group:not([hidden])").all():
        group.locator("> summary").click()
    for control in page.locator(".grid > .row:not([hidden]) :is(select, input[type=text], textarea)").all():
        if not control.evaluate("node => Boolean(node.closest('.card details'))"):
            assert control.is_visible(), control.get_attribute("id")
    field(page, "data.train").get_by_role("button", name="+ Add").click()
    second = field(page, "data.train[1].path").locator("input")
    second.fill("builtin:stdlib-text")
    second.press("Tab")
    written(page, "stdlib-text")
    field(page, "data.train").get_by_role("button", name="Remove").first.click()
    written(page, "python-docs", there=False)


def test_text_comes_back_after_reload(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, web_ui)
    box = field(page, "training.output_dir").locator("input")
    box.fill("runs/mine")
    box.press("Tab")
    page.wait_for_function("(localStorage.getItem('halftune-recipe') || '').includes('runs/mine')")
    page.reload()
    written(page, "runs/mine")


def test_a_page_that_opens_never_forgets_the_recipe(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(web_ui.url)
    page.add_init_script(
        "const set = Storage.prototype.setItem; window.kept = []; Storage.prototype.setItem = function (key, text) {"
        "if (key === 'halftune-recipe') window.kept.push(text); return set.call(this, key, text); }"
    )
    page.reload()
    written(page, "output_dir:")
    page.wait_for_function("window.kept.length")
    assert all(page.evaluate("window.kept"))


def test_nothing_is_wider_than_the_window(web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, web_ui, color_scheme="dark")
    page.wait_for_function("document.body.classList.contains('dark')")
    for group in page.locator("details.group:not([hidden])").all():
        group.locator("> summary").click()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        # what lays itself out by script needs a moment
        page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)
        page.wait_for_function(
            "![...document.querySelectorAll('.ht-form label, .ht-plan th, .ht-plan td, #toolbar button')]"
            ".some(node => node.scrollWidth > node.clientWidth + 1 && node.offsetParent)"
        )


def test_recipe_is_opened_and_downloaded(web_ui: Any, open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(open_page, web_ui)
    mine = tmp_path / "mine.yaml"
    mine.write_text("# mine\nmodel: {name_or_path: builtin:llama-tiny}\ndata: {train: builtin:python-docs}\n")
    with page.expect_file_chooser() as chooser:
        page.locator("#open").click()
    chooser.value.set_files(mine)
    says(page, ".ht-problems li", "training: this section is missing")
    written(page, "# mine")
    with page.expect_download() as download:
        page.locator("#download").click()
    assert Path(download.value.path()).read_text() == mine.read_text()


def test_chinese(start_web_ui: Callable[..., Any], open_page: Callable[..., Any]) -> None:
    page = opened(open_page, start_web_ui("--lang", "zh"))
    page.get_by_role("tab", name="训练").wait_for()
    assert field(page, "training.learning_rate").locator("label").inner_text() == "学习率"
