"""Export, check and evaluation: which commands are started, what is refused, what the page shows of the answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the web UI's package is not installed")

from halftune.cli.verbs.webui import _export_choices
from halftune.core.errors import HalftuneError
from halftune.evaluate.metrics import ANSWER_METRICS
from halftune.verify.report import Finding, Report
from halftune_webui.labels import load_words
from halftune_webui.runs.log_tail import MARK, log_tail
from halftune_webui.runs.results import check, evaluation, export, job
from halftune_webui.runs.started import ANSWER, Process, folder_of, note_exit, note_job, note_process
from halftune_webui.runs.state import RunState
from halftune_webui.runs.supervisor import supervise
from halftune_webui.runs.view.details import details
from halftune_webui.runs.view.scores import scores_of
from halftune_webui.runs.view.show import Mark
from halftune_webui.runs.view.verdict import verdict_view
from halftune_webui.settings import LANGUAGES, Settings

WORDS = load_words("en")
RECIPE: dict[str, Any] = {
    "model": {"name_or_path": "builtin:qwen2-tiny"},
    "data": {"train": "builtin:python-docs"},
    "training": {"output_dir": "runs/x"},
}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    root = (tmp_path / "work").resolve()
    for name in ("x", "y"):
        (root / "runs" / name / "final").mkdir(parents=True)
        (root / "runs" / name / "resolved.yaml").write_text(json.dumps(RECIPE))
    monkeypatch.chdir(root)
    monkeypatch.setattr(job, "launch", lambda folder, settings: None)
    return Settings((root,), root / "runs", program=("halftune",), export_choices=_export_choices())


def run_of(settings: Settings, name: str = "x") -> str:
    return str(settings.runs / name)


def started(settings: Settings, kind: str) -> list[tuple[str, ...]]:
    return [job.words_of_job(folder) for folder in job.jobs(settings, kind, 9)]


def refusal(code: str, call: Any, *values: Any, **named: Any) -> HalftuneError:
    with pytest.raises(HalftuneError) as error:
        call(*values, **named)
    assert error.value.code == code, error.value
    return error.value


def test_the_targets_are_those_of_the_verb(settings: Settings) -> None:
    found = export.targets(settings)
    assert next(iter(found)) == export.FOLDER
    assert found["folder"] == export.Target((), "--dtype", ("bf16", "fp16", "fp32"))
    assert found["gguf"].words == ("--format", "gguf")
    assert {"f16", "bf16", "q8_0"} <= set(found["gguf"].formats)
    assert Settings.from_json(settings.to_json()) == settings
    more = {**settings.export_choices, "--format": ["folder", "new"], "--quantize": ["q3"]}
    found = export.targets(replace(settings, export_choices=more))
    assert found["new"] == export.Target(("--format", "new"))
    assert found["q3"].words == ("--quantize", "q3")


@pytest.mark.parametrize(
    ("target", "stored", "words"),
    [
        ("folder", None, []),
        ("folder", "fp32", ["--dtype", "fp32"]),
        ("gguf", None, ["--format", "gguf"]),
        ("gguf", "q8_0", ["--format", "gguf", "--gguf-type", "q8_0"]),
    ],
)
def test_an_export_says_its_target(settings: Settings, target: str, stored: str | None, words: list[str]) -> None:
    made = export.start(settings, settings.runs / "x", "models/x", target, stored, force=False)
    (command,) = started(settings, export.KIND)
    output = str(Path("models/x").resolve())
    common = ["halftune", "export", run_of(settings), "--output", output, "--status", str(made / "status.json")]
    assert list(command) == [*common, *words]
    assert export.target_of(settings, made) == (target, stored or "")
    assert (export.run_of(made), export.output_of(made)) == (run_of(settings), output)


@pytest.mark.parametrize(
    ("output", "target", "stored", "code"),
    [
        ("../out", "folder", None, "webui.path_outside"),
        ("/etc/out", "folder", None, "webui.path_outside"),
        ("a\0b", "folder", None, "webui.path_outside"),
        ("models/x", "--push", None, "core.unknown_name"),
        ("models/x", "folder", "q8_0", "core.unknown_name"),
        ("models/x", "gguf", "--force", "core.unknown_name"),
        ("runs/x", "folder", None, "export.output_unusable"),
    ],
)
def test_a_hostile_export_starts_nothing(
    settings: Settings, output: str, target: str, stored: str | None, code: str
) -> None:
    refusal(code, export.start, settings, settings.runs / "x", output, target, stored, force=True)
    assert not started(settings, export.KIND)


def exported(settings: Settings, output: str = "models/x", name: str = "x") -> Path:
    """The job of a finished export, with the folder that it has written."""
    Path("models/x").mkdir(parents=True, exist_ok=True)
    folder = job.new_folder(settings, export.KIND, "x")
    note_job(
        folder, ["halftune", "export", run_of(settings, name), "--output", str(Path(output).absolute())], Path(), 1.0
    )
    return folder


def test_a_check_compares_an_export_with_its_run(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    made = exported(settings)
    check.start(settings, made)
    folder, output = check.folder_of_check(made), Path("models/x").resolve()
    command = ["halftune", "verify", run_of(settings), "--against", str(output), "--json"]
    assert list(job.words_of_job(folder)) == command
    (output / "x-bf16.gguf").touch()
    monkeypatch.setattr(check, "version_of", lambda name: None)
    error = refusal("core.package_missing", check.start, settings, made)
    assert "llama-cpp-python" in error.remedy
    monkeypatch.setattr(check, "version_of", lambda name: "0.3")
    check.start(settings, made)
    assert job.words_of_job(folder)[4] == str(output / "x-bf16.gguf")


def test_a_check_keeps_within_the_limits(settings: Settings, tmp_path: Path) -> None:
    """The notes of an export may be anybody's."""
    refusal("webui.path_outside", check.start, settings, exported(settings, output="/etc"))
    refusal("webui.unknown_run", check.start, settings, exported(settings, name="gone"))
    refusal("verify.target_unusable", check.start, settings, exported(settings, output="models/gone"))
    made = exported(settings)
    (Path("models/x") / "model.safetensors").symlink_to(tmp_path / "secret")
    refusal("webui.path_outside", check.start, settings, made)
    (Path("models/x") / "model.safetensors").unlink()
    evil = {**RECIPE, "model": {**RECIPE["model"], "trust_remote_code": True}}
    (settings.runs / "x" / "resolved.yaml").write_text(json.dumps(evil))
    refusal("webui.remote_code_refused", check.start, settings, made)
    assert not check.folder_of_check(made).exists()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, ["--base"]),
        ({"base": False, "limit": 5}, ["--no-base", "--limit=5"]),
        ({"data": "builtin:number-formats-test", "metrics": ["exact", "f1"]},
         ["--base", "--data=builtin:number-formats-test", "--metrics=exact,f1"]),
        ({"data": "--limit"}, ["--base", "--data=--limit"]),
    ],
)  # fmt: skip
def test_an_evaluation_says_what_is_measured(settings: Settings, asked: dict[str, Any], words: list[str]) -> None:
    runs = [run_of(settings), run_of(settings, "y"), run_of(settings)]
    made = evaluation.start(settings, runs, **asked)
    (command,) = started(settings, evaluation.KIND)
    assert list(command[:4]) == ["halftune", "evaluate", *runs[:2]]
    assert set(command[4:]) == {*words, "--output", str(made), "--json"}
    assert evaluation.runs_of(made) == list(map(Path, runs[:2]))
    assert evaluation.data_of(made) == asked.get("data", "")


