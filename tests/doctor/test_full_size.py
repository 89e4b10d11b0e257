"""Models in their real sizes, from config.json alone: no weights, little memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
OMNI_TEXT = {**QWEN_7B, "model_type": "qwen2_5_omni_text"}
OMNI_7B = {
    "model_type": "qwen2_5_omni_thinker",
    "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {**OMNI_TEXT, "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default"}},
    "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", "depth": 32, "hidden_size": 1280},
    "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", "encoder_layers": 32, "d_model": 1280},
    "image_token_index": 151655,
    "audio_token_index": 151646,
    "video_token_index": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "audio_start_token_id": 151647,
    "audio_end_token_id": 151648,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "calls"),
    [
        (QWEN_7B, {"attention, train": 28, "attention, chat": 56}),
        (OMNI_7B, {"attention, train": 28 + 32 + 32, "attention, chat": 28 + 32 + 32 + 28}),
    ],
    ids=["qwen2.5-7b", "qwen2.5-omni-7b"],
)
def test_clean_and_small(tmp_path: Path, config: dict, calls: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = {
        "model": {"name_or_path": str(tmp_path), "tokenizer": "builtin:qwen2-tiny"},
        "precision": "bf16",
        "adapter": {"type": "lora"},
        "data": {"train": "builtin:python-docs"},
        "training": {"output_dir": str(tmp_path / "run")},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "halftune", "doctor", "--config", str(tmp_path / "x.yaml"), "--json"]
    done = subprocess.run([*command, "--hardware", "a100"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trace = json.loads(done.stdout)["trace"]
    assert (trace["contract_holds"], trace["tensors"], trace["calls"]) == (True, "without weights", calls)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert peak < 4 * 2**30
    print(f"{trace['seconds']} s, {peak / 2**20:.0f} MiB")
