"""Every bad input that is tried: tests run this table, and docs/reference/errors.md is made from it."""

from __future__ import annotations

from bad_inputs import configurations, data, models, runs
from bad_inputs.case import Case

GROUPS: dict[str, tuple[Case, ...]] = {
    "The recipe and the command line": configurations.CASES,
    "Data": data.CASES,
    "Models, tokenizers and adapters": models.CASES,
    "Run folders, `chat` and `export`": runs.CASES,
}
CASES = tuple(case for cases in GROUPS.values() for case in cases)
