"""NEFTune: size of the noise, where there is none, and exact resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_model import a_model

from halftune.config.sections.method import SftMethod
from halftune.data.batch import WEIGHT, Batch, collate
from halftune.data.store import Example, Segment
from halftune.methods import AdapterOff
from halftune.methods.sft import Sft
from halftune.model.embedding_noise import add_noise
from halftune.model.policy.policy import PolicyModel
from halftune.train.trainer import train

LENGTHS = (3, 21, 12)


def a_batch(*, packed: bool) -> Batch:
    """Samples of one token id, so that every embedding is the same without noise."""
    ids = [np.full(length, 5, dtype=np.int32) for length in LENGTHS]
    batch = collate([Example((Segment(one, np.ones(len(one), bool)),)) for one in ids], 5, packed=packed)
    batch.columns[WEIGHT] = torch.ones(len(ids))
    return batch


@pytest.mark.parametrize("packed", [True, False])
def test_noise_is_uniform_within_the_limit_of_each_sample(packed: bool) -> None:
    model: Any = a_model().train()
    table, seen = model.get_input_embeddings().weight, []
    add_noise(model, 5.0)
    model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: seen.append(out.detach()))
    batch, method = a_batch(packed=packed), Sft(SftMethod(type="sft"))
    method.loss(PolicyModel(model), batch, AdapterOff(PolicyModel(model)))
    noise, start = (seen.pop() - table[5].detach()).squeeze(0), 0
    for row, length in enumerate(LENGTHS):
        own = noise[start : start + length] if packed else noise[row, :length]
        limit, start = 5.0 / (length * table.shape[1]) ** 0.5, start + length
        # a uniform variable's standard deviation is limit / sqrt(3); that of n draws differs by about 1 / sqrt(n)
        assert own.abs().max() <= limit * 1.0001
        assert float(own.std() / (limit / 3**0.5)) == pytest.approx(1, abs=4 / own.numel() ** 0.5)
    with torch.no_grad():
        method.loss(PolicyModel(model), batch, AdapterOff(PolicyModel(model)))
    assert torch.equal(seen.pop(), table[5].detach().expand_as(noise if not packed else noise[None]))
    model.eval()
    method.loss(PolicyModel(model), batch, AdapterOff(PolicyModel(model)))
    assert torch.equal(seen.pop(), table[5].detach().expand_as(noise if not packed else noise[None]))


def test_a_run_with_noise_resumes_exactly(recipe: Any, tmp_path: Path) -> None:
    settings = ("training.neftune_alpha=5", "training.max_steps=4", "training.save_steps=2")
    whole = train(*recipe(*settings, f"training.output_dir={tmp_path}/whole"))
    plain = train(*recipe(*settings[1:], f"training.output_dir={tmp_path}/plain"))
    again = tmp_path / "again"
    shutil.copytree(whole.folder, again)
    for left in (again / "final", *again.rglob("checkpoint-4")):
        shutil.rmtree(left)
    train(*recipe(*settings, f"training.output_dir={again}"))
    ends = [load_file(one / "final" / "adapter_model.safetensors") for one in (whole.folder, again, plain.folder)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])
