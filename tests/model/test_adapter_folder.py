"""The adapter that training starts from is checked before the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halftune.config.run import RunConfig
from halftune.core.errors import ModelError
from halftune.model.files.preflight import check_all_folders


def test_the_adapter_to_start_from_is_checked_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    run = RunConfig.model_validate(
        {
            "model": {"name_or_path": "builtin:tiny"},
            "adapter": {"type": "lora", "name_or_path": str(tmp_path)},
            "data": {"train": ["x"]},
            "training": {"output_dir": "runs/x"},
        }
    )
    with pytest.raises(ModelError) as error:
        check_all_folders(run)
    assert error.value.code == "model.adapter_missing"
