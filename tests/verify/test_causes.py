"""What is known to cause a finding: every entry has its fields, and a code that a report can have."""

from __future__ import annotations

import re
from pathlib import Path

from halftune.verify import processors, report, weights
from halftune.verify.report import _causes


def test_every_cause_belongs_to_a_finding() -> None:
    sources = "".join(Path(module.__file__ or "").read_text() for module in (processors, report, weights))
    codes = set(re.findall(r'"((?:tokens|stops|weights|processor)\.[a-z_]+)"', sources))
    for one in _causes()["causes"]:
        assert {"code", "text", "remedy"} <= one.keys() <= {"code", "kind", "text", "remedy", "source"}, one
        assert one["code"] in codes
        assert one.get("kind", "server") in ("folder", "adapter", "server", "gguf")
