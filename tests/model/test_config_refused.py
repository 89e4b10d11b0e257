"""A config.json that transformers refuses is named for what is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import checkpoint, section

from halftune.core.errors import ModelError
from halftune.model.architectures import read_config
from halftune.model.rwkv7.configuration import RWKV7Config
from halftune.model.tokenizer import load_tokenizer


def changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def test_kinds_of_layers_that_do_not_exist(tmp_path: Path) -> None:
    folder = changed(checkpoint(tmp_path / "base"), layer_types=["linear_attention", "banana"])
    says = r"config.json: The `layer_types` entries must be .*'banana'"
    with pytest.raises(ModelError, match=says):
        read_config(folder, trust_remote_code=False)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=says):
        load_tokenizer(section(folder))


@pytest.mark.parametrize("values", [{"norm_eps": "x"}, {"head_dim": "32"}, {"norm_first": "no"}])
def test_rwkv7_values_of_another_type(values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=f"Field '{next(iter(values))}'"):
        RWKV7Config(**values)
