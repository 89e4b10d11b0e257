"""Every verb reads the thing that is named, by what lies in it, or refuses it by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import checkpoint

from halftune import api, cli
from halftune.core.errors import HalftuneError
from halftune.model.files.target import identify
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.serve.runs import open_runs

ROWS = [{"prompt": f"Add {n} and {n % 7}.", "completion": f"It is {n + n % 7}" + "!" * (n % 5)} for n in range(30)]
QUESTION = "Add 3 and 3."
pytestmark = pytest.mark.slow
WRONG, DAMAGED, OUTSIDE = "config.not_a_run_folder", "train.checkpoint_damaged", "config.not_a_run_folder"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, and beside it or in it what may be taken for it."""
    folder = tmp_path_factory.mktemp("targets")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    base = checkpoint(folder / "model", vocab_size=4096, initializer_range=0.2)
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(base), "tokenizer": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 4},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "training": {"output_dir": str(folder / "run"), "max_steps": 4, "save_steps": 2, "learning_rate": 0.02},
        "generation": {"max_new_tokens": 6},
        "logging": {"progress": False},
    }
    (folder / "x.yaml").write_text(json.dumps(recipe))
    assert cli.run_verb("train", ["--config", str(folder / "x.yaml")]) == 0
    load_tokenizer(identified_model(folder)).save_pretrained(base)
    run = folder / "run"
    (folder / "moved").mkdir()
    shutil.copytree(run, folder / "moved" / "run")
    (folder / "latest").symlink_to(run / "final")
    (folder / "last").symlink_to(run / "checkpoint-2")
    (run / "checkpoint-99").mkdir()
    for name, gone in {"checkpoint-6": "checkpoint.json", "checkpoint-8": "state.json", "checkpoint-10": ""}.items():
        shutil.copytree(run / "checkpoint-2", run / name)
        (run / name / gone).unlink() if gone else None
    shutil.copytree(run / "checkpoint-2", run / "before")
    shutil.copytree(base, run / "merged")
    shutil.copytree(run / "final", run / "best")
    shutil.copytree(run / "checkpoint-2", folder / "checkpoint-2")
    other = {**recipe, "training": {**recipe["training"], "output_dir": str(folder / "never trained")}}
    (run / "next.yaml").write_text(json.dumps(other))
    (run / "notes.txt").write_text("hello")
    recipe["adapter"]["alpha"], recipe["training"]["output_dir"] = 64, str(folder / "other")
    (folder / "y.yaml").write_text(json.dumps(recipe))
    assert cli.run_verb("train", ["--config", str(folder / "y.yaml")]) == 0
    shutil.copytree(folder / "other" / "checkpoint-4", run / "foreign")
    shutil.copytree(base, run / "with state")
    (run / "with state" / "state.json").write_text("{}")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "scores.json").write_text("{}")
    os.mkfifo(run / "pipe")
    (folder / "broken").symlink_to(folder / "gone")
    return folder


def identified_model(folder: Path) -> Any:
    from halftune.config.load import load_config

    return load_config(folder / "x.yaml", look_at_files=False).run.model


# What is given → whose weights it has, or the code of its error.
GIVEN = {
    "run": "final",
    "run/final": "final",
    "run/final/": "final",
    "run/../run": "final",
    "x.yaml": "final",
    "run/config.yaml": "final",
    "moved/run/resolved.yaml": "final",
    "moved/run": "final",
    "latest": "final",
    "run/best": "final as adapter",
    "run/checkpoint-2": "checkpoint",
    "run/before": "checkpoint",
    "last": "checkpoint",
    "run/merged": "base",
    "run/with state": "base",
    "model": "base",
    "run/checkpoint-99": WRONG,
    "run/checkpoint-6": DAMAGED,
    "run/checkpoint-8": DAMAGED,
    "run/checkpoint-10": DAMAGED,
    "checkpoint-2": OUTSIDE,
    "run/foreign": "train.run_changed",
    "run/next.yaml": "model.run_unfinished",
    "run/notes.txt": "config.not_a_mapping",
    "run/metrics.jsonl": "config.invalid_yaml",
    "run/loss.png": "core.not_utf8",
    "run/evaluation": WRONG,
    "run/pipe": WRONG,
    "broken": WRONG,
    "run/final/adapter_model.safetensors": "core.not_utf8",
    "rows.jsonl": "config.invalid_yaml",
    "moved": WRONG,
}
READS = {  # what a verb reads; else it refuses
    "chat": {"final", "checkpoint", "base", "final as adapter"},
    "evaluate": {"final", "checkpoint", "base", "final as adapter"},
    "export": {"final", "checkpoint"},
    "verify": {"final", "final as adapter"},
    "against": {"final", "final as adapter", "base"},
    "serve": {"final"},
    "result": {"final"},
}


