"""Reads a Modelfile and renders its template as Ollama does: what these files use of Go's text/template.

By the sources of Ollama, 2026: ``parser/parser.go`` (quotes, characters that are dropped), ``template/template.go``
(``collate``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Node = str | tuple[str, ...] | list[Any]


def read_modelfile(text: str) -> list[tuple[str, str]]:
    """The commands: name (of a parameter: its own) and value."""
    found, words = list[tuple[str, str]](), ""
    kept = "".join(one for one in text if one.isprintable() or one in "\n\t")
    for line in kept.splitlines(keepends=True):
        if not words and (not line.strip() or line.startswith("#")):
            continue
        words += line
        name, _, value = words.partition(" ")
        if name == "PARAMETER":
            name, _, value = value.partition(" ")
        if (plain := _unquoted(value.strip())) is not None:
            found.append((name, plain))
            words = ""
    assert not words, "a quote is not closed"
    return found


def _unquoted(value: str) -> str | None:
    """The text in quotes; None: they are not closed yet."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            closed = len(value) >= 2 * len(quotes) and value.endswith(quotes)
            return value[len(quotes) : -len(quotes)] if closed else None
    return value


def execute(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What Ollama renders of a conversation."""
    system = "\n\n".join(one["content"] for one in messages if one["role"] == "system")
    joined: list[dict[str, str]] = []
    for one in messages:
        if joined and joined[-1]["role"] == one["role"]:
            joined[-1]["content"] += "\n\n" + one["content"]
        else:
            joined.append(dict(one))
    pieces = re.split(r"\{\{ (.*?) \}\}", template, flags=re.S)
    assert not any("{{" in text for text in pieces[::2]), "an action that Go does not read"
    return "".join(_run(iter(enumerate(pieces)), {".System": system, ".Messages": joined}, live=True))


def _run(pieces: Iterator[tuple[int, str]], values: Mapping[str, Any], *, live: bool) -> list[str]:
    """The texts up to the end of a block."""
    made: list[str] = []
    for at, piece in pieces:
        if at % 2 == 0:
            made += [piece] * live
        elif piece == "end":
            return made
        elif piece.startswith("range "):
            block = _block(pieces)
            for message in values[piece.removeprefix("range ")]:
                inside = {".Role": message["role"], ".Content": message["content"]}
                made += _run(iter(block), inside, live=live)
        elif piece.startswith("if "):
            made += _if(pieces, piece, values, live=live)
        elif piece.startswith('"'):
            made += [json.loads(piece)] * live
        else:
            made += [values[piece]] * live
    return made


def _block(pieces: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    block, depth = list[tuple[int, str]](), 1
    for at, piece in pieces:
        depth += at % 2 and (piece.startswith(("if ", "range ")) - (piece == "end"))
        if depth == 0:
            return block
        block.append((at, piece))
    raise AssertionError("a block is not closed")


def _if(pieces: Iterator[tuple[int, str]], head: str, values: Mapping[str, Any], *, live: bool) -> list[str]:
    branches: list[tuple[str, list[tuple[int, str]]]] = [(head, [])]
    depth = 0
    for at, piece in _block(pieces):
        if at % 2 and depth == 0 and piece.startswith("else"):
            branches.append((piece.removeprefix("else").strip(), []))
            continue
        depth += at % 2 and (piece.startswith(("if ", "range ")) - (piece == "end"))
        branches[-1][1].append((at, piece))
    for condition, block in branches:
        if not condition or _holds(condition.removeprefix("if "), values):
            return _run(iter(block), values, live=live)
    return []


def _holds(condition: str, values: Mapping[str, Any]) -> bool:
    if condition.startswith("eq "):
        _, name, text = condition.split(" ")
        return values[name] == json.loads(text)
    return bool(values[condition])
