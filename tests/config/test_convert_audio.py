"""Recipes with audio of other frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halftune.convert.audio import find_media
from halftune.convert.convert import convert_file

AUDIO, OMNI = "Qwen/Qwen2-Audio-7B-Instruct", "Qwen/Qwen2.5-Omni-7B"
LLAMA_FACTORY = {
    "model_name_or_path": OMNI,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "all",
    "dataset": "heard",
    "template": "qwen2_omni",
    "cutoff_len": 2048,
    "output_dir": "out",
}
AXOLOTL = {
    "base_model": AUDIO,
    "processor_type": "AutoProcessor",
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
    "sample_packing": False,
    "datasets": [{"path": "a/b", "type": "chat_template"}],
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_modules": r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj",
    "sequence_len": 2048,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "warmup_ratio": 0.1,
    "output_dir": "out",
}
WHOLE = {"adapter": None, "lora_target_modules": None, "lora_r": None, "lora_alpha": None}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def converted(recipe: dict[str, Any], framework: str, **changes: Any) -> Any:
    Path("old.yaml").write_text(json.dumps({**recipe, **changes}))
    made = convert_file(Path("old.yaml"), framework)
    keys = [note.key for note in made.notes if note.kind != "default"]
    assert len(keys) == len(set(keys))
    return made


@pytest.mark.parametrize(
    ("columns", "changes", "status"),
    [
        (("audios",), {}, "same"),
        (("audios", "images"), {}, "same"),
        (("audios",), {"audio_sampling_rate": 16000, "use_audio_in_video": True}, "same"),
        (("audios",), {"audio_sampling_rate": 8000}, "approximate"),
        (("audios",), {"model_name_or_path": AUDIO, "template": "qwen2_audio"}, "approximate"),
        (("audios", "images"), {"model_name_or_path": AUDIO, "template": "qwen2_audio"}, "refused"),
        (("audios", "videos"), {}, "same"),
        (("audios", "videos"), {"use_audio_in_video": True}, "refused"),
        (("audios", "videos"), {"model_name_or_path": AUDIO, "template": "qwen2_audio"}, "refused"),
        (("audios",), {"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}, "refused"),
        (("audios",), {"model_name_or_path": "mistralai/Voxtral-Mini-4B-Realtime-2602"}, "refused"),
        (("audios",), {"stage": "rm"}, "refused"),
    ],
)
def test_llamafactory(columns: tuple[str, ...], changes: dict[str, Any], status: str) -> None:
    Path("data").mkdir()
    names = {name: f"my_{name}" for name in columns}
    entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "messages", **names}}
    entry["tags"] = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    Path("data/dataset_info.json").write_text(json.dumps({"heard": entry}))
    made = converted(LLAMA_FACTORY, "LLaMA-Factory", **changes)
    assert made.status == status
    if status == "same":
        data = made.values["data"]
        assert [data.get(key, False) for key in ("audio", "images", "videos")] == [
            name in columns for name in ("audios", "images", "videos")
        ]
        assert names.items() <= data["train"][0]["columns"].items()
        assert "chat_template" not in made.values["model"]
        assert made.values["method"]["train_line_break"] is True


def test_llamafactorys_own_audio_set_is_known_by_its_name() -> None:
    made = converted(LLAMA_FACTORY, "LLaMA-Factory", dataset="mllm_audio_demo")
    assert made.status == "approximate"  # no dataset_info.json
    assert made.values["data"]["audio"] is True


@pytest.mark.parametrize(
    ("changes", "status", "trained"),
    [
        ({}, "same", None),
        ({"base_model": OMNI}, "same", None),
        (WHOLE, "same", {"audio": "full", "projector": "full"}),
        ({**WHOLE, "base_model": OMNI}, "same", {"audio": "full", "projector": "full", "vision": "full"}),
        ({**WHOLE, "freeze_mm_modules": True}, "same", None),
        ({"lora_target_modules": None, "lora_target_linear": True}, "same", {"audio": "lora", "projector": "lora"}),
        ({"lora_target_modules": ["q_proj"]}, "approximate", None),
        ({"base_model": "mistralai/Voxtral-Mini-3B-2507"}, "same", None),
        ({"base_model": "mistralai/Voxtral-Mini-4B-Realtime-2602"}, "refused", None),
        ({"rl": "dpo"}, "refused", None),
    ],
)
def test_axolotl(changes: dict[str, Any], status: str, trained: dict[str, str] | None) -> None:
    made = converted(AXOLOTL, "axolotl", **changes)
    assert made.status == status
    if status != "refused":
        data = made.values["data"]
        assert (data["audio"], data.get("images", False)) == (True, changes.get("base_model") == OMNI)
        assert (data["packing"], data["overlong"]) == (False, "error")
        assert made.values["model"].get("train") == trained


def test_the_tokens_of_mistral_common_are_those_of_a_template() -> None:
    voxtral = {"base_model": "mistralai/Voxtral-Mini-3B-2507", "tokenizer_use_mistral_common": True}
    made = converted(AXOLOTL, "axolotl", **voxtral)
    assert made.status == "same"
    assert made.values["model"]["chat_template"] == "voxtral"
    assert made.values["model"]["chat_template_kwargs"] == {"trim_answers": True}
    assert made.values["method"]["train_on"] == "all"


@pytest.mark.parametrize(
    ("name", "media"),
    [
        (AUDIO, {"audios"}),
        ("./models/qwen2_audio", {"audios"}),
        (OMNI, {"audios", "images", "videos"}),
        ("Qwen/Qwen2.5-VL-7B-Instruct", {"images", "videos"}),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", {"audios", "images"}),
        ("Qwen/Qwen3-ASR-1.7B-hf", {"audios"}),
        ("zai-org/GLM-ASR-Nano-2512", {"audios"}),
        ("nvidia/audio-flamingo-3-hf", {"audios"}),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", {"images"}),
        ("mistral-community/pixtral-12b", {"images"}),
        ("mistralai/Voxtral-Mini-3B-2507", {"audios"}),
        ("mistralai/Voxtral-Mini-4B-Realtime-2602", set()),
        ("Qwen/Qwen3-8B", set()),
        (None, set()),
    ],
)
def test_models_are_known_by_name(name: str | None, media: set[str]) -> None:
    assert find_media(name) == media