def chat(place: Path, given: str, told: Callable[[], str]) -> str:
    done(["chat", str(place / given), "--prompt", QUESTION, "precision=fp32", "generation.max_new_tokens=6"])
    return told()


def evaluate(place: Path, given: str, told: Callable[[], str]) -> str:
    rows, out = str(place / "rows.jsonl"), str(place / "scores")
    done(["evaluate", str(place / given), "--no-base", "--data", rows, "--json", "--output", out, "precision=fp32"])
    return str(json.loads(told())["models"][0]["metrics"]["loss"]["value"])


def export(place: Path, given: str, _: Callable[[], str]) -> str:
    done(["export", str(place / given), "--output", str(place / "out"), "--force"])
    return json.loads((place / "out" / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"]


def verify(place: Path, given: str, told: Callable[[], str]) -> str:
    code = done(["verify", str(place / given), "--against", str(place / "run"), "--json"], {0, 4})
    return f"{code} {json.loads(told())['target']}"


def against(place: Path, given: str, _: Callable[[], str]) -> str:
    return str(done(["verify", str(place / "run"), "--against", str(place / given)], {0, 4}))


def serve(place: Path, given: str, _: Callable[[], str]) -> str:
    ((_name, run),) = open_runs([str(place / given)])[0].items()
    return json.loads((run.final / "manifest.json").read_text())["files"]["adapter_model.safetensors"]["sha256"]


def result(place: Path, given: str, _: Callable[[], str]) -> str:
    found = api.open_result(place / given).folder
    return json.loads((found / "final" / "manifest.json").read_text())["files"]["adapter_model.safetensors"]["sha256"]


VERBS = {one.__name__: one for one in (chat, evaluate, export, verify, against, serve, result)}


class Refused(Exception):
    """A verb's exit code, of one that refused."""


def done(command: list[str], codes: set[int] | None = None) -> int:
    code = cli.run_verb(command[0], command[1:])
    if code not in (codes or {0}):
        raise Refused(code)
    return code


@pytest.fixture(scope="module")
def seen(place: Path) -> dict[tuple[str, str], str]:
    """What each verb says of the weights that it reads."""
    return {}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_reads_what_is_named(
    verb: str, given: str, place: Path, seen: dict[tuple[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    whose = GIVEN[given]
    capsys.readouterr()
    if whose in READS[verb]:
        told = VERBS[verb](place, given, lambda: capsys.readouterr().out)
        known = seen.setdefault((verb, whose.removesuffix(" as adapter")), told)
        assert told == known
        own = (verb, whose.removesuffix(" as adapter"))
        others = {text for key, text in seen.items() if key[0] == verb and key != own}
        assert told not in others, "the weights of something else"
        return
    with pytest.raises((Refused, HalftuneError)) as refused:
        VERBS[verb](place, given, lambda: "")
    error = refused.value
    said = f"[{error.code}]" if isinstance(error, HalftuneError) else capsys.readouterr().err
    codes = {WRONG, whose if "." in whose else "verify.no_reference"}  # "no_reference": a plain model has no probes
    assert any(f"[{code}]" in said for code in codes), said


@pytest.mark.parametrize("given", ["run", "run/checkpoint-2", "run/best"])
@pytest.mark.parametrize("key", ["adapter.alpha=64", "method=pretrain", "training.seed=5"])
def test_what_training_has_settled_is_no_override(
    place: Path, given: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_verb("chat", [str(place / given), "--prompt", QUESTION, key]) == 2
    assert "[cli.option_conflict]" in capsys.readouterr().err


def test_a_plain_model_takes_a_tokenizer_and_a_template(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("model", "run/best"):
        with pytest.raises(Refused):
            done(["chat", str(place / given), "--prompt", QUESTION, f"model.tokenizer={place / 'gone'}"])
        assert "model.tokenizer" in capsys.readouterr().err


def test_names(place: Path) -> None:
    assert identify("no-such-name", "name").kind == "name"
    for nothing in ("", "no-such-name", str(place / "gone"), "a" * 5000, "a\0b"):
        with pytest.raises(HalftuneError) as refused:
            identify(nothing, "run", "checkpoint", "adapter", "model", "gguf")
        assert refused.value.code == WRONG
