"""Recipes with images of other frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halftune.convert.convert import convert_file
from halftune.convert.images import find_family

AXOLOTL = """
base_model: Qwen/Qwen2.5-VL-7B-Instruct
processor_type: AutoProcessor
skip_prepare_dataset: true
remove_unused_columns: false
sample_packing: false
chat_template: qwen2_vl
datasets: [{path: a/b, type: chat_template}]
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj'
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
output_dir: out
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen2-VL-7B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: seen
template: qwen2_vl
cutoff_len: 2048
output_dir: out
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def converted(text: str, framework: str, **changes: Any) -> Any:
    lines = [line for line in text.splitlines() if line.split(":")[0] not in changes]
    Path("old.yaml").write_text("\n".join([*lines, *(f"{key}: {json.dumps(one)}" for key, one in changes.items())]))
    made = convert_file(Path("old.yaml"), framework)
    keys = [note.key for note in made.notes if note.kind != "default"]
    assert len(keys) == len(set(keys))
    return made


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "same"),
        ({"base_model": "google/gemma-3-4b-it", "chat_template": "gemma3"}, "same"),
        (
            {"base_model": "gemma-3-4b-it", "chat_template": "gemma3", "attn_implementation": "flash_attention_2"},
            "approximate",
        ),
        ({"base_model": "llava-hf/llava-1.5-7b-hf", "chat_template": "llava"}, "same"),
        ({"base_model": "llava-hf/llava-v1.6-mistral-7b-hf", "chat_template": "llava"}, "approximate"),
        ({"lora_target_modules": ["q_proj"]}, "approximate"),
        ({"lora_target_modules": r"(model\.language_model|model\.visual).*(q|v)_proj"}, "approximate"),
        ({"image_size": 512}, "approximate"),
        ({"adapter": None, "lora_target_modules": None}, "same"),
        ({"lora_target_modules": None, "lora_target_linear": True}, "same"),
        ({"adapter": None, "lora_target_modules": None, "freeze_mm_modules": True}, "same"),
        ({"base_model": "mistralai/Voxtral-Mini-4B-Realtime-2602"}, "refused"),
        ({"base_model": "google/gemma-3-1b-it"}, "refused"),
        ({"rl": "dpo"}, "refused"),
    ],
)
def test_axolotl(changes: dict[str, Any], status: str) -> None:
    made = converted(AXOLOTL, "axolotl", **changes)
    assert made.status == status
    if status != "refused":
        data = made.values["data"]
        assert data["images"] is True
        assert data["packing"] is False
        assert data["overlong"] == "error"
        assert "chat_template" not in made.values["model"]
    if changes.get("attn_implementation"):
        assert made.values["attention"]["backend"] == "sdpa"


@pytest.mark.parametrize(("template", "labels"), [("qwen2_vl", None), ("llava", "all"), (None, "all")])
def test_texts_that_have_labels_in_axolotl(template: str | None, labels: str | None) -> None:
    made = converted(AXOLOTL, "axolotl", chat_template=template)
    assert made.values["method"].get("train_on") == labels


