"""The scripts of the page: what they are given, and when."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

pytest.importorskip("gradio", reason="the web UI's package is not installed")

from halftune_webui.tabs.live import filled_in


def test_each_constant_stands_where_its_name_stood_whatever_it_holds() -> None:
    values = {"A": "B </script> \u2028 \\1", "B": ["A", None, "é"]}
    text = filled_in("A | B | ABBA", **values)
    first, second, rest = text.split(" | ")
    assert [json.loads(first), json.loads(second), rest] == [*values.values(), "ABBA"]
    assert text.isascii()
    assert "<" not in text


def test_a_constant_that_the_script_has_not_is_refused() -> None:
    with pytest.raises(KeyError, match="LATER"):
        filled_in("NOW", NOW=1, LATER=2)


def test_no_script_reads_a_constant_from_properties_that_may_come_later() -> None:
    """Gradio may run a component's script before it gives the properties: these change while the page is open."""
    read: dict[str, set[str]] = {}
    for one in (files("halftune_webui") / "assets").iterdir():
        code = re.sub(r"//.*", "", one.read_text(encoding="utf-8"))
        read[one.name] = set(re.findall(r"\b(?:props|given)\.(\w+)", code))
    changing = {name: {"value"} for name in ("form.js", "live.js", "charts.js")} | {"chat.js": {"value", "chosen"}}
    assert {name: names for name, names in read.items() if names} == changing
