"""What accelerate's default config puts into the environment reaches no run."""

from __future__ import annotations

import os

import pytest
from accelerate.utils import DistributedType

from halftune.train.parallel.processes import make_accelerator


def test_a_stray_config_changes_nothing_and_is_named(
    recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stray = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
    }
    for name, value in stray.items():
        monkeypatch.setenv(name, value)
    accelerator = make_accelerator(recipe()[1])
    assert not set(stray) & set(os.environ)
    assert accelerator.distributed_type == DistributedType.NO
    assert accelerator.mixed_precision == "no"
    assert accelerator.gradient_accumulation_steps == 1
    named = [record.getMessage() for record in caplog.records]
    for name in ("ACCELERATE_MIXED_PRECISION=bf16", "ACCELERATE_DYNAMO_BACKEND=INDUCTOR", "ACCELERATE_USE_FSDP=true"):
        assert any(name in message for message in named)
