"""Checks a configuration against every rule."""

from __future__ import annotations

from halftune.config.rules import distributed, files, keys  # noqa: F401  (their rules enter RULES)
from halftune.config.rules.rule import RULES, Context, Violation
from halftune.config.run import RunConfig
from halftune.config.shape import KeyPath, related


def check(run: RunConfig, context: Context, broken: set[KeyPath]) -> list[Violation]:
    """Return the violations of all rules. Rules that read a key in ``broken`` are skipped, unless only an entry of a
    list is broken."""
    findings: list[Violation] = []
    for rule in RULES:
        if not any(
            related(read, path) and (len(path) <= len(read) or _in_section(path))
            for read in rule.reads
            for path in broken
        ):
            findings += (found._replace(code=found.code or rule.code) for found in rule.check(run, context))
    return [finding for finding in findings if not any(related(finding.key, path) for path in broken)]


def _in_section(path: KeyPath) -> bool:
    return not any(isinstance(part, int) for part in path)