@pytest.mark.parametrize(
    ("runs", "asked", "code"),
    [
        ([], {}, "webui.unknown_run"),
        (["runs"], {}, "webui.unknown_run"),
        (["/etc"], {}, "webui.path_outside"),
        (["runs/x"], {"data": "../rows.jsonl"}, "webui.path_outside"),
        (["runs/x"], {"data": "/etc/passwd"}, "webui.path_outside"),
        (["runs/x"], {"data": "link.jsonl"}, "webui.path_outside"),
        (["runs/x"], {"metrics": ["exact", "--json"]}, "evaluate.unknown_metric"),
        (["runs/x"], {"limit": -1}, "cli.bad_option_value"),
    ],
)
def test_a_hostile_evaluation_starts_nothing(
    settings: Settings, tmp_path: Path, runs: list[str], asked: dict[str, Any], code: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    Path("link.jsonl").symlink_to(tmp_path / "rows.jsonl")
    refusal(code, evaluation.start, settings, runs, **asked)
    assert not started(settings, evaluation.KIND)


def test_the_data_of_a_run_are_read_only_within_the_limits(settings: Settings) -> None:
    outside = {**RECIPE, "data": {"train": "/elsewhere/rows.jsonl"}}
    (settings.runs / "x" / "resolved.yaml").write_text(json.dumps(outside))
    refusal("webui.path_outside", evaluation.start, settings, ["runs/x"])
    evaluation.start(settings, ["runs/y", "runs/x"])  # the first run's data are read
    evaluation.start(settings, ["runs/x"], data="builtin:number-formats-test")


def test_metrics_are_those_of_the_verb() -> None:
    assert tuple(ANSWER_METRICS) == evaluation.METRICS


def ended(settings: Settings, code: int, answer: str) -> tuple[RunState, dict[str, Any]]:
    """How a verb that has ended stands, and its answer."""
    folder = job.new_folder(settings, "any", "x")
    note_job(folder, ["halftune", "verify", "--json"], Path(), 1.0)
    (folder_of(folder) / ANSWER).write_text(answer)
    gone = Process(os.getpid(), "another boot", Process.of(os.getpid()).host)
    note_process(folder, gone, gone)
    note_exit(folder, code, 2.0, out_of_memory=False)
    return job.answered(folder)


@pytest.mark.parametrize(
    ("code", "answer", "state"),
    [
        (0, '{"same": true}', "finished"),
        (4, '{"same": false}', "finished"),  # it differs, which is an answer
        (3, '{"error": {"problems": []}}', "died"),
        (-15, '{"same": true}', "stopped"),
        (1, "no JSON", "died"),
        (1, "[3]", "died"),
    ],
)
def test_a_verb_that_has_answered_is_finished(settings: Settings, code: int, answer: str, state: str) -> None:
    assert ended(settings, code, answer)[0].state == state


def test_an_answer_is_kept_apart_from_what_is_printed(tmp_path: Path) -> None:
    """Logs and warnings of a verb go to the log; a second start forgets the first answer."""
    script = "import sys; print('{}'); print('a warning', file=sys.stderr)"
    for answer in ('{"same": true}', '{"same": false}'):
        note_job(tmp_path, [sys.executable, "-c", script.format(answer), "--json"], tmp_path, 1.0)
        assert not (folder_of(tmp_path) / ANSWER).exists()
        supervise(tmp_path)
        state, found = job.answered(tmp_path)
        assert (state.state, found) == ("finished", json.loads(answer))
    printed = [line for line in log_tail(tmp_path).splitlines() if not line.startswith(MARK)]
    assert printed == ["a warning"] * 2


NUMBERS = {"to_trained": 0.5, "to_base": 0.001, "kl": None, "agreement": 0.5, "expected": 0.002}
BROKEN = Report(
    "<i>a</i>",
    "b",
    4,
    [("tokens", "the same in 4 of 4 probes"), ("weights", "far"), ("rounding", "little")],
    [Finding("weights.base", "it computes the base model", "<b>cause</b>", "export again with halftune export", "s")],
    dict(NUMBERS),
)


def test_a_difference_is_red_and_told_with_its_cause() -> None:
    state = RunState(Path("/j/check"), "finished")
    shown = verdict_view("/j", state, BROKEN.as_data(), "", WORDS)
    assert 'class="verdict differs"' in shown
    assert WORDS("check.codes.weights.base") in shown
    assert "&lt;b&gt;cause&lt;/b&gt;" in shown
    theirs = verdict_view("/j", state, BROKEN.as_data(), "", load_words("zh"))
    for text in ("回答的是底座模型", "计算的是底座模型", "用 halftune export 重新导出", "4 个问题中 4 个相同"):
        assert text in theirs
    same = Report("a", "b", 4, [("weights", "near")], [], {**NUMBERS, "to_trained": 0.0})
    shown = verdict_view("/j", state, same.as_data(), "", WORDS)
    assert 'class="verdict same"' in shown
    assert WORDS("check.bits") in shown


def test_why_there_is_no_verdict_is_told() -> None:
    problem = {"code": "verify.target_unusable", "what": "<x>", "where": "m", "remedy": "r"}
    answer = {"error": {"problems": [problem]}}
    shown = verdict_view("/j", RunState(Path("/j/check"), "died"), answer, "log", WORDS)
    assert '<small class="code">verify.target_unusable</small>' in shown
    assert "&lt;x&gt;" in shown
    for odd in (
        {"lines": 3},
        {"error": 3},
        {"error": {"problems": [{}]}},
        {**BROKEN.as_data(), "numbers": {"kl": "x"}},
    ):
        assert WORDS("check.unreadable") in verdict_view("/j", RunState(Path("/j/check"), "finished"), odd, "", WORDS)
    assert 'data-act="stop_check"' in verdict_view("/j", RunState(Path("/j/check"), "running"), {}, "", WORDS)


def test_every_finding_of_verify_is_told_in_every_language() -> None:
    sources = "".join(files("halftune.verify").joinpath(name).read_text() for name in ("report.py", "weights.py"))
    codes = set(re.findall(r'"((?:tokens|stops|weights)\.[a-z_]+)"', sources))
    assert "weights.transposed" in codes
    for language in LANGUAGES:
        assert codes == set(load_words(language).below("check.codes"))


def model(name: str, base: bool = False, **metrics: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "base": base, "compute": "fp32", "rows": 8, "tokens": 56, "prompts": 8, "metrics": metrics}


def test_scores_stand_beside_each_other_with_the_best_one_marked() -> None:
    first = model("b", True, loss={"value": 3.0, "error": None}, f1={"value": 0.2, "error": None})
    apart = {"difference": -1.0, "difference_error": 0.2}, {"difference": -0.1, "difference_error": 0.2}
    second = model("<i>", loss={"value": 2.0, **apart[0]}, f1={"value": 0.1, **apart[1]})
    files = ["/a/scores.json", "/a/scores.png", "/a/answers-base.jsonl", "/a/answers-i.jsonl"]
    answer = {"rows": "test.jsonl", "models": [first, second], "notes": ["n"], "files": files}
    rows = {"/a/answers-base.jsonl": "no", "/a/answers-i.jsonl": "yes"}
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    shown = scores_of(
        answer,
        lambda name: b"png" if name == files[1] else b"",
        lambda name: [{"prompt": asked, "reference": "r", "answer": rows[name]}],
        WORDS,
    )
    assert [name for name, _ in shown["names"]] == ["base", "<i>"]
    cells = {row["name"]: [(one["best"], one["mark"]) for one in row["cells"]] for row in shown["rows"]}
    assert cells[WORDS("evaluate.metrics.loss")] == [(False, ""), (True, "better")]
    assert cells[WORDS("evaluate.metrics.f1")] == [(True, ""), (False, "")]  # within two standard errors
    assert shown["answers"] == [("q", "r", "no", "yes")]
    assert shown["plot"]


def test_files_of_an_evaluation_are_its_own(tmp_path: Path) -> None:
    made, secret = tmp_path / "job", tmp_path / "secret.png"
    made.mkdir()
    secret.write_text('{"answer": 1}')
    (made / "scores.png").symlink_to(secret)
    assert evaluation.read_file(made, "scores.png") == b""
    assert evaluation.read_file(made, str(secret)) == b""
    assert evaluation.answers(made, "../secret.png", 3) == []
    (made / "answers-a.jsonl").write_text('{"answer": 1}\n3\n{"answer": 2}\n')
    assert [one["answer"] for one in evaluation.answers(made, "/else/answers-a.jsonl", 2)] == [1]


def test_a_finished_run_can_be_served(tmp_path: Path) -> None:
    run = tmp_path / "a b"
    shown = details(run, Mark(), WORDS, served=True)
    assert f'data-copy="{shlex.join(["halftune", "serve", str(run)])}"'.replace("'", "&#39;") in shown
    assert "halftune serve" not in details(run, Mark(), WORDS)
