"""alpaca rows with a prompt in place of the chat template: ``data.train[].prompt``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from halftune.config.prompts import PromptRow, find_prompt
from halftune.data.formats import fields
from halftune.data.formats.conversation import Format, Prompted, RowDropped

NAME = "prompted"


def prompted(prompt: str) -> Format:
    """The format of a source with a prompt, given as in the config.

    Raises:
        DataError: there is no such prompt.
    """
    return Format(NAME, ("instruction", "output"), ("input",), partial(_read, find_prompt(prompt)))


def _read(prompt: PromptRow, row: Mapping[str, Any]) -> Prompted:
    fields.refuse_media(row)
    said = {name: fields.text(row, name) for name in ("instruction", "input")}
    answer = fields.answer(row, "output")
    if not said["instruction"].strip() and not said["input"].strip():
        raise RowDropped("the instruction is empty")
    return Prompted(prompt.with_input if said["input"] else prompt.without_input, said, answer)
