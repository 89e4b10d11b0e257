"""The code of an error is shown beside it, small, and survives the way from a process to the page."""

from __future__ import annotations

import json

import pytest

from halftune.core.errors import ConfigError, DataError, HalftuneError
from halftune_webui.html import small_codes
from halftune_webui.labels import load_words
from halftune_webui.runs.ask import _answer
from halftune_webui.runs.log_tail import cause_in, split_code
from halftune_webui.settings import LANGUAGES

ERROR = DataError("the file <a> is empty", code="data.empty", where="x.yaml:4", remedy="fill it")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_problem_ends_with_its_code(language: str) -> None:
    words = load_words(language)
    assert words.problem(ERROR).endswith(" [data.empty]")
    assert words.problem(ERROR, place=False).endswith(" [data.empty]")


def test_the_code_is_small_and_the_rest_is_escaped() -> None:
    shown = small_codes(f"{ERROR.report()}\nfirst [a.b] then")
    assert shown.count('<small class="code">data.empty</small>') == 1
    assert "<a>" not in shown
    assert "[a.b]" in shown


def test_codes_come_from_a_process_that_answers_in_json() -> None:
    both = ConfigError([ERROR, HalftuneError("b", code="config.unknown_key")])
    with pytest.raises(HalftuneError) as caught:
        _answer("data", 2, json.dumps({"error": both.to_dict()}), both.report(), (0,), None)
    assert [each.code for each in caught.value.problems] == ["data.empty", "config.unknown_key"]
    assert caught.value.problems[0].where == "x.yaml:4"
    with pytest.raises(HalftuneError) as caught:
        _answer("data", 1, "", "killed", (0,), None)
    assert caught.value.code == "webui.verb_failed"


def test_the_code_is_taken_off_what_a_process_printed() -> None:
    said = split_code(cause_in(f"halftune chat: {ERROR.report()}\n"))
    assert (said.text, said.code) == (str(ERROR), "data.empty")
    assert split_code("killed").code == ""
