"""What the Data, Export and Doctor tabs show of the answers that they get."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT, until

pytest.importorskip("gradio", reason="the web UI's package is not installed")

from halftune.core.errors import HalftuneError, ModelError
from halftune.core.manifest import MANIFEST, seal
from halftune.hardware.catalogue import lookup
from halftune_webui.labels import load_words
from halftune_webui.plans.machine_panel import Free, machine_view
from halftune_webui.runs import ask
from halftune_webui.runs.ask import Asks, Stopped
from halftune_webui.runs.results import export
from halftune_webui.runs.view.samples import data_view, visible
from halftune_webui.settings import Settings
from halftune_webui.tabs.data import Report, Reports, subject_of
from halftune_webui.tabs.doctor import doctor_view

WORDS = load_words("en")
SOURCE: dict[str, Any] = {
    **{"name": "a.jsonl", "format": "prompt", "columns": {"prompt": "prompt"}, "unused": [], "lengths": [[8, 3]]},
    **{"taken": 4, "kept": 3, "samples": 3, "tokens": 30, "trained_tokens": 9, "truncated_rows": 0},
    **{"dropped": {"the answer is empty": {"count": 1, "rows": ["4"]}}, "truncated": {}, "notes": {}},
}


def answer(samples: int) -> dict[str, Any]:
    """Of ``halftune data --json``."""
    one = {
        "tokens": 3,
        "trained": 1,
        "segments": [[{"text": "<|x|>", "trained": False, "control": True, "count": 20}]],
        "media": [],
    }
    return {
        **{"train": [SOURCE], "eval": [], "train_samples": 3, "eval_samples": 0, "rows": [{"4": '{"prompt": "<b>"}'}]},
        "efficiency": {"padded": 0.5, "packed": 0.9, "packed_rows": 2},
        "samples": [{**one, "where": f"a.jsonl line {number}"} for number in range(samples)],
    }


def test_characters_that_mirror_or_hide_are_shown_by_number() -> None:
    assert re.sub(r"<[^>]*>", "", visible("a\u202eb\u200b<")) == "aU+202EbU+200B&lt;"
    assert (
        visible("\u0645\u200c\u0646 👩\u200d🔬\n\t") == "\u0645\u200c\u0646 👩\u200d🔬\n\t"
    )  # scripts and emoji need these


def test_pages_turn_dropped_rows_unfold_and_the_recipe_is_known() -> None:
    shown = data_view(answer(7), WORDS, 5, 5, "key", 'model: "x"')
    assert shown.count('class="sample"') == 2
    assert 'data-report="key"' in shown
    assert 'data-of="model: &#34;x&#34;"' in shown
    assert re.search(r"<details[^>]*><summary>Row 4</summary><pre[^>]*>\{&#34;prompt&#34;: &#34;&lt;b&gt;", shown)
    assert re.search(r'id="data-next" disabled', shown)
    assert not re.search(r'id="data-previous" disabled', shown)
    assert 'class="sample"' not in data_view(answer(0), WORDS)
    pair = answer(1)
    pair["samples"][0]["segments"] *= 2
    shown = data_view(pair, WORDS)
    assert 'class="sample pair"' in shown
    assert shown.index(WORDS("data.chosen")) < shown.index(WORDS("data.rejected"))


def test_images_and_sounds_of_a_sample_are_shown() -> None:
    report = answer(1)
    image = {
        "kind": "image",
        "file": "<i>.png",
        "tokens": 64,
        "width": 9,
        "height": 7,
        "seconds": 0.0,
        "preview": "data:x",
    }
    sound = {**image, "kind": "audio", "file": "b.wav", "seconds": 1.5, "preview": ""}
    report["samples"][0]["media"] = [image, sound]
    shown = data_view(report, WORDS)
    assert shown.count("<img ") == 1
    assert "&lt;i&gt;.png" in shown
    assert "1.50 s" in shown
    assert "<audio" not in shown  # none is shown
    assert "× 20" in shown


def test_only_the_latest_reports_are_kept() -> None:
    reports = Reports()
    keys = [reports.add(Report(answer(1), "", 5)) for _ in range(10)]
    assert [key in reports.of for key in (keys[0], keys[1], keys[2], keys[-1])] == [False, False, True, True]


def test_what_will_be_looked_at_is_named_before() -> None:
    text = "data: {train: [a.jsonl, {path: b.jsonl}], eval: [a.jsonl, c.jsonl]}\ntraining: {output_dir: runs/<x>}"
    shown = subject_of(text, WORDS)
    assert "a.jsonl, b.jsonl, c.jsonl" in shown
    assert "runs/&lt;x&gt;" in shown
    assert 'role="alert"' in subject_of("a: b: c", WORDS)


def test_a_look_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "verb.py"
    script.write_text("import time, sys\nprint('there', file=sys.stderr, flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(ask, "HALFTUNE", (sys.executable, str(script)))
    asks, ended = Asks(), list[Exception]()

    def wait() -> None:
        try:
            asks.ask("page", "data")
        except HalftuneError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: asks._of, "the process of the question")
    asks.stop("page")
    waiting.join(LIMIT)
    assert [type(error) for error in ended] == [Stopped]


def test_the_doctor_says_first_what_needs_a_look() -> None:
    checks = [
        {"name": "python", "status": "ok", "what": "3.11", "remedy": ""},
        {"name": "hub", "status": "note", "what": "not there", "remedy": "look"},
        {"name": "wandb", "status": "note", "what": "not installed", "remedy": "pip"},  # stands in the machine's table
        {"name": "torch", "status": "fail", "what": "not installed", "remedy": "pip"},
    ]
    shown = doctor_view({"environment": checks}, WORDS)
    assert shown.index("torch") < shown.index("hub") < shown.index("<details") < shown.index("python")
    assert "wandb" not in shown
    assert "本机没有加速器" in load_words("zh").said("this machine has no accelerator: tracing for NVIDIA A100")


def test_a_machine_says_what_is_free_and_nothing_twice() -> None:
    machine = lookup("cpu", {})
    shown = machine_view(machine, Free(3 * 2**30, 5 * 2**30, Path("/runs")), WORDS)
    assert "3.0 GiB free of" in shown
    assert "5.0 GiB free at /runs" in shown
    assert shown.count("triton") <= 2  # name and command, or name and version
    assert shown.count("Main memory") == 1


def test_an_export_into_what_is_there_starts_nothing(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    settings, run = Settings((root,), root / "runs"), root / "runs" / "one"
    (run / "final").mkdir(parents=True)
    model, other = root / "model", root / "other"
    for folder, name in ((model, "config.json"), (other, "notes.txt")):
        folder.mkdir()
        (folder / name).write_text("{}")
    seal(model, MANIFEST)
    for output, remedy in ((model, "TICK"), (other, "empty"), (run, "another"), (run / "final", "another"), ("", "")):
        with pytest.raises(HalftuneError) as error:
            export.start(settings, run, str(output), force=False, how="TICK")
        assert remedy in error.value.remedy
        assert "--" not in str(error.value)
    with pytest.raises(ModelError):
        export.start(settings, run, str(other), force=True)
    assert not (root / "runs" / ".webui").exists()
