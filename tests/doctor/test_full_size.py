"""Models in their real sizes, from config.json alone: no weights, little memory."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import resource
from pathlib import Path

import pytest
from patience import LIMIT

from halftune.cli import main

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


VL_7B = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {**OMNI_7B["text_config"], "model_type": "qwen2_5_vl_text"},
    "vision_config": {"model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}


def asked(folder: Path) -> None:
    """``halftune doctor`` in a fork that has imported everything: what it prints, and the memory that it takes more."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of the tests before it
    words = ["doctor", "--config", str(folder / "x.yaml"), "--json", "--hardware", "a100"]
    with (folder / "said").open("w") as file, contextlib.redirect_stdout(file), pytest.raises(SystemExit, match="0"):
        main(words)
    (folder / "peak").write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "compute", "calls"),
    [
        (QWEN_7B, "bf16", (28, 56)),
        (OMNI_7B, "bf16", (92, 120)),
        (OMNI_7B, "fp16", (92, 120)),
        (VL_7B, "bf16", (28 + 32, 28 + 32 + 28)),
    ],
    ids=["qwen2.5-7b", "qwen2.5-omni-7b", "qwen2.5-omni-7b-fp16", "qwen2.5-vl-7b"],
)
def test_clean_and_small(tmp_path: Path, config: dict, compute: str, calls: tuple[int, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen = config is VL_7B  # the run has images; the others trace their towers in a run on text, too
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    recipe = {
        "model": {"name_or_path": str(tmp_path), "tokenizer": f"builtin:{'qwen2_5_vl-tiny' if seen else 'qwen2-tiny'}"},
        "precision": compute,
        "adapter": {"type": "lora"},
        "data": {"train": f"builtin:{'patterns' if seen else 'python-docs'}", "images": seen},
        "training": {"output_dir": str(tmp_path.with_name(f"{tmp_path.name}-run"))},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(recipe))
    child = multiprocessing.get_context("fork").Process(target=asked, args=(tmp_path,))
    child.start()
    child.join(LIMIT)
    child.kill()
    assert child.exitcode == 0
    trace = json.loads((tmp_path / "said").read_text())["trace"]
    assert (trace["contract_holds"], trace["tensors"], trace["calls"]) == (
        True,
        "without weights",
        dict(zip(("attention, train", "attention, chat"), calls, strict=True)),
    )
    peak = int((tmp_path / "peak").read_text())
    assert peak < 4 * 2**30, "the weights have 14 GiB in half precision"
    print(f"{trace['seconds']} s, {peak / 2**20:.0f} MiB")
