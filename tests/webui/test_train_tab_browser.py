"""The Train tab as its user meets it, in a browser: form, text and plan stay in step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def recipe_text(page: Any) -> str:
    """The text in the editor."""
    return "\n".join(page.locator("#recipe .cm-line").all_inner_texts())


def field(page: Any, path: str) -> Any:
    """The row of a field."""
    return page.locator(f'.row[data-path="{path}"]')


def choose(page: Any, path: str, word: str) -> None:
    field(page, path).locator("select").first.select_option(word)


def pick(page: Any, recipe: str) -> None:
    page.locator("#recipes input").click()
    page.get_by_role("option", name=recipe).click()


def opened(open_page: Callable[..., Any], board: Any, **options: Any) -> Any:
    page = open_page(board.url, **options)
    page.wait_for_selector(".ht-plan .memory")
    return page


def test_form_text_and_plan_follow_each_other(board: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, board)
    pick(page, "quickstart_pretrain.yaml")
    page.wait_for_function("document.querySelector('#recipe .cm-content').innerText.includes('method: pretrain')")
    assert field(page, "adapter.rank").is_hidden()
    assert page.locator("#recipes input").input_value().startswith("quickstart_pretrain.yaml · ")

    choose(page, "precision.compute", "fp32")
    page.wait_for_selector('tr[data-plan="compute"] .chip.fp32')
    assert "asked for" in page.locator('tr[data-plan="compute"]').inner_text()
    assert "precision: fp32" in recipe_text(page)
    assert "# " in recipe_text(page), "comments are kept"

    choose(page, "adapter.type", "lora")
    field(page, "adapter.rank").wait_for(state="visible")
    field(page, "adapter.rank").locator("input").fill("12")
    field(page, "adapter.rank").locator("input").press("Tab")
    page.wait_for_function("document.querySelector('#recipe .cm-content').innerText.includes('rank: 12')")

    page.locator("#recipe .cm-line", has_text="max_length:").click()
    page.keyboard.press("End")
    page.keyboard.press("Backspace")
    shorter = field(page, "data.max_length").locator("input").input_value()[:-1]
    page.wait_for_function(
        """text => document.querySelector('.row[data-path="data.max_length"] input').value === text""", arg=shorter
    )


def test_problems_stand_beside_their_fields_all_at_once(board: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, board)
    for path, text in (("training.learning_rate", "fast"), ("adapter.rank", "0"), ("data.max_length", "12.5")):
        field(page, path).locator("input").fill(text)
        field(page, path).locator("input").press("Tab")
    page.wait_for_selector('.row[data-path="data.max_length"].wrong')
    assert field(page, "training.learning_rate").locator(".problem").inner_text() == (
        "training.learning_rate: should be a number, above 0, not 'fast'"
    )
    assert "at least 1" in field(page, "adapter.rank").locator(".problem").inner_text()
    assert page.locator(".ht-problems li").count() == 3
    assert "recipe.yaml:" in page.locator(".ht-problems li").first.inner_text()
    assert page.locator("#start").is_disabled()
    field(page, "training.learning_rate").locator(".reset").click()
    field(page, "adapter.rank").locator(".reset").click()
    field(page, "data.max_length").locator(".reset").click()
    page.wait_for_selector(".ht-problems.fine", state="attached")
    page.wait_for_selector("#start:enabled")


def test_broken_text_names_its_line_and_leaves_the_form(board: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, board)
    before = field(page, "training.output_dir").locator("input").input_value()
    page.locator("#recipe .cm-line").nth(1).click()
    page.keyboard.press("Home")
    page.keyboard.insert_text("a: b: c\n")
    page.wait_for_selector(".ht-form.unreadable")
    assert "recipe.yaml:2" in page.locator(".ht-problems").inner_text()
    assert field(page, "training.output_dir").locator("input").input_value() == before


def test_another_machine_and_what_it_cannot_run(board: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, board)
    page.locator("#machine input").click()
    page.get_by_role("option", name="Tesla T4").click()
    page.locator(".ht-plan .subject", has_text="Tesla T4").wait_for()
    assert "another machine" in page.locator(".ht-plan .elsewhere").first.inner_text()
    assert "✗" in field(page, "precision.compute").locator("option[value=bf16]").inner_text()
    choose(page, "precision.compute", "bf16")
    page.wait_for_selector(".ht-plan .problem")
    assert "bf16 is not possible" in page.locator(".ht-plan .problem").inner_text()
    assert "bf16 is not possible" in field(page, "precision.compute").locator(".problem").inner_text()
    choose(page, "precision.compute", "fp16")
    page.wait_for_selector('tr[data-plan="compute"] .chip.fp16')


def test_every_field_can_be_reached_and_lists_grow(board: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, board)
    for group in page.locator("details.group:not([hidden])").all():
        group.locator("> summary").click()
    for control in page.locator(".grid > .row:not([hidden]) :is(select, input[type=text], textarea)").all():
        if not control.evaluate("node => Boolean(node.closest('.card details'))"):
            assert control.is_visible(), control.get_attribute("id")
    field(page, "data.train").get_by_role("button", name="+ Add").click()
    second = field(page, "data.train[1].path").locator("input")
    second.fill("builtin:stdlib-text")
    second.press("Tab")
    page.wait_for_function("document.querySelector('#recipe .cm-content').innerText.includes('stdlib-text')")
    field(page, "data.train").get_by_role("button", name="Remove").first.click()
    page.wait_for_function("!document.querySelector('#recipe .cm-content').innerText.includes('python-docs')")


def test_text_comes_back_after_reload(board: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, board)
    box = field(page, "training.output_dir").locator("input")
    box.fill("runs/mine")
    box.press("Tab")
    page.wait_for_function("(localStorage.getItem('halftune-recipe') || '').includes('runs/mine')")
    page.reload()
    page.wait_for_function("document.querySelector('#recipe .cm-content')?.innerText.includes('runs/mine')")


def test_nothing_is_wider_than_the_window(board: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, board, color_scheme="dark")
    assert page.evaluate("document.body.classList.contains('dark')")
    for group in page.locator("details.group:not([hidden])").all():
        group.locator("> summary").click()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate(
            "[...document.querySelectorAll('.ht-form label, .ht-plan th, .ht-plan td, #toolbar button')]"
            ".filter(node => node.scrollWidth > node.clientWidth + 1 && node.offsetParent).map(node => node.innerText)"
        )
        assert not cut


def test_recipe_is_opened_and_downloaded(board: Any, open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(open_page, board)
    mine = tmp_path / "mine.yaml"
    mine.write_text("# mine\nmodel: {name_or_path: builtin:llama-tiny}\ndata: {train: builtin:python-docs}\n")
    with page.expect_file_chooser() as chooser:
        page.locator("#open").click()
    chooser.value.set_files(mine)
    page.wait_for_selector(".ht-problems li")
    assert "training: this section is missing" in page.locator(".ht-problems").inner_text()
    with page.expect_download() as download:
        page.locator("#download").click()
    assert Path(download.value.path()).read_text() == mine.read_text()


def test_chinese(start_board: Callable[..., Any], open_page: Callable[..., Any]) -> None:
    page = opened(open_page, start_board("--lang", "zh"))
    assert page.get_by_role("tab", name="训练").is_visible()
    assert field(page, "training.learning_rate").locator("label").inner_text() == "学习率"
