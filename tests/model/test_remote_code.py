"""Arguments that a checkpoint's own forward does not know."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.model.load.remote_code import accept_arguments_of_peft


class Strict(GPT2LMHeadModel):
    def forward(self, input_ids: Any = None, labels: Any = None) -> CausalLMOutputWithCrossAttentions:
        return super().forward(input_ids=input_ids, labels=labels)


def test_arguments_that_are_none_are_left_out_and_others_are_named() -> None:
    model = Strict(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))
    accept_arguments_of_peft(model, ModelSection(name_or_path="builtin:qwen2-tiny"))
    ids = model.dummy_inputs["input_ids"]
    assert model(input_ids=ids, output_attentions=None, return_dict=None).logits.shape[-1] == 16
    with pytest.raises(ModelError) as error:
        model(input_ids=ids, position_ids=ids)
    assert error.value.code == "model.own_code_failed"
    assert "position_ids" in error.value.what


def test_a_forward_that_takes_everything_stays_as_it_is() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16))
    accept_arguments_of_peft(model, ModelSection(name_or_path="builtin:qwen2-tiny"))
    assert "forward" not in vars(model)
