"""The number of parameters in the plan: with the towers that a run loads."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import safe_open

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.hardware.catalogue import lookup
from halftune.model.files.builtin import materialize
from halftune.plan import resolve

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_share_that_is_trained_is_one_of_all_that_is_loaded() -> None:
    loaded = load_config(ROOT / "configs" / "tiny" / "vision_tiny.yaml", ["adapter={type: lora}"]).run
    plan = resolve(loaded, lookup("cpu"), read_model_facts(loaded.model))
    with safe_open(materialize("qwen2_5_vl-tiny") / "model.safetensors", "np") as file:
        stored = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118  not a dict
    assert plan.all_parameters.value == stored > plan.num_parameters.value
    share = f"{plan.num_trainable.value / stored:.2%}"
    assert share in re.findall(r"[\d.]+%", str(plan))
