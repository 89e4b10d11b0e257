"""Multimodal checkpoints trained on text: their own class, towers frozen, not in memory, and saved bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_model import because, plan, section
from tiny_towers import LARGE, MODELS, NOT_SMALL, multimodal
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from halftune.config.facts.families import FAMILIES, check_causal, multimodal_class
from halftune.config.facts.model import read_model_facts
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.core.errors import ModelError
from halftune.hardware.catalogue import lookup
from halftune.model.adapters import attach_adapter, load_adapter
from halftune.model.attention.packing_check import packing_verdict
from halftune.model.load import load
from halftune.model.load.lazy_weights import LazyWeights
from halftune.model.load.load import load_model
from halftune.model.load.towers import NotLoaded, small_multimodal_copy, towers_called_for_text, towers_of
from halftune.model.result.merge import merge_adapter
from halftune.model.result.save import save_final, write_model
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import explain, resolve, to_dict

KEEP = (r"(^|\.)A_log$",)
# Types whose default config describes no model that runs on text when it is made small, or that needs timm.
UNDECIDED = {
    "aya_vision",
    "chameleon",
    "cohere_compass",
    "deepseek_ocr2",
    "dots3_note",
    "emu3",
    "fast_vlm",
    "gemma3n",
    "granite4_vision",
    "hunyuan_vl",
    "inkling_mm_model",
    "molmo2",
    "perception_lm",
    "qwen4_exp",
    "step3p7",
}
TARGETS = {"all-linear": "all-linear", "list": ("q_proj", "o_proj", "v_proj")}


def is_language(name: str) -> bool:
    return "language_model" in name or name.startswith(("lm_head", "model.layers", "model.embed_tokens", "model.norm"))


def new_name(name: str) -> str:
    """Of a tensor of LLaVA, as transformers' own modules call it; by default it still writes the names of old."""
    name = name.replace("language_model.model.", "language_model.").replace("language_model.lm_head", "lm_head")
    return name if name.startswith("lm_head") else f"model.{name}"


def towers_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for name, one in load_file(folder / "model.safetensors").items() if not is_language(name)}


def assert_same_towers(folder: Path, base: Path) -> None:
    ours, theirs = towers_in(folder), towers_in(base)
    assert theirs
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert one.dtype == theirs[name].dtype
        assert torch.equal(one, theirs[name])


def assert_same_class(folder: Path, base: Path) -> None:
    ours, theirs = (json.loads((one / "config.json").read_text()) for one in (folder, base))
    assert ours["architectures"] == theirs["architectures"]
    assert ours["vision_config"] == theirs["vision_config"]
    assert (folder / "preprocessor_config.json").read_text() == (base / "preprocessor_config.json").read_text()


