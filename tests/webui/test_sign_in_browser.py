"""Signing in with a browser: one wrong try costs nothing but the try; and signing out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.nightly


def test_a_wrong_password_is_told_and_the_name_stays(
    start_web_ui: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    web_ui = start_web_ui("--host", "0.0.0.0", "--lang", "zh", HALFTUNE_WEBUI_AUTH="me:right-one")
    page = open_page(web_ui.url)
    assert page.locator("h1").inner_text() == "halftune"
    assert page.evaluate("[document.documentElement.lang, document.activeElement.id]") == ["zh", "username"]
    fields = [page.locator(f"#{name}").get_attribute("autocomplete") for name in ("username", "password")]
    assert fields == ["username", "current-password"]
    page.keyboard.type("me")
    page.keyboard.press("Tab")
    page.keyboard.type("wrong")
    page.seen.expected.append("status of 400")  # what the browser itself writes of the refusal
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#wrong').textContent")
    page.wait_for_function("document.activeElement.id === 'password'")
    assert page.locator("#username").input_value() == "me"
    page.keyboard.type("right-one")  # over the wrong one, which is selected
    page.keyboard.press("Enter")
    page.wait_for_selector(".ht-plan .memory")
    assert page.evaluate("document.documentElement.lang") == "zh"
    page.locator(".ht-head a[href=logout]").click()
    page.wait_for_selector("#password")
    page.reload()
    page.wait_for_selector("#password")
