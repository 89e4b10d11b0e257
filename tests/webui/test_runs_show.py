"""What the browser is sent about runs, data and machines: complete, in both languages, and escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pynvml
import pytest

from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune_webui.labels import load_words
from halftune_webui.plans.machine_panel import OPTIONAL, Free, machine_view
from halftune_webui.runs.state import RunState, State
from halftune_webui.runs.view.gpus import Gpus, Use, gpu_view
from halftune_webui.runs.view.metrics import Alarm
from halftune_webui.runs.view.samples import data_view
from halftune_webui.runs.view.show import run_card, run_list

EVIL = "<img src=x onerror=alert(1)>\"'"
ENDS = ("", "killed", "killed_memory", "crashed", "restarted", "vanished")
ALARMS = ("loss_not_finite", "norm_not_finite", "loss_zero", "norm_zero", "skipped")
PHASES = ("starting", "tokenising", "loading", "training", "evaluating", "saving", "finished", "merging", "checking")


class Tags(HTMLParser):
    """Every tag with its attributes; fails on a tag that is closed by another one."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def acts(html: str) -> list[str]:
    return [attributes["data-act"] or "" for tag, attributes in Tags(html).found if tag == "button"]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("state", get_args(State))
def test_every_state_end_phase_and_alarm_has_words(language: str, state: Any) -> None:
    words, runs = load_words(language), Path("/r")
    for phase in PHASES:
        seen = RunState(runs / "a", state, phase=phase, step=1, loss=None, casts=3, began=1.0)
        assert "runs." not in run_card(seen, [Alarm(kind, 1, 2) for kind in ALARMS], "", runs, words)
        assert "runs." not in run_list([seen], [], runs, words)
    for end in ENDS:
        Tags(run_card(RunState(runs / "a", state, end=end, cause="why"), [], "log", runs, words))


@pytest.mark.parametrize(
    ("state", "offered"),
    [
        ("queued", ["now", "stop", "edit", "pin"]),
        ("starting", ["stop", "edit", "pin"]),
        ("running", ["stop", "edit", "pin"]),
        ("stopping", ["stop_at_once", "edit", "pin"]),
        ("finished", ["edit", "pin", "delete"]),
        ("stopped", ["resume", "edit", "pin", "delete"]),
        ("died", ["resume", "edit", "pin", "delete"]),
        ("unreadable", ["edit", "pin", "delete"]),
    ],
)
def test_only_what_is_possible_is_offered(state: Any, offered: list[str]) -> None:
    words = load_words("en")
    card = run_card(RunState(Path("/r/a"), state), [], "", Path("/r"), words)
    assert acts(card) == offered
    asked = [attributes for tag, attributes in Tags(card).found if "data-ask" in attributes]
    assert len(asked) == ("delete" in offered) + (state == "stopping")
    of_an_export = acts(run_card(RunState(Path("/r/a"), state), [], "", Path("/r"), words, output="/m"))
    assert not {"resume", "edit", "pin"} & set(of_an_export)


def test_names_logs_and_causes_are_text_and_not_html() -> None:
    words, runs = load_words("en"), Path("/r")
    seen = RunState(runs / EVIL.replace("/", ""), "died", cause=EVIL, model=EVIL, precision=EVIL, host=EVIL)
    for html in (run_card(seen, [], EVIL, runs, words), run_list([seen], [seen.folder], runs, words)):
        assert "img" not in [tag for tag, _ in Tags(html).found]
        assert all("onerror" not in attributes for _, attributes in Tags(html).found)
    names = [
        attributes["data-run"]
        for _, attributes in Tags(run_list([seen], [], runs, words)).found
        if "data-run" in attributes
    ]
    assert set(names) == {str(seen.folder)}


