"""The config.json of a published model."""

from __future__ import annotations

import json
from typing import Any

from halftune.config.facts.published import published_config

_FILE = published_config("Qwen/Qwen2.5-0.5B")
assert _FILE is not None, "in the catalogue"
QWEN2_5_0_5B: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
