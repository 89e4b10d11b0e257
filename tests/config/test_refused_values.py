"""Values of config.json that transformers would refuse are told before it is imported, and of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halftune.config.facts.refused_values import check_generation, check_values
from halftune.core.errors import ModelError

NAN = float("nan")
TEXT = {"model_type": "qwen2", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"dtype": "bfloat61"}, "dtype"),
        ({"torch_dtype": "fp17"}, "torch_dtype"),
        ({"dtype": 16}, "dtype"),
        ({"text_config": {"dtype": "half16"}}, "text_config.dtype"),
        ({**TEXT, "layer_types": ["full_attention"]}, "layer_types"),
        ({**TEXT, "layer_types": ["full_attention", "wide_attention"]}, "layer_types"),
        ({"text_config": {**TEXT, "layer_types": ["conv"]}}, "text_config.layer_types"),
        ({**TEXT, "hidden_act": "sillu"}, "hidden_act"),
        ({"model_type": "gpt2", "activation_function": "gelu_old"}, "activation_function"),
        ({"text_config": {"model_type": "gemma3_text", "hidden_activation": "gelus"}}, "text_config.hidden_activation"),
        ({"max_position_embeddings": 10**29}, "max_position_embeddings"),
        ({"vision_config": {"max_position_embeddings": float("inf")}}, "vision_config.max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": NAN}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4}}, "rope_scaling.factor"),
        ({"rope_parameters": {"full_attention": {"short_factor": [1.0, NAN]}}}, "rope_parameters.full_attention.short"),
        ({"rope_parameters": {"original_max_position_embeddings": 1e29}}, "rope_parameters.original_max"),
        ({"rope_theta": -1e4}, "rope_theta"),
        ({"eos_token_id": [10**10, 2]}, "eos_token_id"),
        ({"text_config": {"pad_token_id": -5}}, "text_config.pad_token_id"),
        ({"image_token_id": 2**31}, "image_token_id"),
        ({"image_token_index": -(2**20)}, "image_token_index"),
        ({"attention_dropout": 7}, "attention_dropout"),
        ({"resid_pdrop": -0.1}, "resid_pdrop"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps"),
        ({"a_key_of_its_own": [[NAN]]}, "a_key_of_its_own"),
    ],
    ids=str,
)
def test_what_transformers_refuses(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_values(raw, where="config.json", own_code=False)
    assert caught.value.what.startswith(named)
    assert caught.value.where == "config.json"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "raw",
    [
        *({"dtype": name} for name in ("bfloat16", "torch.float16", "float", "auto", "float8_e4m3fn", None)),
        {"dtype": {"text_config": "bfloat16"}},
        {**TEXT, "layer_types": ["mamba", "attention"]},
        {**TEXT, "layer_types": ["sliding_attention", "linear_attention"]},
        {**TEXT, "model_type": "deepseek_v4", "layer_types": ["its own"]},
        {"layer_types": ["conv"]},
        {**TEXT, "hidden_act": "gelu_pytorch_tanh"},
        {"model_type": "gemma3_text", "hidden_act": "its own", "hidden_activation": None},
        {"model_type": "not_there", "hidden_act": "its own"},
        {"time_step_limit": [0.0, float("inf")], "sliding_window": -1, "pad_token_id": -1, "bos_token_id": None},
        {"eos_token_id": [1, 2], "max_position_embeddings": 10_485_760, "rope_theta": 1e7, "layer_norm_eps": 1e-12},
    ],
    ids=str,
)
def test_what_transformers_takes(raw: dict[str, Any]) -> None:
    check_values(raw, where="config.json", own_code=False)


def test_code_of_the_checkpoint_may_have_layers_of_its_own() -> None:
    check_values({**TEXT, "layer_types": ["its own"]}, where="config.json", own_code=True)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        *((({"eos_token_id": value}), "eos_token_id") for value in ("x", [1, "x"], 1.5, True, {}, 10**10, [-5])),
        ({"pad_token_id": "0"}, "pad_token_id"),
        ({"bos_token_id": [None, "x"]}, "bos_token_id"),
        ({"temperature": NAN}, "temperature"),
        ([1], "expected a JSON object"),
    ],
    ids=str,
)
def test_a_generation_config_that_cannot_end_an_answer(raw: Any, named: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError) as caught:
        check_generation(tmp_path)
    assert caught.value.what.startswith(named)
    assert caught.value.code in ("model.config_invalid", "core.file_damaged")


def test_a_generation_config_as_models_have_it(tmp_path: Path) -> None:
    check_generation(tmp_path)
    raw = {"eos_token_id": [1, 2], "bos_token_id": None, "pad_token_id": 0, "temperature": 0.6, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    check_generation(tmp_path)
