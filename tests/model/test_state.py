"""Trainable parameters as a checkpoint holds them: bit for bit, and strictly these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import checkpoint, plan, section

from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.core.errors import ModelError
from halftune.model.adapters import attach_adapter
from halftune.model.load.load import load_model
from halftune.model.result.save import load_trainable_state, trainable_state


def fresh(folder: Path, seed: int, adapter=None) -> torch.nn.Module:
    return attach_adapter(load_model(section(folder), plan("bf16")), adapter or LoraAdapter(rank=2), plan("bf16"), seed)


def test_round_trip_in_place(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    one, other = fresh(folder, 0), fresh(folder, 1)
    state = {name: tensor.clone() for name, tensor in trainable_state(one).items()}
    addresses = {name: parameter.data_ptr() for name, parameter in other.named_parameters()}
    load_trainable_state(other, state)
    assert state.keys() == {name for name, parameter in other.named_parameters() if parameter.requires_grad}
    assert all(torch.equal(tensor, trainable_state(other)[name]) for name, tensor in state.items())
    assert addresses == {name: parameter.data_ptr() for name, parameter in other.named_parameters()}, (
        "optimizers hold them"
    )


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    state = trainable_state(fresh(checkpoint(tmp_path / "model"), 0, NoAdapter(type="none")))
    assert "model.embed_tokens.weight" in state
    assert "lm_head.weight" not in state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.popitem(), "1 trained weights are in either"),
        (lambda state: state.update(other=torch.ones(1)), "first other"),
        (lambda state: state.update({next(iter(state)): torch.ones(1)}), "in the checkpoint"),
        (lambda state: state.update({k: v.double() for k, v in state.items()}), "torch.float64 in the checkpoint"),
    ],
)
def test_anything_else_is_an_error_and_changes_nothing(tmp_path: Path, change, message: str) -> None:
    model = fresh(checkpoint(tmp_path / "model"), 0)
    before = {name: tensor.clone() for name, tensor in trainable_state(model).items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(ModelError, match=message):
        load_trainable_state(model, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainable_state(model).items())
