"""What is known to cause a finding: every entry has its fields, and a code that a report can have."""

from __future__ import annotations

import re
from pathlib import Path

import halftune.verify
from halftune.verify.rounding import known_causes


def test_every_cause_belongs_to_a_finding() -> None:
    sources = "".join(one.read_text() for one in Path(halftune.verify.__file__ or "").parent.rglob("*.py"))
    codes = set(re.findall(r'"((?:tokens|stops|weights|processor|base|chat)\.[a-z_]+)"', sources))
    for one in known_causes()["causes"]:
        assert {"code", "text", "remedy"} <= one.keys() <= {"code", "kind", "text", "remedy", "source"}, one
        assert one["code"] in codes
        assert one.get("kind", "server") in ("folder", "adapter", "server", "gguf")
