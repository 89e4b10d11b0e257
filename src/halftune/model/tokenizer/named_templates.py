"""Writes the Jinja of a chat template by name, and gives it to a tokenizer that has its tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from halftune.config.chat_templates import TemplateRow, template_for
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.data.templates.render import WITHOUT_TOOLS
from halftune.model.files.builtin import chatml_template

log = get_logger(__name__)


@cache
def jinja_of(row: TemplateRow) -> str:
    """The Jinja source of a format: its frames as variables, then the turns."""
    if row.tools == "chatml":
        return chatml_template()
    header = row.assistant.partition("{}")[0]
    variables = {
        "start": _literal(row.start),
        "user": _frame(row.user),
        "assistant": _frame(row.assistant),
        "system": _frame(row.system) if row.system else "none",
        "prompt": _literal(header if row.prompt is None else row.prompt),
        "last": "none" if row.last is None else _literal(row.last),
        "default_system": "none" if row.default_system is None else _literal(row.default_system),
        "merged": _flag(row.merged),
        "trim": f"trim | default({_flag(row.trim in ('all', 'turns'))})",
        "trim_system": f"trim_system | default({_flag(row.trim in ('all', 'system'))})",
        "trim_answers": "trim_answers | default(false)",
        "audio": _literal(row.audio),
        "thinking": _flag(row.thinking),
        "empty_think": _flag(row.empty_think),
    }
    own = "".join(f'{{%- set {name} = {name}_token | default("", true) -%}}\n' for name in ("bos", "eos"))
    style = '{%- set tool_style = "qwen" -%}' if row.tools else WITHOUT_TOOLS
    sets = "".join(f"{{%- set {name} = {value} -%}}\n" for name, value in variables.items())
    return f"{own}{sets}{style}\n{_turns()}"


@cache
def _turns() -> str:
    return (Path(__file__).parent / "turns.jinja").read_text(encoding="utf-8")


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _frame(frame: str) -> str:
    """A list of the texts before and after the message."""
    before, _, after = frame.partition("{}")
    return f"[{_literal(before)}, {_literal(after)}]"


def _literal(text: str) -> str:
    """A Jinja expression for a text with ``{bos}`` and ``{eos}``."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("{bos}", '" ~ bos ~ "').replace("{eos}", '" ~ eos ~ "')


def use_template(tokenizer: PreTrainedTokenizerBase, row: TemplateRow) -> None:
    """Set the tokenizer's chat template, and its EOS where the format has an end token of its own.

    Raises:
        ModelError: the tokenizer lacks tokens of the format.
    """
    vocabulary = tokenizer.get_vocab()
    needed = (*row.tokens, *((row.end,) if row.end != "{eos}" else ()))
    missing = [token for token in dict.fromkeys(needed) if token not in vocabulary]
    if missing:
        raise ModelError(
            f"the {row.name} template requires tokens that the tokenizer lacks: {missing}",
            where="model.chat_template",
            remedy=f"set model.tokens: {{add: {json.dumps(missing, ensure_ascii=False)}}}, or choose another template",
            code="model.template_tokens_missing",
        )
    tokenizer.own_eos = tokenizer.eos_token  # type: ignore[attr-defined]  # what labels: text goes by
    if row.end != "{eos}":
        tokenizer.eos_token = row.end
    elif tokenizer.eos_token is None:
        raise ModelError(
            f"the {row.name} template ends answers with the EOS token, and the tokenizer has none",
            where="model.chat_template",
            remedy="set model.tokens: {special: {eos: TOKEN}}",
            code="model.template_tokens_missing",
        )
    tokenizer.chat_template = jinja_of(row)


def choose_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without chat template the format whose tokens its vocabulary has, if there is one.

    EOS stays: plain text of a base model still ends with it.
    """
    row = template_for(tokenizer.get_vocab())
    if row is not None:
        log.info("the tokenizer has no chat template: using %s, whose tokens it has", row.name)
        tokenizer.chat_template = jinja_of(row)
