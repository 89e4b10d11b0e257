"""What pages of one board show and do: each its own runs, whatever the other pages and the clock do meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halftune.core.errors import HalftuneError
from halftune_webui.labels import load_words
from halftune_webui.runs.desk import MOST, Desk, View, act, refresh, start
from halftune_webui.runs.show import REPORT
from halftune_webui.settings import Settings


def make(runs: Path, name: str, steps: int = 3) -> Path:
    """A finished run."""
    run = runs / name
    run.mkdir(parents=True)
    (run / "resolved.yaml").write_text("{}")
    lines = [json.dumps({"step": step, "loss": 1 / step, "time": 1.0}) for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "finished.json").write_text(json.dumps({"step": steps}))
    return run


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    root = tmp_path.resolve()
    for name in "abcdefgh":
        make(root / "runs", name)
    return Desk(Settings((root,), root / "runs"), load_words("en"))


def test_each_page_has_its_own_open_runs(desk: Desk) -> None:
    runs, (one, two) = desk.settings.runs, (View(), View())
    act(desk, one, "open", str(runs / "a"), False)
    act(desk, two, "tick", str(runs / "b"), True)
    act(desk, two, "tick", str(runs / "c"), True)
    cards = [refresh(desk, view)[1] for view in (one, two)]
    assert cards[0] is not None
    assert cards[1] is not None
    assert cards[0].count("data-card") == 1
    assert [f'data-card="{runs / name}"' in cards[1] for name in "abc"] == [False, True, True]
    act(desk, two, "tick", str(runs / "b"), False)
    assert (one.opened, two.opened) == ([runs / "a"], [runs / "c"])
    for name in "abcdefgh":
        act(desk, one, "tick", str(runs / name), True)
    assert [run.name for run in one.opened] == list("cdefgh")
    assert len(one.opened) == MOST


def test_a_look_that_was_overtaken_is_not_sent(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock's look at the disk is slow on a busy machine; what the reader opened meanwhile stays open."""
    runs, view = desk.settings.runs, View()
    view.show([runs / "a"])
    states = desk.states

    def slow() -> list:
        monkeypatch.setattr(desk, "states", states)
        act(desk, view, "open", str(runs / "b"), False)
        assert f'data-card="{runs / "b"}"' in str(refresh(desk, view)[1])
        return states()

    monkeypatch.setattr(desk, "states", slow)
    assert refresh(desk, view) == [None, None, None]
    assert view.opened == [runs / "b"]
    assert refresh(desk, view) == [None, None, None]  # it shows b already


def test_only_what_has_changed_is_sent(desk: Desk) -> None:
    view = View()
    assert None not in refresh(desk, view)
    assert refresh(desk, view) == [None, None, None]
    with (view.opened[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "eval_loss": 0.5, "time": 1.0}) + "\n")
    listed, cards, curves = refresh(desk, view)
    assert (listed, cards) == (None, None)
    assert "[3, 0.5]" in str(curves)


def test_a_page_opens_the_first_run_there_is_and_none_that_the_reader_closed(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    desk, view = Desk(Settings((root,), root / "runs"), load_words("en")), View()
    assert "data-card" not in str(refresh(desk, view)[1])
    run = make(root / "runs", "a")  # started by another page, or by hand
    assert "data-card" in str(refresh(desk, view)[1])
    act(desk, view, "tick", str(run), False)
    assert refresh(desk, view)[1] == ""
    assert refresh(desk, view)[1] is None


def test_what_is_gone_is_closed(desk: Desk) -> None:
    runs, view = desk.settings.runs, View()
    for name in "ab":
        act(desk, view, "tick", str(runs / name), True)
    refresh(desk, view)
    act(desk, View(), "delete", str(runs / "a"), False)  # another page
    assert str(refresh(desk, view)[1]).count("data-card") == 1
    with pytest.raises(HalftuneError, match="no run any more"):
        act(desk, view, "open", str(runs / "a"), False)


def test_a_report_is_shown_without_its_scripts(desk: Desk) -> None:
    run = desk.settings.runs / "a"
    (run / REPORT).write_text("<p>halftune run report</p><script>alert(1)</script>")
    html = act(desk, View(), "report", str(run), False)
    assert html is not None
    assert "<iframe sandbox " in html
    assert "<script>" not in html  # it stands in the frame's text, escaped
    assert "default-src &#x27;none&#x27;" in html
    assert act(desk, View(), "close", "", False) == ""


@pytest.mark.parametrize("what", ["launch", "__init__", "", "deleted"])
def test_unknown_buttons_do_nothing(desk: Desk, what: str) -> None:
    with pytest.raises(HalftuneError, match="no such button"):
        act(desk, View(), what, str(desk.settings.runs / "a"), True)


def test_a_wrong_recipe_is_not_started(desk: Desk) -> None:
    view = View()
    with pytest.raises(HalftuneError, match="model") as raised:
        start(desk, view, "precision: bf17\nadapter: 3\n")
    assert str(raised.value).count("\n") == 2  # three problems, one a line
    assert view == View()
