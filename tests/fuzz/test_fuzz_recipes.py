"""Whatever stands in a recipe or in another framework's config: a plan, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from fuzz_harness import Damage, answered, budget
from fuzz_strategies import GOOD, damages, nearly_right, odd, plausible, recipes, texts
from hypothesis import given
from hypothesis import strategies as st

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.render import resolved_yaml
from halftune.config.run import RunConfig
from halftune.convert.convert import CONVERTERS, convert_file, report
from halftune.hardware.catalogue import lookup
from halftune.plan import explain, resolve, to_dict

KEYS = [f"{name}.{key}" for name, keys in GOOD.items() for key in keys] + ["precision", "attention", "adapter.type"]
MACHINES = ("cpu", "t4", "a100", "h200")
OLD = {
    "LLaMA-Factory": {
        "model_name_or_path": "a/b",
        "stage": "sft",
        "finetuning_type": "lora",
        "dataset": "x",
        "lora_rank": 8,
    },
    "LLaMA-Factory v1": {
        "model": "a/b",
        "model_class": "llm",
        "train_dataset": "x",
        "peft_config": {"name": "lora", "r": 8},
    },
    "axolotl": {
        "base_model": "a/b",
        "datasets": [{"path": "x", "type": "alpaca"}],
        "micro_batch_size": 1,
        "adapter": "lora",
    },
    "TRL": {"model_name_or_path": "a/b", "dataset_name": "x", "use_peft": True, "lora_r": 8, "max_length": 512},
}
OLD_KEYS = (
    "max_steps",
    "eval_steps",
    "save_steps",
    "logging_steps",
    "eval_strategy",
    "save_strategy",
    "warmup_steps",
    "warmup_ratio",
    "bf16",
    "fp16",
    "tf32",
    "flash_attn",
    "attn_implementation",
    "optim",
    "optimizer",
    "lr_scheduler",
    "lr_scheduler_type",
    "report_to",
    "lora_target",
    "lora_target_modules",
    "lora_target_linear",
    "quantization_bit",
    "load_in_4bit",
    "datasets",
    "test_datasets",
    "val_size",
    "val_set_size",
    "eval_dataset",
    "packing",
    "neat_packing",
    "sample_packing",
    "template",
    "chat_template",
    "rl",
    "evals_per_epoch",
    "saves_per_epoch",
    "pretraining_dataset",
    "train_on_inputs",
    "cutoff_len",
    "sequence_len",
    "dataset_text_field",
    "resume_from_checkpoint",
    "gradient_checkpointing",
    "torch_compile",
    "learning_rate",
    "wandb_project",
    "loss_type",
    "dtype",
    "dataset_train_split",
    "packing_strategy",
    "mixed_precision",
    "deepspeed",
    "max_samples",
    "interleave_probs",
    "dataset_dir",
)


def plan_of(path: str, machine: str) -> None:
    loaded = load_config(path)
    resolved_yaml(loaded)
    plan = resolve(loaded.run, lookup(machine, {}), read_model_facts(loaded.run.model))
    explain(plan)
    json.dumps(to_dict(plan))


@budget(0.2, 60)
@given(tree=recipes | nearly_right() | nearly_right() | plausible(RunConfig), machine=st.sampled_from(MACHINES))
def test_trees(here: Path, tree: Any, machine: str) -> None:
    Path("x.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="replace")
    with answered():
        plan_of("x.yaml", machine)


@budget(0.15, 60)
@given(tree=nearly_right(), damage=damages())
def test_damaged_recipes(here: Path, tree: Any, damage: Damage) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    Path("x.yaml").write_bytes(damage(text.encode("utf-8", errors="replace")))
    with answered():
        plan_of("x.yaml", "cpu")


@budget(0.1, 40)
@given(
    arguments=st.lists(
        st.tuples(st.sampled_from(KEYS) | texts, texts | odd.map(json.dumps)).map("=".join) | texts, max_size=3
    )
)
def test_overrides(here: Path, arguments: list[str]) -> None:
    Path("x.yaml").write_text(json.dumps(GOOD))
    with answered():
        load_config("x.yaml", arguments)


@budget(0.1, 60)
@given(
    framework=st.sampled_from(sorted(CONVERTERS)),
    changes=st.dictionaries(st.sampled_from(OLD_KEYS) | texts, odd, max_size=4),
    named=st.booleans(),
)
def test_converted(here: Path, framework: str, changes: dict[str, Any], named: bool) -> None:
    tree = {**OLD[framework], **changes}
    Path("old.yaml").write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="replace")
    with answered():
        converted = convert_file(Path("old.yaml"), framework if named else None)
        report(converted)
        if converted.yaml:
            Path("new.yaml").write_text(converted.yaml, encoding="utf-8")
            load_config("new.yaml", look_at_files=False)
