"""Whatever a recipe asks of peft, transformers and torch: a step is trained, or the refusal is halftune's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_harness import answered, budget
from fuzz_strategies import plausible
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.load import load_config
from halftune.config.optimizers import OPTIMIZERS
from halftune.config.recipe_facts import run_facts
from halftune.config.sections.data import DataSection
from halftune.config.sections.method import METHOD_SECTIONS
from halftune.config.sections.model import LoraAdapter, NoAdapter, PeftAdapter
from halftune.config.sections.training import TrainingSection
from halftune.hardware.catalogue import lookup
from halftune.model.files.architectures import no_progress_bars
from halftune.model.files.builtin import materialize
from halftune.plan import resolve
from halftune.plan.weights.adapter_types import ADAPTER_TYPES
from halftune.train.callbacks.loss_plot import LossPlot
from halftune.train.trainer import train

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "gemma3_text": GROUPED,
    "mamba2": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
    },
}
TARGETS = (
    "all-linear", "q_proj", ["q_proj", "lm_head"], ["embed_tokens"], ["c_attn"], ["wte", "c_fc"], "lm_head", "norm",
    ".*(k|v)_proj", "(", ["gate"], ["in_proj", "conv1d"], ["experts"], [], "", ["*"], ["layers"], ["q_proj", "gone"],
)  # fmt: skip
PARAMETERS = (["mlp.experts.gate_up_proj"], ["experts.down_proj"], ["q_proj"], [""])
SAVED = ([], ["lm_head"], ["embed_tokens"], ["norm"], ["lm_head", "embed_tokens"], ["gone"], ["q_proj"])
ROWS: dict[str, dict[str, Any]] = {
    "conversation": {"prompt": "What is 1 and 1?", "completion": "It is 2"},
    "document": {"text": "One and one is two."},
    "preference": {"prompt": "What is 1 and 1?", "chosen": "2", "rejected": "I do not know"},
    "prompt": {"prompt": "What is 1 and 1?", "answer": "2"},
    "rated": {"prompt": "What is 1 and 1?", "completion": "It is 2", "label": True},
}
# Hours, other processes and files of others: not asked here.
LEFT_OUT = {"output_dir", "resume", "max_steps", "num_train_epochs", "allow_changes", "torch_compile", "seed"}


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe of one step, with any adapter, method and optimizer, and some keys of theirs."""
    kind = draw(st.sampled_from(("lora", "lora", "none", *ADAPTER_TYPES)))
    section = {"lora": LoraAdapter, "none": NoAdapter}.get(kind, PeftAdapter)
    adapter = some_of(draw, section, {"type", "name_or_path"}) | {"type": kind}
    for key, values in (("target_modules", TARGETS), ("target_parameters", PARAMETERS), ("modules_to_save", SAVED)):
        if key in section.model_fields and draw(st.integers(0, 1)):
            adapter[key] = draw(st.sampled_from(values))
    if "train_only" in adapter:
        adapter["train_only"] = draw(st.sampled_from(TARGETS))
    name = draw(st.sampled_from(sorted(METHOD_SECTIONS)))
    method = some_of(draw, METHOD_SECTIONS[name], {"type", "teacher", "rewards", "server"}) | {"type": name}
    if name == "distill":
        method["teacher"] = "MODEL"
    if METHOD_SECTIONS[name].generates:
        method |= {"rewards": ["exact_answer"], "max_completion_length": 2, "num_generations": 2}
    training = some_of(draw, TrainingSection, LEFT_OUT)
    training["optim"] = draw(st.sampled_from(sorted(OPTIMIZERS)))
    data = some_of(draw, DataSection, {"train", "eval", "images", "videos", "audio", "streaming", "media"})
    return {
        "model": {"name_or_path": "MODEL", "kind": draw(st.sampled_from(sorted(MODELS)))},
        "precision": draw(st.sampled_from(("fp32", "bf16"))),
        "adapter": adapter,
        "method": method,
        "training": training,
        "data": {"packing": draw(st.booleans()), **data},
    }


def some_of(draw: st.DrawFn, section: Any, without: set[str]) -> dict[str, Any]:
    """No key of a section or one, with a value of the right kind."""
    known = sorted(section.model_fields.keys() - without)
    chosen = draw(st.lists(st.sampled_from(known), max_size=1)) if known and draw(st.integers(0, 1)) else []
    return {name: draw(plausible(section.model_fields[name].annotation, 1)) for name in chosen}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint of each type, and a file of rows for each kind of record."""
    home = tmp_path_factory.mktemp("models")
    for kind, sizes in MODELS.items():
        tokens = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        with torch.random.fork_rng(devices=[]), no_progress_bars():
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **{**sizes, **tokens})
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(home / kind)
        for path in (*materialize("qwen2-tiny").glob("*token*"), materialize("qwen2-tiny") / "chat_template.jinja"):
            shutil.copy(path, home / kind)
    for name, row in ROWS.items():
        (home / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    return home


@budget(0.05, 12)
@given(tree=steps())
def test_a_step_of_any_recipe(here: Path, models: Path, tree: dict[str, Any]) -> None:
    shutil.rmtree(here / "run", ignore_errors=True)
    model = str(models / tree["model"]["kind"])
    recipe = {**tree, "model": {"name_or_path": model}}
    recipe["training"] = {**tree["training"], "output_dir": str(here / "run"), "max_steps": 1}
    recipe["method"] = {name: model if value == "MODEL" else value for name, value in tree["method"].items()}
    rows = models / f"{METHOD_SECTIONS[tree['method']['type']].records[0]}.jsonl"
    recipe["data"] = {"max_length": 32, **tree["data"], "train": str(rows)}
    recipe["logging"] = {"progress": False}
    (here / "x.yaml").write_text(json.dumps(recipe))
    with pytest.MonkeyPatch.context() as patch, answered():
        patch.setattr(LossPlot, "_draw", lambda *_: None)
        loaded = load_config(here / "x.yaml")
        train(loaded, resolve(loaded.run, lookup("cpu-amx"), run_facts(loaded.run)))