def test_samples_show_what_is_trained() -> None:
    count = {"count": 9, "rows": [str(number) for number in range(9)]}
    source = {
        "name": EVIL,
        "format": "alpaca",
        "columns": {"instruction": "q", "output": "output"},
        "unused": ["id"],
        "rows": 10,
        "taken": 10,
        "kept": 1,
        "samples": 1,
        "truncated_rows": 2,
        "dropped": {EVIL: count},
        "truncated": {"too long": count},
        "notes": {},
        "tokens": 10,
        "trained_tokens": 0,
        "lengths": [[5, 0], [10, 1]],
    }
    pieces = [("<|im_start|>", False, True), ("user", False, False), (EVIL, True, False), ("<|end|>", True, True)]
    sample = {
        "where": "rows.jsonl:3",
        "tokens": 4,
        "trained": 2,
        "segments": [[dict(zip(("text", "trained", "control"), piece, strict=True), count=1) for piece in pieces]],
        "media": [],
    }
    report = {
        "train": [source],
        "eval": [],
        "train_samples": 1,
        "eval_samples": 0,
        "rows": [{"7": EVIL}],
        "efficiency": {"padded": 0.5, "packed": 0.9, "packed_rows": 3},
        "samples": [sample],
    }
    both = data_view({**report, "eval": [source], "rows": [{}, {}]}, load_words("en"))
    keys = [attributes["data-keep"] for tag, attributes in Tags(both).found if tag == "details"]
    assert len(keys) == len(set(keys))  # a file that is trained on and evaluated on is two sources
    assert both.count('class="tag"') == 2  # in the table and in its card
    assert "≤ 5<" not in both  # nothing is as short
    html = data_view(report, load_words("en"))
    tags = Tags(html).found
    assert "img" not in [tag for tag, _ in tags]
    assert [attributes["class"] for tag, attributes in tags if tag == "bdi" and attributes["class"]] == [
        "c",
        "t",
        "t c",
    ]
    assert "rows.jsonl:3" in html
    assert "n fail" in html  # nothing is trained: in red
    rows = re.findall(r"<summary>Row (\d)</summary>", html)
    assert rows == [*"01234567", *"01234567"]  # of the dropped ones and of the shortened ones


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_machine_is_shown(name: str) -> None:
    html = machine_view(lookup(name, {}), Free(2**30, 2**30, Path("/r")), load_words("en"))
    Tags(html)
    assert lookup(name, {}).devices[0].name in html
    assert all(re.search(rf"<b>{package}</b>", html) for package in OPTIONAL)


def test_a_failed_run_begins_with_its_error_and_a_waiting_one_says_for_what() -> None:
    words, runs = load_words("en"), Path("/r")
    card = run_card(RunState(runs / "a", "died", cause="no row is left"), [], "log", runs, words)
    assert card.index("no row is left") < card.index('class="facts"') < card.index("<pre")
    waits = RunState(runs / "b", "queued", place=2, behind=runs / "a")
    for html in (run_card(waits, [], "", runs, words), run_list([waits], [], runs, words)):
        assert words("runs.place_behind", n=2, name="a") in html


def test_ticks_have_the_colours_of_the_curves() -> None:
    words, runs = load_words("en"), Path("/r")
    states = [RunState(runs / name, "finished") for name in "abc"]
    html = run_list(states, [runs / "c", runs / "a"], runs, words)
    ticks = [attributes for tag, attributes in Tags(html).found if tag == "input"]
    assert [(tick["data-run"], tick["class"]) for tick in ticks] == [("/r/a", "l2"), ("/r/b", ""), ("/r/c", "l1")]


class Nvml:
    """Stands for a driver with one device that does not tell its power."""

    def __init__(self) -> None:
        self.asked = 0

    def memory(self, handle: Any) -> Any:
        self.asked += 1
        return SimpleNamespace(used=30 * 2**30, total=80 * 2**30)

    def power(self, handle: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_devices_are_shown_and_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    words, driver = load_words("en"), Nvml()
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA <A100>",
        "nvmlDeviceGetMemoryInfo": driver.memory,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": driver.power,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    now = [0.0]
    gpus = Gpus(every=1.0, clock=lambda: now[0])
    assert gpus.look() == [Use("NVIDIA <A100>", 30 * 2**30, 80 * 2**30, 97, None, 61)] == gpus.look()
    assert driver.asked == 1
    now[0] = 1.5
    html = gpu_view(gpus.look(), words)
    assert driver.asked == 2
    Tags(html)
    assert all(text in html for text in ("&lt;A100&gt;", "97 %", "30.0 of 80.0 GiB", "61 °C"))
    assert " W" not in html


def test_without_a_device_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert gpu_view(Gpus().look(), load_words("en")) == ""
