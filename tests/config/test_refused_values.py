"""Values of config.json that transformers would refuse are told before it is imported, and of config.json."""

from __future__ import annotations

from typing import Any

import pytest

from halftune.config.facts.refused_values import check_values
from halftune.core.errors import ModelError

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
    ],
    ids=str,
)
def test_what_transformers_takes(raw: dict[str, Any]) -> None:
    check_values(raw, where="config.json", own_code=False)


def test_code_of_the_checkpoint_may_have_layers_of_its_own() -> None:
    check_values({**TEXT, "layer_types": ["its own"]}, where="config.json", own_code=True)
