"""A small valid recipe, and a way to load changed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halftune.config.load import LoadedConfig, load_config
from halftune.core.errors import ConfigError

RECIPE = """\
model:
  name_or_path: builtin:qwen2-tiny
precision: fp32
adapter: {type: lora, rank: 8}
data:
  train: builtin:python-docs
training:
  output_dir: runs/x
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedConfig]:
    """``load(text, "key=value", …)`` loads x.yaml in a fresh working directory."""
    monkeypatch.chdir(tmp_path)

    def run(text: str = RECIPE, *overrides: str) -> LoadedConfig:
        Path("x.yaml").write_text(text, encoding="utf-8")
        return load_config("x.yaml", overrides)

    return run


@pytest.fixture
def problems(load: Callable[..., LoadedConfig]) -> Callable[..., list[str]]:
    """``problems(text, "key=value", …)``: the lines of the error."""

    def run(text: str = RECIPE, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        return str(caught.value).split("\n")

    return run


@pytest.fixture
def recipe_text() -> str:
    """The small valid recipe."""
    return RECIPE
