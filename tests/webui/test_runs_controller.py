"""What pages of one web UI show and do: each its own runs, whatever the other pages and the clock do meanwhile."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from html import unescape
from pathlib import Path

import pytest

from halftune.core.errors import HalftuneError
from halftune.train.report.series import script_source
from halftune_webui.labels import load_words
from halftune_webui.runs import listing, start_stop
from halftune_webui.runs.controller import AREAS, MOST, PAGE, Done, RunsController, View, act, refresh, start
from halftune_webui.runs.started import folder_of
from halftune_webui.runs.state import look
from halftune_webui.runs.view.show import REPORT
from halftune_webui.settings import Settings

NOTHING = [None for _ in AREAS]


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
def controller(tmp_path: Path) -> RunsController:
    root = tmp_path.resolve()
    for name in "abcdefgh":
        make(root / "runs", name)
    return RunsController(Settings((root,), root / "runs"), load_words("en"))


def test_each_page_has_its_own_open_runs(controller: RunsController) -> None:
    runs, (one, two) = controller.settings.runs, (View(), View())
    act(controller, one, "open", str(runs / "a"), False)
    act(controller, two, "tick", str(runs / "b"), True)
    act(controller, two, "tick", str(runs / "c"), True)
    cards = [refresh(controller, view)[1] for view in (one, two)]
    assert cards[0] is not None
    assert cards[1] is not None
    assert cards[0].count("data-card") == 1
    assert [f'data-card="{runs / name}"' in cards[1] for name in "abc"] == [False, True, True]
    act(controller, two, "tick", str(runs / "b"), False)
    assert (one.opened, two.opened) == ([runs / "a"], [runs / "c"])
    for name in "abcdefgh":
        act(controller, one, "tick", str(runs / name), True)
    assert [run.name for run in one.opened] == list("abcdefgh")  # what is ticked
    shown = str(refresh(controller, one)[1])
    assert [name for name in "abcdefgh" if f'data-card="{runs / name}"' in shown] == list("abcdefgh")[-MOST:]


def test_a_look_that_was_overtaken_is_not_sent(controller: RunsController, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock's look at the disk is slow on a busy machine; what the reader opened meanwhile stays open."""
    runs, view = controller.settings.runs, View()
    view.show([runs / "a"])
    states = controller.states

    def slow() -> list:
        monkeypatch.setattr(controller, "states", states)
        act(controller, view, "open", str(runs / "b"), False)
        assert f'data-card="{runs / "b"}"' in str(refresh(controller, view)[1])
        return states()

    monkeypatch.setattr(controller, "states", slow)
    assert refresh(controller, view) == NOTHING
    assert view.opened == [runs / "b"]
    assert refresh(controller, view) == NOTHING  # it shows b already


def test_only_what_has_changed_is_sent(controller: RunsController) -> None:
    view = View()
    assert None not in refresh(controller, view)
    assert refresh(controller, view) == NOTHING
    with (view.opened[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "eval_loss": 0.5, "time": 1.0}) + "\n")
    listed, cards, curves, _ = refresh(controller, view)
    assert (listed, cards) == (None, None)
    assert "[3, 0.5]" in str(curves)


