"""Every key has an effect: some code outside the config room reads it."""

from __future__ import annotations

import ast
from pathlib import Path

from halftune.config.shape import dotted, walk

SOURCE = Path(__file__).resolve().parents[2] / "src" / "halftune"
# Read by a name that only pydantic sees: the tag of a union decides the class, which code asks for with isinstance.
TAGS = {"adapter.type", "method.type"}


def attributes_read() -> dict[str, set[str]]:
    """Attribute name → the names that it is read from (``training.seed`` → seed: {training}), outside config/."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = node.value
                name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
                found.setdefault(node.attr, set()).add(name)
    return found


def test_every_key_is_read_by_code() -> None:
    read = attributes_read()
    unread = sorted({dotted(path).replace("[0]", "") for path, _, _, _ in walk() if str(path[-1]) not in read} - TAGS)
    assert not unread, f"no code outside config/ reads: {', '.join(unread)}"


def test_general_names_are_read_from_their_section() -> None:
    """Names such as ``path`` are attributes of many things; these are read from something called like it."""
    read = attributes_read()
    for name, holders in {
        "path": {"section", "source"},
        "split": {"section", "source", "packing"},
        "format": {"section", "source"},
        "columns": {"section", "source"},
        "enabled": {"packing"},
        "linear": {"section", "attention"},
        "weight": {"section", "source"},
        "revision": {"model", "section"},
        "system": {"data"},
    }.items():
        assert read.get(name, set()) & holders, f"{name} is not read from {' or '.join(sorted(holders))}"
