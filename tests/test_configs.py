"""Every shipped recipe loads, passes every check and is planned on machines that most people have."""

from __future__ import annotations

from pathlib import Path

import pytest

from halftune.config.load import load_config
from halftune.config.model_facts import ModelFacts, read_model_facts
from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.plan import explain, resolve

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
MACHINES = ("cpu", "t4", "a100", "h200")