def test_a_page_opens_the_first_run_there_is_and_none_that_the_reader_closed(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    controller, view = RunsController(Settings((root,), root / "runs"), load_words("en")), View()
    assert "data-card" not in str(refresh(controller, view)[1])
    run = make(root / "runs", "a")  # started by another page, or by hand
    assert "data-card" in str(refresh(controller, view)[1])
    act(controller, view, "tick", str(run), False)
    assert refresh(controller, view)[1] == ""
    assert refresh(controller, view)[1] is None


def test_what_is_gone_is_closed(controller: RunsController) -> None:
    runs, view = controller.settings.runs, View()
    for name in "ab":
        act(controller, view, "tick", str(runs / name), True)
    refresh(controller, view)
    act(controller, View(), "delete", str(runs / "a"), False)  # another page
    assert str(refresh(controller, view)[1]).count("data-card") == 1
    with pytest.raises(HalftuneError, match="no run any more"):
        act(controller, view, "open", str(runs / "a"), False)


def test_a_report_runs_no_script_but_that_of_its_curves(controller: RunsController) -> None:
    run = controller.settings.runs / "a"
    (run / REPORT).write_text('<p>halftune run report</p><a href="#samples"></a><script>alert(1)</script>')
    html = act(controller, View(), "report", str(run), False).report
    assert html is not None
    assert '<iframe sandbox="allow-scripts allow-downloads" ' in html  # not of this page's origin
    policy = unescape(unescape(html)).partition("<p>")[0]
    rules = dict(one.split(" ", 1) for one in policy.partition('content="')[2].partition('"')[0].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == script_source()
    assert {rules["img-src"], rules["media-src"]} == {"data:"}
    assert "&#34;about:srcdoc#samples&#34;" in html  # a place of the report, not of the web UI
    assert "<script>" not in html  # it stands in the frame's text, escaped
    assert act(controller, View(), "close", "", False).report == ""


@pytest.mark.parametrize(
    ("what", "name", "options"),
    [
        ("stop", "stop", {}),
        ("stop_at_once", "stop", {"at_once": True}),
        ("resume", "resume", {}),
        ("now", "start_now", {}),
    ],
)
def test_buttons_do_what_they_say(
    controller: RunsController, monkeypatch: pytest.MonkeyPatch, what: str, name: str, options: dict[str, bool]
) -> None:
    done = list[tuple[str, Path, dict[str, bool]]]()
    for each in ("stop", "resume", "start_now"):
        monkeypatch.setattr(start_stop, each, lambda _, run, each=each, **more: done.append((each, run, more)))
    run = controller.settings.runs / "a"
    act(controller, View(), what, str(run), False)
    assert done == [(name, run, options)]


@pytest.mark.parametrize("what", ["launch", "__init__", "", "deleted"])
def test_unknown_buttons_do_nothing(controller: RunsController, what: str) -> None:
    with pytest.raises(HalftuneError, match="no such button"):
        act(controller, View(), what, str(controller.settings.runs / "a"), True)


def test_a_wrong_recipe_is_not_started(controller: RunsController) -> None:
    view = View()
    with pytest.raises(HalftuneError, match="model") as raised:
        start(controller, view, "precision: bf17\nadapter: 3\n")
    assert str(raised.value).count("\n") == 2  # three problems, one a line
    assert view == View()


def names(controller: RunsController, view: View) -> list[str]:
    """The runs that the list shows."""
    view.sent.clear()
    found = re.findall(r'data-act="open" data-run="([^"]+)"', str(refresh(controller, view)[0]))
    return [Path(name).name for name in found]


def say(controller: RunsController, run: str, **said: str) -> None:
    values = {"name": "", "tags": "", "note": "", **said}
    act(controller, View(), "mark", str(controller.settings.runs / run), False, json.dumps(values))


def test_the_list_is_searched_and_filtered(controller: RunsController) -> None:
    view, runs = View(), controller.settings.runs
    (runs / "c" / "finished.json").unlink()
    say(controller, "a", name="Best of all")
    say(controller, "b", tags="Sweep, small", note="too many epochs")
    for query, state, found in (
        ("best", "", ["a"]),
        ("SWEEP", "", ["b"]),
        ("epochs", "", ["b"]),
        ("", "died", ["c"]),
        ("best", "died", []),
        ("nothing like it", "", []),
    ):
        view.search(query, state)
        assert names(controller, view) == found, query
    view.search("", "")
    assert len(names(controller, view)) == 8


def test_fifty_at_a_time(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    controller, view = RunsController(Settings((root,), root / "runs"), load_words("en")), View()
    for number in range(PAGE + 3):
        make(root / "runs", f"run-{number}", 1)
    assert len(names(controller, view)) == PAGE
    act(controller, view, "more", "", False)
    assert len(names(controller, view)) == PAGE + 3
    assert 'data-act="more"' not in str(refresh(controller, view)[0])
    view.search("run-1", "")
    assert {name[:5] for name in names(controller, view)} == {"run-1"}


def test_a_pinned_run_stands_first(controller: RunsController) -> None:
    view, run = View(), controller.settings.runs / "f"
    assert names(controller, view)[0] != "f"
    act(controller, view, "pin", str(run), False)
    assert names(controller, view)[0] == "f"
    act(controller, view, "pin", str(run), False)
    assert names(controller, view)[0] != "f"
    assert json.loads((controller.settings.runs / ".webui" / "marks.json").read_text()) == {}


@pytest.mark.parametrize(
    "said", ["", "3", "[]", "{}", '{"name": "a"}', json.dumps({"name": "x" * 99, "tags": "", "note": ""})]
)
def test_what_is_no_name_is_refused(controller: RunsController, said: str) -> None:
    with pytest.raises(HalftuneError):
        act(controller, View(), "mark", str(controller.settings.runs / "a"), False, said)


@pytest.mark.parametrize("text", ["[", "3", '{"a": 3}', '{"a": {"name": 3, "tags": "x", "note": [], "pinned": 1}}'])
def test_a_damaged_file_of_names_hides_no_run(controller: RunsController, text: str) -> None:
    marks = controller.settings.runs / ".webui" / "marks.json"
    marks.parent.mkdir()
    marks.write_text(text)
    assert len(names(controller, View())) == 8
    say(controller, "b", name="<b>bold</b>")
    assert "&lt;b&gt;bold" in str(refresh(controller, View())[0])


def test_several_are_deleted_and_what_works_stays(controller: RunsController, monkeypatch: pytest.MonkeyPatch) -> None:
    view, runs = View(), controller.settings.runs
    for name in "abc":
        act(controller, view, "tick", str(runs / name), True)
    say(controller, "a", name="gone")
    monkeypatch.setattr(start_stop, "is_live", lambda run: run.name == "b")
    assert act(controller, view, "delete_ticked", "", False).said
    assert [path.name for path in sorted(runs.iterdir()) if not path.name.startswith(".")] == list("bdefgh")
    assert view.opened == [runs / "b"]
    assert not controller.marks.of(runs / "a").name


RECIPE = "# mine\nmodel: {name_or_path: builtin:qwen2-tiny}\ntraining: {output_dir: runs/a}\n"


def test_a_recipe_comes_back_for_another_try(controller: RunsController) -> None:
    run = controller.settings.runs / "a"
    folder_of(run).mkdir()
    (folder_of(run) / "config.yaml").write_text(RECIPE)
    done = act(controller, View(), "edit", str(run), False)
    assert done.tab == "train"
    assert done.recipe == RECIPE.replace("runs/a", "runs/a-2")
    make(controller.settings.runs, "a-2")
    (folder_of(run) / "config.yaml").unlink()
    (run / "resolved.yaml").write_text(RECIPE)  # of the command line
    assert "runs/a-3" in str(act(controller, View(), "edit", str(run), False).recipe)
    for left in ("metrics.jsonl", "finished.json"):
        (run / left).unlink()
    assert act(controller, View(), "edit", str(run), False).recipe == RECIPE  # it never made a step: its folder is free


def test_a_link_out_of_the_folders_brings_no_recipe(
    controller: RunsController, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("secret") / "s.yaml"
    secret.write_text("password: x\n")
    run = controller.settings.runs / "a"
    (run / "resolved.yaml").unlink()
    (run / "resolved.yaml").symlink_to(secret)
    with pytest.raises(HalftuneError):
        act(controller, View(), "edit", str(run), False)
    view = View()
    view.show([run, controller.settings.runs / "b"])
    assert "password" not in str(refresh(controller, view)[1])


@pytest.mark.parametrize("tab", ["chat", "export"])
def test_a_result_is_chosen_in_another_tab(controller: RunsController, tab: str) -> None:
    run = controller.settings.runs / "a"
    (run / "final").mkdir()
    view = View()
    view.show([run])
    assert f'data-act="{tab}"' in str(refresh(controller, view)[1])
    assert act(controller, view, tab, str(run), False) == Done(tab=tab, run=run)


def test_open_runs_show_how_their_recipes_differ(controller: RunsController) -> None:
    runs, view = controller.settings.runs, View()
    (runs / "a" / "resolved.yaml").write_text("training: {output_dir: runs/a, learning_rate: 0.1}\nprecision: bf16\n")
    (runs / "b" / "resolved.yaml").write_text("training: {output_dir: runs/b, learning_rate: 0.2}\nprecision: bf16\n")
    view.show([runs / "a"])
    assert "learning_rate" not in str(refresh(controller, view)[1])
    view.show([runs / "a", runs / "b"])
    rows = re.findall(
        r"<tr><th scope=row>([^<]+)</th><td>([^<]+)</td><td>([^<]+)</td>", str(refresh(controller, view)[1])
    )
    assert rows == [("training.learning_rate", "0.1", "0.2")]


def test_answers_before_and_after_stand_in_the_card(controller: RunsController) -> None:
    run, view = controller.settings.runs / "a", View()
    view.show([run])
    assert 'class="scroll answers"' not in str(refresh(controller, view)[1])
    row = {"prompt": "<b>What?</b>", "before": "noise", "after": None}
    (run / "samples.json").write_text(json.dumps({"samples": [row]}))
    cards = str(refresh(controller, view)[1])
    assert "<td>&lt;b&gt;What?&lt;/b&gt;</td><td>noise</td><td></td>" in cards
    for odd in ("[", "{}", '{"samples": 3}', '{"samples": [3]}'):
        (run / "samples.json").write_text(odd)
        assert 'class="scroll answers"' not in str(refresh(controller, view)[1])


def test_rewarded_answers_stand_in_the_card(controller: RunsController) -> None:
    run, view = controller.settings.runs / "a", View()
    view.show([run])
    answers = [{"text": "<i>3</i>", "reward": 0.25, "tokens": 3}, {"text": "4", "reward": 1.0, "tokens": 2}]
    groups = [{"step": step, "prompt": "2 & 2?", "answers": answers} for step in (5, 10)]
    (run / "rollouts.json").write_text(json.dumps({"rollouts": groups}))
    cards = str(refresh(controller, view)[1])
    assert re.findall(r"<td rowspan=.2.>([^<]*)</td>", cards) == ["10", "2 &amp; 2?", "5", "2 &amp; 2?"]
    assert re.findall(r"<td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", cards)[:2] == [
        ("4", "1", "2"),
        ("&lt;i&gt;3&lt;/i&gt;", "0.25", "3"),
    ]
    for odd in (
        "[",
        '{"rollouts": 3}',
        '{"rollouts": [3]}',
        '{"rollouts": [{"step": 1e400, "prompt": "", "answers": []}]}',
    ):
        (run / "rollouts.json").write_text(odd)
        assert "rowspan" not in str(refresh(controller, view)[1])


def test_a_look_reads_only_what_has_changed_and_serves_every_page(
    controller: RunsController, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(listing, "look", lambda run, **more: read.append(run.name) or look(run, **more))
    refresh(controller, View())
    assert sorted(read) == list("abcdefgh")
    read.clear()
    refresh(controller, View())
    assert read == []
    (controller.settings.runs / "c" / "status.json").write_text("{}")
    refresh(controller, View())
    assert read == ["c"]
    (controller.settings.runs / "d" / "resolved.yaml").unlink()
    assert "d" not in names(controller, View())
    controller.fresh = 1000
    refresh(controller, View())
    monkeypatch.setattr(controller.listing, "look", lambda waiting: pytest.fail("another page has just looked"))
    refresh(controller, View())
    monkeypatch.setattr(controller.listing, "look", lambda waiting: read.append("again") or [])
    controller.look_again()
    refresh(controller, View())
    assert read[-1] == "again"


@pytest.mark.slow
def test_many_runs_cost_little(controller: RunsController) -> None:
    """Work is counted in calls of functions; each further run may add a few, its three files are not read again."""
    view = View()

    def calls(names: Iterable[str]) -> int:
        for name in names:
            make(controller.settings.runs, name)
        refresh(controller, view)  # reads the new ones
        return counted(lambda: refresh(controller, view))

    few = calls(f"few-{number:03}" for number in range(200))
    assert calls(f"sweep-{number:03}" for number in range(800)) - few < 800 * 40
    view.search("sweep-77", "")
    assert calls(()) - few < 800 * 40
    assert len(names(controller, view)) == 10


def counted(act: Callable[[], object]) -> int:
    """How many functions it calls."""
    found = 0

    def note(_frame: object, event: str, _given: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


def test_charts_know_tokens_and_time(controller: RunsController) -> None:
    run, view = controller.settings.runs / "a", View()
    lines = [{"step": 2 * n, "loss": 1.0, "tokens": 100, "seconds": 0.5} for n in range(1, 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    view.show([run])
    assert json.loads(str(refresh(controller, view)[2]))["scales"] == {
        "a": [[2, 100, 0.5], [4, 200, 1.0], [6, 300, 1.5]]
    }
