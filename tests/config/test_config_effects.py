"""Every key has an effect: some code outside the config room reads it, from something called like its section."""

from __future__ import annotations

import ast
from pathlib import Path

from halftune.config.shape import walk
from halftune.config.tree import dotted

SOURCE = Path(__file__).resolve().parents[2] / "src" / "halftune"
# The tag of a union decides the class of its section, which code may ask for with isinstance. Roles are read in a loop.
TAGS = {"adapter.type", "method.type", *(f"model.tokens.special.{role}" for role in ("bos", "eos", "pad"))}
TAGS |= {f"method.teacher{key}" for key in ("", ".revision", ".quantization")}  # read by Method.teacher_model
# Loads the recipes that a recipe builds on; the verbs ask it.
READER = "recipe_facts.py"
# Further names under which code holds a section.
ALIASES = {"", "config", "run"}, {"section", "source"}


def attributes_read() -> dict[str, set[str]]:
    """Attribute name → the names that it is read from (``training.seed`` → seed: {training}), outside config/."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] == "config" and path.name != READER:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = node.value
                name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
                found.setdefault(node.attr, set()).add(name)
    return found


def test_every_key_is_read_by_code() -> None:
    read = attributes_read()
    whole, sections = ALIASES
    unread = set()
    for path, _, _, _ in walk():
        names = [part for part in path if isinstance(part, str)]
        holders = {names[-2], *sections} if len(names) > 1 else whole
        if not read.get(names[-1], set()) & holders:
            unread.add(".".join(names))
    assert not sorted(unread - TAGS), f"no code outside config/ reads: {', '.join(sorted(unread - TAGS))}"


def test_it_would_notice() -> None:
    read = attributes_read()
    assert "training" in read["learning_rate"]
    assert "no_such_key" not in read
    assert dotted(("data", "train", 0, "path")) == "data.train[0].path"
