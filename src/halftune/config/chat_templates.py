"""Chat templates by name, from ``chat_templates.yaml``: how each format frames its turns.

``model/named_templates.py`` writes the Jinja. In a frame, ``{}`` is the text of the message; ``{bos}`` and
``{eos}`` are tokens of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from halftune.core.packaged import read_yaml

ROLES = ("user", "assistant", "system")


@dataclass(frozen=True)
class TemplateRow:
    """One chat format.

    Attributes:
        name: as in ``model.chat_template``.
        user, assistant: frames of a turn. The generation prompt is the assistant's frame up to ``{}``.
        source: hub id or address where the authors document the format.
        system: frame of a system turn, or of the system text within the first user turn; empty: refused.
        merged: whether the system text is part of the first user turn.
        aliases: other names, as LLaMA-Factory and axolotl spell them.
        tokens: tokens that the tokenizer must have.
        end: the token that ends an answer; ``{eos}``: the tokenizer's own.
        start: text before the first turn.
        prompt: the generation prompt where it is shorter than the assistant's header.
        last: what follows the last answer, in place of the end of the assistant's frame.
        default_system: system text of a conversation without one.
        trim: whether texts are stripped of surrounding white space: none, all, those of turns or of the system only.
            ``model.chat_template_kwargs: {trim: false, trim_system: false}`` keeps it; ``{trim_answers: true}``
            strips spaces at the end of answers in any format.
        thinking: whether reasoning is written, as ``<think>`` block of the answers after the last question.
        empty_think: whether the last answer has a ``<think>`` block also without reasoning.
        audio: what stands for a sound; empty: nothing.
        tools: how tools are written; empty: conversations with tools are refused.
    """

    name: str
    user: str
    assistant: str
    source: str
    system: str = ""
    merged: bool = False
    aliases: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    end: str = "{eos}"
    start: str = ""
    prompt: str | None = None
    last: str | None = None
    default_system: str | None = None
    trim: Literal["", "all", "turns", "system"] = ""
    thinking: bool = False
    empty_think: bool = False
    audio: str = ""
    tools: Literal["", "chatml", "qwen"] = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)


@cache
def templates() -> tuple[TemplateRow, ...]:
    """Every format of ``chat_templates.yaml``."""
    rows = read_yaml("halftune.config", "chat_templates.yaml")
    return tuple(_row(name, fields) for name, fields in rows.items() if not name.startswith("_"))


def _row(name: str, fields: dict[str, Any]) -> TemplateRow:
    turn, roles = fields.pop("turn", ""), fields.pop("roles", ROLES)
    frames = {ours: turn.replace("ROLE", theirs) for ours, theirs in zip(ROLES, roles, strict=False) if turn}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return TemplateRow(name, **{**frames, **given})


# Formats that a base model's vocabulary may stand for, most specific first. Their tokens occur in no other vocabulary.
_BY_VOCABULARY = (
    "phi4", "chatml", "llama3", "llama4", "gemma3", "granite", "deepseek_v3", "command_r", "jamba", "voxtral",
)  # fmt: skip


@cache
def template_names() -> dict[str, TemplateRow]:
    """Every name and alias, with its row."""
    return {name: row for row in templates() for name in row.names}


def find_template(name: str) -> TemplateRow | None:
    """The row of a name or alias; None if there is none."""
    return template_names().get(name)


def template_for(vocabulary: Iterable[str]) -> TemplateRow | None:
    """The format whose tokens a vocabulary has; None if there is none."""
    known = set(vocabulary)
    rows = map(template_names().__getitem__, _BY_VOCABULARY)
    return next((row for row in rows if known.issuperset(row.tokens)), None)
