"""The thinker of a Qwen-Omni checkpoint trains; its talker and vocoder stay as they came."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_images import ROWS, write_rows
from tiny_omni import AROUND, CLASSES, omni_model

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.data.sources.builtin import motions, patterns, tones
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.model.result.completed_run import open_run
from halftune.plan import Plan, resolve
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent


def recipe(folder: Path, kind: str, **changes: Any) -> tuple[Any, Plan]:
    model = folder / "model"
    if not model.exists():
        omni_model(model, torch.bfloat16, kind)
        write_rows(folder, ROWS)
    tree = {
        "model": {"name_or_path": str(model)},
        "precision": "bf16",
        "adapter": "none",
        "data": {"train": str(folder / "rows.jsonl"), "images": True, "max_length": 128},
        "training": {"output_dir": str(folder / "run"), "max_steps": 2, "learning_rate": 0.01},
        "logging": {"progress": False, "probes": 0},
        **changes,
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(folder / "recipe.yaml")
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))


@pytest.mark.parametrize("kind", CLASSES)
def test_the_plan_counts_the_thinker_alone(kind: str, tmp_path: Path) -> None:
    _, plan = recipe(tmp_path, kind)
    language = {
        name: one for name, one in load_file(tmp_path / "model" / "model.safetensors").items()
        if name.startswith(("thinker.model.", "thinker.lm_head."))
    }  # fmt: skip
    assert plan.num_parameters.value == sum(one.numel() for one in language.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_result_is_the_whole_checkpoint(kind: str, adapter: str, tmp_path: Path) -> None:
    loaded, plan = recipe(tmp_path, kind, adapter=adapter)
    train(loaded, plan)
    out = tmp_path / "run" / "final"
    if adapter == "lora":
        out = tmp_path / "exported"
        export_run(open_run(str(tmp_path / "run")), out)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", out))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(("thinker.model.", "thinker.lm_head.")) for name in changed)
    assert {name: after[name].dtype for name in AROUND[kind]} == dict.fromkeys(AROUND[kind], torch.float32)
    for file in (tmp_path / "model").glob("*.pt"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert read_model_facts(loaded.run.model.model_copy(update={"name_or_path": str(out)})).num_parameters
    whole = getattr(transformers, CLASSES[kind]).from_pretrained(out, dtype=torch.bfloat16)
    name = "layers.1.self_attn.q_proj.weight"
    assert torch.equal(whole.thinker.state_dict()[f"model.language_model.{name}"], after[f"thinker.model.{name}"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_learns_from_images_sounds_and_videos_at_once(tmp_path: Path) -> None:
    """Answers to rows that training has not seen, after a third of the recipe; sounds take the whole of it."""
    answers = ["precision=fp32", "generation.temperature=0", "generation.max_new_tokens=8"]
    changes = [f"training.output_dir={tmp_path}", "training.max_steps=376", "data.eval=[]", *answers]
    loaded = load_config(ROOT / "configs" / "tiny" / "omni_tiny.yaml", changes)
    train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model)))
    session = open_session(open_run(str(tmp_path), []))
    right = dict.fromkeys(("image", "audio", "video"), 0.0)
    for kind, made in zip(right, (patterns, tones, motions), strict=True):
        for row in made.rows(30, 7):
            asked, answer = row["messages"]
            encoded = base64.b64encode(row[f"{kind}s"][0]["bytes"]).decode()
            text = {"type": "text", "text": asked["content"].removeprefix(f"<{kind}>")}
            parts = [{"type": kind, "ref": session.media(f"data:;base64,{encoded}", kind=kind)}, text]
            said = session.reply([{"role": "user", "content": parts}], tuned=True)
            right[kind] += (said.strip() == answer["content"]) / 30
    assert right["image"] > 0.9
    assert right["video"] > 0.9
    assert right["audio"] > 0.2  # guessed: 0.04