def move(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("kind", MODELS)
def test_the_class_is_the_one_that_config_names(tmp_path: Path, kind: str) -> None:
    base = multimodal(tmp_path / "model", kind)
    model = load_model(section(base), plan("bf16", "bf16", keep=KEEP))
    assert [type(model).__name__] == json.loads((base / "config.json").read_text())["architectures"]
    towers = towers_of(model)
    assert towers is not None
    assert set(towers.tensors) == set(towers_in(base))
    assert any(isinstance(module, NotLoaded) for module in model.modules())
    assert not [name for name, _ in model.named_parameters() if towers.own(name)]


@pytest.mark.parametrize("kind", MODELS)
def test_full_training_saves_every_tower_as_it_came(tmp_path: Path, kind: str) -> None:
    base = multimodal(tmp_path / "model", kind)
    made = plan("bf16", "bf16", keep=KEEP)
    model = attach_adapter(load_model(section(base), made), NoAdapter(type="none"), made, 0)
    ids = torch.randint(0, 200, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    assert not [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    move(model)
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    assert_same_towers(tmp_path / "final", base)
    assert_same_class(tmp_path / "final", base)
    before, after = (load_file(one / "model.safetensors") for one in (base, tmp_path / "final"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if is_language(name))
    again, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "final", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    theirs = again.eval()(input_ids=ids).logits
    ours = load_model(section(tmp_path / "final"), plan(), for_training=False)
    torch.testing.assert_close(ours(input_ids=ids).logits, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("error:.*missing adapter keys")
def test_adapters_load_on_the_whole_model_in_plain_peft(tmp_path: Path, kind: str, targets: str) -> None:
    base = multimodal(tmp_path / "model", kind)
    made = plan("fp32", "fp32", keep=KEEP)
    model = attach_adapter(load_model(section(base), made), LoraAdapter(target_modules=TARGETS[targets]), made, 0)
    move(model)
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    ids = torch.randint(0, 200, (1, 8))
    theirs = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    untrained = theirs.eval()(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(theirs, str(tmp_path / "final")).eval()
    assert not [name for name, _ in adapted.named_parameters() if "lora_" in name and "language_model" not in name]
    logits = adapted(input_ids=ids).logits
    assert (logits - untrained).norm() / untrained.norm() > 0.01
    torch.testing.assert_close(model.eval()(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-4)
    ours = load_adapter(load_model(section(base), made, for_training=False), tmp_path / "final", made)
    torch.testing.assert_close(ours(input_ids=ids).logits, logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_merged_models_keep_every_tower(tmp_path: Path, kind: str) -> None:
    base = multimodal(tmp_path / "model", kind)
    made = plan("bf16", "fp32", keep=KEEP)
    model = attach_adapter(load_model(section(base), made), LoraAdapter(rank=4), made, 0)
    move(model)
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    merge = merge_adapter(section(base), tmp_path / "final", made, "bf16")
    (tmp_path / "merged").mkdir()
    write_model(merge.model, "bf16", KEEP, tmp_path / "merged")
    assert_same_towers(tmp_path / "merged", base)
    assert_same_class(tmp_path / "merged", base)


def test_files_with_the_names_of_another_format_keep_them(tmp_path: Path) -> None:
    base = multimodal(tmp_path / "model", "llava")
    old = {new_name(name): one for name, one in load_file(base / "model.safetensors").items()}
    assert "model.language_model.norm.weight" in old
    save_file(old, base / "model.safetensors", metadata={"format": "pt"})
    made = plan("bf16", "bf16")
    model = attach_adapter(load_model(section(base), made), NoAdapter(type="none"), made, 0)
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    after = load_file(tmp_path / "final" / "model.safetensors")
    assert after.keys() == old.keys()
    assert all(torch.equal(one, old[name]) and one.dtype == old[name].dtype for name, one in after.items())
    assert read_model_facts(section(base)).num_parameters_exact


def test_the_language_model_alone_when_asked(tmp_path: Path) -> None:
    base = multimodal(tmp_path / "model", "qwen3_5")
    model = load_model(section(base, parts="text"), plan("bf16", "bf16", keep=KEEP))
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert towers_of(model) is None
    with pytest.raises(ModelError) as caught:
        read_model_facts(section(multimodal(tmp_path / "gemma", "gemma3"), parts="text"))
    assert "model.parts" in caught.value.remedy


@pytest.mark.parametrize("kind", MODELS)
def test_facts_count_language_model_and_towers_apart(tmp_path: Path, kind: str) -> None:
    base = multimodal(tmp_path / "model", kind)
    facts = read_model_facts(section(base))
    model = load_model(section(base), plan("bf16", "bf16", keep=KEEP))
    assert facts.multimodal == type(model).__name__
    assert facts.num_parameters == sum(one.numel() for one in model.parameters())
    assert facts.tower_parameters == sum(one.numel() for one in towers_in(base).values())
    assert facts.dtype == "bf16"
    own = {name for name, _ in model.named_parameters()}
    for tensor in facts.tensors:
        assert {f"{module}.{tensor.name.rpartition('.')[2]}" for module in tensor.modules()} <= own


@pytest.mark.parametrize("kind", MODELS)
def test_packed_samples_are_checked_on_the_class_that_is_trained(tmp_path: Path, kind: str) -> None:
    config = AutoConfig.from_pretrained(multimodal(tmp_path, kind))
    made = plan()
    made = replace(made, batch=replace(made.batch, packing=because(True)))
    copies = []

    def copy_of(config: PretrainedConfig) -> PreTrainedModel:
        copies.append(small_multimodal_copy(config))
        return copies[-1]

    attention = replace(made.attention, linear=because("halftune"))
    verdict = packing_verdict(config, replace(made, attention=attention), copy_of)
    assert verdict.value, verdict.reason
    assert [type(copy).__name__ for copy in copies] == config.architectures


def test_a_class_that_computes_where_its_first_weight_is_packs() -> None:
    """Idefics 3 moves embeddings to the device of its vision tower, which the copy does not have."""
    verdict = packing_verdict(AutoConfig.for_model("idefics3"), plan(), small_multimodal_copy)
    assert verdict.value, verdict.reason


@pytest.mark.slow
def test_every_image_text_model_that_transformers_has_runs_on_text() -> None:
    """The small copy tells which towers text needs; of the types that test_every_tower does not train, it is asked."""
    refused, undecided, known = set(), set(), set()
    for kind, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        config = CONFIG_MAPPING[kind]()
        raw = {**config.to_dict(), "model_type": kind, "architectures": [name]}
        found = multimodal_class(raw, "all", trust_remote_code=False, where=kind)
        try:
            check_causal(raw, where=kind, trust_remote_code=False, multimodal=bool(found))
        except ModelError:
            refused.add(kind)
            continue
        if found:
            assert found == name
            known.add(kind)
            if kind in NOT_SMALL | LARGE and towers_called_for_text(config) is None:
                undecided.add(kind)
    assert refused >= {name for name, family in FAMILIES.items() if family.kind == "pictures"}
    both = {kind for kind in known if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert both >= {"gemma3", "gemma4", "llama4", "mllama", "qwen3_5", "qwen3_5_moe"}
    assert undecided <= UNDECIDED
    assert len(known) >= 80


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_weights_that_stay_in_their_files_are_those_of_the_language_model(tmp_path: Path, kind: str) -> None:
    files = LazyWeights()
    model = load_model(section(multimodal(tmp_path, kind)), plan("bf16", "bf16", keep=KEEP), lazy=files)
    assert all(one.is_meta for one in model.parameters())
    assert not files.lacks(model)
    towers = towers_of(model)
    assert towers is not None
    assert not [name for name, _ in model.named_parameters() if towers.own(name)]


def test_a_tower_that_text_needs_is_loaded_and_stays_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = multimodal(tmp_path / "model", "gemma3")
    monkeypatch.setattr(load, "towers_called_for_text", lambda config: None)
    made = plan("bf16", "fp32")
    for adapter in (LoraAdapter(rank=4), LoraAdapter(rank=4, target_modules=("q_proj",)), NoAdapter(type="none")):
        model = attach_adapter(load_model(section(base), made), adapter, made, 0)
        inside = [(name, one) for name, one in model.named_parameters() if "vision_tower" in name]
        assert inside
        assert not [name for name, one in inside if one.requires_grad or "lora_" in name]
        save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / adapter.type)
    assert_same_towers(tmp_path / "none", base)


def test_only_the_towers_that_text_needs_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "towers_called_for_text", lambda config: frozenset({"model.vision_tower"}))
    model = load_model(section(multimodal(tmp_path, "gemma3")), plan("bf16", "fp32"))
    towers = towers_of(model)
    assert towers is not None
    left_out = {name: isinstance(model.get_submodule(name), NotLoaded) for name in towers.names}
    assert left_out == {"model.vision_tower": False, "model.multi_modal_projector": True}


@pytest.mark.parametrize(("parts", "said"), [("all", "kept"), ("text", "left out")])
def test_the_plan_says_what_becomes_of_the_towers(tmp_path: Path, parts: str, said: str) -> None:
    asked = section(multimodal(tmp_path), parts=parts)
    recipe = {"model": asked, "data": {"train": ["d"]}, "training": {"output_dir": "r"}}
    facts = read_model_facts(asked)
    made = resolve(RunConfig.model_validate(recipe), lookup("a100"), facts)
    assert made.towers is not None
    assert made.towers.value == said
    assert f"{facts.tower_parameters:,}" in made.towers.reason
    assert said in explain(made)
    assert to_dict(made)["towers"]["value"] == said


@pytest.mark.filterwarnings("ignore:.*missing adapter keys")
def test_what_is_of_the_language_model_alone_is_told_how_to_load(tmp_path: Path) -> None:
    base, made = multimodal(tmp_path / "model"), plan("bf16", "fp32", keep=KEEP)
    model = attach_adapter(load_model(section(base, parts="text"), made), LoraAdapter(rank=4), made, 0)
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    load_adapter(load_model(section(base, parts="text"), made, for_training=False), tmp_path / "final", made)
    with pytest.raises(ModelError) as caught:
        load_adapter(load_model(section(base), made, for_training=False), tmp_path / "final", made)
    assert "model.parts: text" in caught.value.remedy

    tensors = load_file(base / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if is_language(name)}, base / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(section(base), made)
    assert "model.parts: text" in caught.value.remedy


def test_a_result_whose_towers_cannot_be_found_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LazyWeights, "sources", lambda self, names: set())
    with pytest.raises(ModelError) as caught:
        load_model(section(multimodal(tmp_path)), plan())
    assert "model.parts" in caught.value.remedy
