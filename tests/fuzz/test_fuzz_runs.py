"""Whatever is damaged in a run folder: chat, export and going on answer, and nothing that was there is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzz_harness import Damage, answered, budget, fingerprint
from fuzz_strategies import damages, json_damages
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import checkpoint

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config, load_run
from halftune.core.manifest import MANIFEST, seal
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.model.files.builtin import materialize
from halftune.model.files.result import write_finished
from halftune.model.result.completed_run import open_run
from halftune.plan import resolve
from halftune.train.trainer import train

RECIPE: dict[str, Any] = {
    "precision": "fp32",
    "adapter": {"type": "lora", "rank": 2},
    "data": {"train": "rows.jsonl", "max_length": 32, "packing": False},
    "training": {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 1, "num_train_epochs": 9},
    "generation": {"max_new_tokens": 2},
    "logging": {"progress": False, "probes": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and a run of two steps with a checkpoint of each."""
    home = tmp_path_factory.mktemp("trained")
    model = checkpoint(home / "model", vocab_size=4096)
    for path in materialize("qwen2-tiny").glob("*token*"):
        shutil.copy(path, model)
    shutil.copy(materialize("qwen2-tiny") / "chat_template.jinja", model)
    (home / "rows.jsonl").write_text(
        '{"prompt": "1 + 1?", "completion": "2"}\n{"prompt": "2 + 2?", "completion": "4"}\n'
    )
    go_on(home, steps=2)
    return home


def go_on(home: Path, steps: int) -> None:
    """Trains the recipe in ``home``, or goes on with it."""
    recipe = {**RECIPE, "model": {"name_or_path": str(home / "model")}}
    recipe["data"] = {**RECIPE["data"], "train": str(home / "rows.jsonl")}
    recipe["training"] = {**RECIPE["training"], "output_dir": str(home / "run"), "max_steps": steps}
    (home / "x.yaml").write_text(json.dumps(recipe))
    loaded = load_config(home / "x.yaml")
    train(loaded, resolve(loaded.run, lookup("cpu", {}), read_model_facts(loaded.run.model)))


def copy_of(trained: Path, here: Path) -> Path:
    """The same at another place, its recipe moved with it."""
    home = here / "home"
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(trained, home)
    for name in ("run/resolved.yaml", "run/config.yaml", "run/final/adapter_config.json"):
        path = home / name
        path.write_text(path.read_text().replace(str(trained), str(home)))
    return home


names = st.integers(0, 1 << 20)


def pick(home: Path, number: int, inside: str) -> Path:
    """Some file of the run."""
    files = [path for path in sorted((home / inside).rglob("*")) if path.is_file() and path.stat().st_size]
    return files[number % len(files)]


def hurt(path: Path, damage: Damage, tree_damage: Any, of_bytes: bool) -> None:
    raw = path.read_bytes()
    if path.suffix == ".json" and not of_bytes:
        path.write_text(json.dumps(tree_damage(json.loads(raw))), encoding="utf-8", errors="replace")
    else:
        path.write_bytes(damage(raw))


@budget(0.05, 4)
@given(number=names, damage=damages(), tree_damage=json_damages(), of_bytes=st.booleans(), export=st.booleans())
def test_chat_and_export(
    here: Path, trained: Path, number: int, damage: Damage, tree_damage: Any, of_bytes: bool, export: bool
) -> None:
    home = copy_of(trained, here)
    run = home / "run"
    tops = [path for path in sorted(run.iterdir()) if path.name in ("resolved.yaml", "config.yaml", "plan.json")]
    finals = sorted(path for path in (run / "final").iterdir() if path.stat().st_size)
    hurt(chosen := (tops + finals)[number % len(tops + finals)], damage, tree_damage, of_bytes)
    if chosen.name != MANIFEST:  # as a stranger would: what is read behind the checksums must bear it too
        (run / "final" / MANIFEST).unlink()
        seal(run / "final", MANIFEST)
        write_finished(run, 2)
    shutil.rmtree(here / "out", ignore_errors=True)
    before = fingerprint(home)
    with answered():
        finished = open_run(str(run))
        if export:
            export_run(finished, here / "out")
        else:
            open_session(finished).answer("1 + 1?", tuned=True)
    assert fingerprint(home) == before, "a file of the run was changed"


@budget(0.04, 4)
@given(number=names, damage=damages(), tree_damage=json_damages(), of_bytes=st.booleans(), newest=st.booleans())
def test_going_on(
    here: Path, trained: Path, number: int, damage: Damage, tree_damage: Any, of_bytes: bool, newest: bool
) -> None:
    home = copy_of(trained, here)
    run = home / "run"
    hurt(pick(home, number, "run/checkpoint-2" if newest else "run"), damage, tree_damage, of_bytes)
    final, first = fingerprint(run / "final"), fingerprint(run / "checkpoint-1")
    done = False
    with answered():
        go_on(home, steps=3)
        done = True
    if not done:
        assert fingerprint(run / "final") == final, "an earlier result was lost"
        assert fingerprint(run / "checkpoint-1") == first, "an earlier checkpoint was lost"
        return
    load_run(run)
    assert (run / "final" / "adapter_model.safetensors").is_file()
