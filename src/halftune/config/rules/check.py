"""Checks a configuration by all rules."""

from __future__ import annotations

from halftune.config.rules import files, keys, methods  # noqa: F401  (their rules enter RULES)
from halftune.config.rules.rule import RULES, Context, Violation
from halftune.config.run import RunConfig
from halftune.config.tree import KeyPath, related


def check(run: RunConfig, context: Context, broken: set[KeyPath]) -> list[Violation]:
    """Return the violations of all rules. Rules that read a key in ``broken`` are skipped, unless only an entry of a
    list is broken."""
    findings: list[Violation] = []
    for rule in RULES:
        if not any(_unreadable(read, path) for read in rule.reads for path in broken):
            findings += (found._replace(code=found.code or rule.code) for found in rule.check(run, context))
    return [finding for finding in findings if not any(related(finding.key, path) for path in broken)]


def _unreadable(read: KeyPath, broken: KeyPath) -> bool:
    """Whether a rule cannot read a key because a key on the way to it, or a section below it, is broken."""
    in_list = any(isinstance(part, int) for part in broken)
    return related(read, broken) and (len(broken) <= len(read) or not in_list)
