"""A run's live state with those parts only that a test needs."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import torch

from halftune.train.checkpoint.run_inputs import UNCHANGED
from halftune.train.state import TrainState


def live_state(**parts: Any) -> TrainState:
    """A state of 20 steps on a CPU; what is neither given nor has a default is None."""
    common = {"device": torch.device("cpu"), "is_main": True, "total_steps": 20, "steps_per_epoch": 10}
    nothing = {one.name: None for one in fields(TrainState) if one.default is MISSING}
    return TrainState(**{**nothing, **common, "changes": UNCHANGED, "inputs": {}, **parts})  # type: ignore[arg-type]
