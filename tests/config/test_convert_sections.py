"""Nested sections of other frameworks' configs: each key is dealt with, none is lost unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halftune.cli import main
from halftune.convert.convert import Converted, convert_file
from halftune.convert.draft import block_of_rules, tables

BASES = {
    "axolotl": "base_model: a/b\ndatasets: [{path: a, type: alpaca}]\nwarmup_ratio: 0.1\nsequence_len: 512\n"
    "micro_batch_size: 2\nlearning_rate: 3.0e-5\noutput_dir: out\n",
    "TRL": "model_name_or_path: a/b\ndataset_name: a/c\nassistant_only_loss: true\nuse_peft: false\noutput_dir: out\n",
    "LLaMA-Factory": "model_name_or_path: a/b\ndataset: mine\nstage: sft\ntemplate: qwen3_nothink\noutput_dir: out\n",
    "LLaMA-Factory v1": "model: a/b\ntrain_dataset: a/c\ncutoff_len: 64\noutput_dir: out\n",
}
# What is a mapping, not a section: memory of devices, names of secrets, resources of a worker.
MAPPINGS = {"max_memory", "device_map", "secrets", "resources_per_worker"}
AXOLOTL = ("axolotl", "trainer")
FILES = {"axolotl": AXOLOTL, "TRL": ("trl", "trainer", "reinforcement"), "LLaMA-Factory": ("llamafactory", "trainer"),
         "LLaMA-Factory v1": ("llamafactory", "trainer")}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(framework: str, values: dict[str, Any] | str) -> Converted:
    more = values if isinstance(values, str) else "".join(f"{key}: {json.dumps(one)}\n" for key, one in values.items())
    Path("old.yaml").write_text(BASES[framework] + more)
    return convert_file(Path("old.yaml"), framework)


def kinds(converted: Converted, key: str) -> list[str]:
    return [note.kind for note in converted.notes if note.key == key]


def without_effect(framework: str) -> set[str]:
    """Keys that the tables list as without an effect, whatever their value."""
    keys = {key for file in FILES[framework] for key, _ in block_of_rules(file, "none")}
    parts = tuple(prefix for names in tables(FILES[framework][0]).get("parts", {}).values() for prefix in names)
    return {key for key in keys if not (parts and key.startswith(parts))} | tables("sections").keys()


@pytest.mark.parametrize("framework", BASES)
def test_no_section_is_without_effect_whole(framework: str) -> None:
    keys = without_effect(framework) - MAPPINGS
    assert len(keys) > 20
    for key in sorted(keys - {line.partition(":")[0] for line in BASES[framework].splitlines()}):
        found = convert(framework, {key: {"unheard_of": 1}}).notes
        named = [note for note in found if note.key in (key, f"{key}.unheard_of")]
        assert named, key
        assert "none" not in {note.kind for note in named}, key


@pytest.mark.parametrize("framework", BASES)
@pytest.mark.parametrize("section", sorted(tables("sections")))
def test_keys_of_a_section_have_rules_of_their_own(framework: str, section: str) -> None:
    rules = [key for key, _ in block_of_rules("sections", section)]
    assert rules
    for key in rules:
        value: Any = True
        for part in reversed(key.split("/")):
            value = {part: value}
        notes = [note for note in convert(framework, {section: value}).notes if note.key.startswith(f"{section}.")]
        assert [note.key for note in notes] == [f"{section}.{key.replace('/', '.')}"]
        assert "not a key" not in notes[0].why, key


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("framework", ["axolotl", "TRL", "LLaMA-Factory"])
def test_checkpointing_of_fsdp(framework: str, version: int, prefix: str) -> None:
    off = (
        "disable_gradient_checkpointing: true\n" if framework == "LLaMA-Factory" else "gradient_checkpointing: false\n"
    )
    for more in ("", off):
        section = f"fsdp_config: {{{prefix}version: {version}, {prefix}activation_checkpointing: true}}\n"
        found = convert(framework, f"{more}{section}")
        assert found.values["training"]["gradient_checkpointing"] is True
        assert kinds(found, "fsdp_config.activation_checkpointing") == ["translated"]
    assert "gradient_checkpointing" not in {note.key for note in convert("axolotl", section).of("default")}
    found = convert(framework, f"{off}fsdp_config: {{activation_checkpointing: false}}\n")
    assert found.values["training"]["gradient_checkpointing"] is False


DEEPSPEED: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "none", {}),
    ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param.device",
     "translated", {"distributed.fsdp.cpu_offload": True}),
    ({"zero_optimization": {"offload_param": {"device": "none"}}}, "zero_optimization.offload_param.device", "none",
     {"distributed.fsdp.cpu_offload": None}),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_optimization.zero_quantized_gradients",
     "changed", {}),
    ({"gradient_clipping": "auto"}, "gradient_clipping", "none", {"training.max_grad_norm": None}),
    ({"gradient_clipping": 0.3}, "gradient_clipping", "translated", {"training.max_grad_norm": 0.3}),
    ({"fp16": {"enabled": True}}, "fp16.enabled", "changed", {"precision.compute": "auto"}),
    ({"bf16": {"enabled": True}}, "bf16.enabled", "none", {"precision.compute": "auto"}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr", "none", {}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 3.0e-5}}}, "optimizer.params.lr", "none", {}),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "optimizer.params.lr", "refused", {}),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "refused", {}),
    ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled", "changed", {}),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size", "changed", {}),
]  # fmt: skip


@pytest.mark.parametrize("form", ["section", "file", "text"])
@pytest.mark.parametrize(("section", "key", "kind", "wanted"), DEEPSPEED)
def test_deepspeed(form: str, section: dict[str, Any], key: str, kind: str, wanted: dict[str, Any]) -> None:
    Path("ds.json").write_text(json.dumps(section))
    written = {"section": section, "file": "ds.json", "text": json.dumps(section)}[form]
    found = convert("axolotl", {"deepspeed": written})
    assert kinds(found, f"deepspeed.{key}") == [kind]
    for name, value in wanted.items():
        holder: Any = found.values
        for part in name.split("."):
            holder = (holder or {}).get(part)
        assert holder == value


def test_a_file_of_deepspeed_that_was_not_read() -> None:
    Path("broken.json").write_text("{")
    assert kinds(convert("axolotl", {"deepspeed": "broken.json"}), "deepspeed") == ["changed"]
    assert kinds(convert("axolotl", {"deepspeed": "own.json"}), "deepspeed") == ["changed"]
    assert kinds(convert("axolotl", {"deepspeed": "deepspeed_configs/zero3.json"}), "deepspeed") == ["none"]
    assert kinds(convert("axolotl", {"deepspeed": None}), "deepspeed") == ["none"]


@pytest.mark.parametrize(
    ("framework", "more", "key"),
    [
        ("axolotl", "llama4_linearized_experts: true", "llama4_linearized_experts"),
        ("axolotl", "fsdp_config: {activation_checkpointng: true}", "fsdp_config.activation_checkpointng"),
        ("axolotl", "bnb_config_kwargs: {llm_int8_threshold: 4.0}\nload_in_8bit: true\nadapter: lora",
         "bnb_config_kwargs.llm_int8_threshold"),
        ("axolotl", "accelerator_config: {gradient_accumulation_kwargs: {num_steps: 4}}",
         "accelerator_config.gradient_accumulation_kwargs.num_steps"),
        ("axolotl", "gradient_checkpointing_kwargs: {preserve_rng_state: false}",
         "gradient_checkpointing_kwargs.preserve_rng_state"),
        ("axolotl", "model_quantization_config: A\nmodel_quantization_config_kwargs: {dequantize: true, x: 1}",
         "model_quantization_config_kwargs.x"),
        ("axolotl", "test_datasets: [{path: a, type: chat_template, message_property_mappings: {tool_calls: calls}}]",
         "test_datasets"),
        ("LLaMA-Factory v1", "dist_config: {name: fsdp2, dcp_path: x}", "dist_config.dcp_path"),
        ("LLaMA-Factory v1", "quant_config: {name: bnb, quantization_bit: 4, unheard_of: 1}",
         "quant_config.unheard_of"),
        ("LLaMA-Factory v1", "lr_scheduler_config: {name: cosine, unheard_of: 2}", "lr_scheduler_kwargs.unheard_of"),
    ],
)  # fmt: skip
def test_what_is_not_taken_over_is_said(framework: str, more: str, key: str) -> None:
    found = convert(framework, more)
    assert kinds(found, key) in (["changed"], ["refused"])
    assert found.status != "same"


def test_entries_of_lists_of_data_sets() -> None:
    text = BASES["TRL"].replace("dataset_name: a/c\n", "datasets: [{path: a, data_dir: en, columns: [text]}]\n")
    Path("old.yaml").write_text(text)
    (note,) = [note for note in convert_file(Path("old.yaml"), "TRL").notes if note.key == "datasets"]
    assert (note.kind, note.why) == ("changed", "data_dir, columns: not taken over")
    Path("sets.yaml").write_text("mine: {path: a/b, split: train_prefs, weight: 2}\n")
    old = BASES["LLaMA-Factory v1"].replace("a/c", "sets.yaml")
    Path("old.yaml").write_text(old)
    found = convert_file(Path("old.yaml"), "LLaMA-Factory v1")
    assert found.values["data"]["train"] == [{"path": "a/b", "split": "train_prefs"}]
    assert kinds(found, "train_dataset") == ["changed"]
    Path("data").mkdir()
    entry = {"file_name": "a.json", "folder": "x", "tags": {"user_tag": "Q"}, "columns": {"unheard_of": "y"}}
    Path("data/dataset_info.json").write_text(json.dumps({"mine": entry}))
    (note,) = [note for note in convert("LLaMA-Factory", "").notes if note.key == "dataset"]
    assert note.kind == "changed"
    assert all(key in note.why for key in ("folder", "user_tag", "unheard_of"))


@pytest.mark.parametrize("flags", [[], ["--json"], ["-o", "new.yaml"]])
def test_an_invalid_recipe_is_an_error_in_every_form(flags: list[str]) -> None:
    Path("old.yaml").write_text(BASES["axolotl"].replace("3.0e-5", ".nan"))
    with pytest.raises(SystemExit) as left:
        main(["convert", "old.yaml", *flags])
    assert left.value.code == 2