@pytest.mark.parametrize(
    ("columns", "changes", "status"),
    [
        ({"images": "images"}, {}, "same"),
        ({"images": "pictures"}, {"image_max_pixels": 262144}, "same"),
        ({"images": "images"}, {"template": "qwen3_vl"}, "approximate"),
        ({"images": "images"}, {"stage": "dpo"}, "same"),
        ({"images": "images"}, {"stage": "rm"}, "refused"),
        ({"images": "images"}, {"model_name_or_path": "org/unknown"}, "refused"),
        ({"images": "images"}, {"freeze_vision_tower": False}, "same"),
        ({"images": "images"}, {"freeze_multi_modal_projector": False}, "approximate"),
        ({}, {"freeze_vision_tower": False}, "same"),
        ({"images": "images", "videos": "films"}, {"video_fps": 1.0, "video_maxlen": 16}, "same"),
        ({"videos": "videos"}, {"model_name_or_path": "llava-hf/llava-1.5-7b-hf", "template": "llava"}, "refused"),
        ({"audios": "audios"}, {}, "refused"),
        ({}, {"image_max_pixels": 262144}, "same"),
    ],
)
def test_llamafactory(columns: dict[str, str], changes: dict[str, Any], status: str) -> None:
    Path("data").mkdir()
    entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "messages", **columns}}
    entry["tags"] = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    Path("data/dataset_info.json").write_text(json.dumps({"seen": entry}))
    made = converted(LLAMA_FACTORY, "LLaMA-Factory", **changes)
    assert made.status == status
    if status == "same" and columns:
        data = made.values["data"]
        assert data["images"] is True
        assert data["image_max_pixels"] == changes.get("image_max_pixels", 768 * 768)
        assert made.values["method"]["train_line_break"] is True
        names = data["train"][0].get("columns", {})
        assert {name: names.get(name, name) for name in columns} == columns
        if "videos" in columns:
            asked = {key: data[f"video_{key}"] for key in ("fps", "max_frames", "min_pixels", "max_pixels")}
            assert asked == {"fps": 1.0, "max_frames": 16, "min_pixels": 256, "max_pixels": 65536}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2-VL-7B-Instruct", True),
        ("./models/qwen2.5-vl-3b", True),
        ("Qwen/Qwen3-VL-4B-Instruct", True),
        ("llava-hf/llava-v1.6-mistral-7b-hf", True),
        ("HuggingFaceM4/Idefics3-8B-Llama3", True),
        ("Qwen/Qwen3.5-9B", True),
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", True),
        ("OpenGVLab/InternVL3_5-8B-HF", True),
        ("OpenGVLab/InternVL3_5-8B", False),
        ("google/gemma-4-E2B-it", True),
        ("google/gemma-4-12B-it", True),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", True),
        ("LiquidAI/LFM2.5-VL-1.6B", True),
        ("Qwen/Qwen3-8B", False),
        ("google/gemma-3n-E2B-it", False),
        ("Qwen/Qwen2.5-7B-Instruct", False),
        (None, False),
    ],
)
def test_models_are_known_by_name(name: str | None, known: bool) -> None:
    assert (find_family(name) is not None) == known


FULL = {"finetuning_type": "full", "lora_target": None}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, None),
        ({"freeze_vision_tower": False}, {"vision": "lora"}),
        ({"freeze_vision_tower": False, "freeze_language_model": True}, {"language": "frozen", "vision": "lora"}),
        ({**FULL, "freeze_vision_tower": True}, None),
        ({**FULL, "freeze_vision_tower": False}, {"vision": "full"}),
        (
            {**FULL, "freeze_multi_modal_projector": False, "freeze_language_model": True},
            {"language": "frozen", "projector": "full"},
        ),
        ({**FULL, "train_mm_proj_only": True}, {"language": "frozen", "projector": "full"}),
    ],
)
def test_parts_of_llamafactory(changes: dict[str, Any], parts: dict[str, str] | None) -> None:
    Path("data").mkdir()
    entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}}
    Path("data/dataset_info.json").write_text(json.dumps({"seen": entry}))
    made = converted(LLAMA_FACTORY, "LLaMA-Factory", **changes)
    assert made.status != "refused"
    assert made.values["model"].get("train") == parts


WHOLE = {"adapter": None, "lora_target_modules": None}


@pytest.mark.parametrize(
    ("changes", "parts", "only"),
    [
        ({}, None, None),
        (WHOLE, {"vision": "full", "projector": "full"}, None),
        ({**WHOLE, "freeze_mm_modules": True}, None, None),
        ({"lora_target_modules": None, "lora_target_linear": True}, {"vision": "lora", "projector": "lora"}, None),
        (
            {**WHOLE, "unfrozen_parameters": ["model.visual.merger.*"]},
            {"language": "frozen", "projector": "full"}, None,
        ),
        (
            {**WHOLE, "unfrozen_parameters": ["^model.visual.*", "^lm_head.weight$"]},
            {"vision": "full", "projector": "full"}, [r"^lm_head\.weight$"],
        ),
    ],
)  # fmt: skip
def test_parts_of_axolotl(changes: dict[str, Any], parts: dict[str, str] | None, only: list[str] | None) -> None:
    made = converted(AXOLOTL, "axolotl", **changes)
    assert made.status == "same"
    assert made.values["model"].get("train") == parts
    assert made.values["adapter"].get("train_only") == only


def test_a_piece_of_a_tower_is_refused_in_axolotl() -> None:
    made = converted(AXOLOTL, "axolotl", **WHOLE, unfrozen_parameters=["model.visual.blocks.3.*"])
    assert made.status == "refused"
