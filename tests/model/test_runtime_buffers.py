"""What foreign code computes when a model is made: as in fp32, whatever the storage format, and never unwritten."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from standins.remote_code_models import stranger

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.catalogue import lookup
from halftune.model.load.lazy_weights import LazyWeights
from halftune.model.load.load import load_model
from halftune.model.result.save import write_model
from halftune.plan import resolve

pytestmark = pytest.mark.usefixtures("own_module_cache")

MADE = """
    turns = 1.0 / 1e6 ** (torch.arange(0, self.size, 2) / self.size)
    self.register_buffer("freqs", turns, persistent=False)
    self.register_buffer("seen", torch.ones(8, 8, dtype=torch.bool).tril(), persistent=False)
    self.register_buffer("stored_freqs", turns.clone())
    self.angles = torch.arange(4096)[:, None] * turns
"""
ATTENDED = """
    turned = self.angles[:length, None].cos()
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
"""


def loaded(tmp_path: Path, made: str, lazy: LazyWeights | None = None):
    folder = stranger(tmp_path / "model", ATTENDED, made=made).folder
    tree = {
        "model": {"name_or_path": str(folder), "trust_remote_code": True, "tokenizer": "builtin:qwen2-tiny"},
        "precision": "bf16",
        "adapter": {"type": "lora"},
        "data": {"train": "builtin:python-docs"},
        "training": {"output_dir": str(tmp_path / "run")},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    config = load_config(tmp_path / "x.yaml").run
    return load_model(config.model, resolve(config, lookup("a100"), read_model_facts(config.model)), lazy=lazy)


@pytest.mark.parametrize("apart", [False, True], ids=["read", "lazy"])
def test_tables_are_those_of_fp32(tmp_path: Path, apart: bool) -> None:
    state = torch.get_rng_state()
    model: Any = loaded(tmp_path, MADE, LazyWeights() if apart else None)
    assert torch.equal(torch.get_rng_state(), state), "making it again takes no random numbers"
    turns = 1.0 / 1e6 ** (torch.arange(0, 16, 2) / 16)
    rounded = 1.0 / 1e6 ** (torch.arange(0, 16, 2).bfloat16() / 16)
    assert (4096 * (rounded.float() - turns)).abs().max() > 0.4, "radians at the last position, in bf16"
    for block in model.blocks:
        assert block.q_proj.weight.dtype is torch.bfloat16
        for table in (block.freqs, block.stored_freqs):
            assert table.dtype is torch.float32
            assert torch.equal(table, turns)
        assert torch.equal(block.angles, torch.arange(4096)[:, None] * turns), "no buffer, and there all the same"
        assert torch.equal(block.seen, torch.ones(8, 8, dtype=torch.bool).tril())


def test_who_loads_it_elsewhere_is_told_how(tmp_path: Path) -> None:
    model: Any = loaded(tmp_path, MADE)
    written = tmp_path / "written"
    written.mkdir()
    write_model(model, "bf16", (), written)
    said = (written / "README.md").read_text()
    assert "Its Python code computes `freqs`, `seen`, `angles` in the constructor" in said
    (code,) = re.findall(r"```python\n(.*?)```", said, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace('folder = "."', f"folder = {str(written)!r}"), names)
    other = names["model"]
    assert other.head.weight.dtype is torch.bfloat16
    for block, its in zip(model.blocks, other.blocks, strict=True):
        assert torch.equal(its.freqs, block.freqs)
        assert torch.equal(its.angles, block.angles)
    ids = torch.arange(8)[None]
    assert torch.equal(other(ids).logits, model.eval()(ids).logits)
