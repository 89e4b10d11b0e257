"""Prompts by name for rows with an instruction, an optional input and an answer: ``data.train[].prompt``."""

from __future__ import annotations

from dataclasses import dataclass

from halftune.core.errors import DataError


@dataclass(frozen=True)
class PromptRow:
    """The text before an answer; ``{instruction}`` and ``{input}`` stand for the row's columns.

    Attributes:
        with_input: for rows with an input.
        without_input: for the others.
        source: where the text comes from.
    """

    with_input: str
    without_input: str
    source: str


_ALPACA = "https://github.com/tatsu-lab/stanford_alpaca"
_AXOLOTL = "https://github.com/axolotl-ai-cloud/axolotl"
_WITH = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_WITHOUT = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
PROMPTS = {
    "alpaca": PromptRow(
        f"{_WITH}\n\n### Instruction:\n{{instruction}}\n\n### Input:\n{{input}}\n\n### Response:\n",
        f"{_WITHOUT}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n",
        _ALPACA,
    ),
    "alpaca_chat": PromptRow(
        f"SYSTEM: {_WITH}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:",
        f"SYSTEM: {_WITHOUT}\nUSER: {{instruction}}\nASSISTANT:",
        _AXOLOTL,
    ),
    "alpaca_chatml": PromptRow(
        f"<|im_start|>system\n{_WITH}<|im_end|>\n<|im_start|>user\n{{instruction}}\n{{input}}<|im_end|>\n"
        "<|im_start|>assistant\n",
        f"<|im_start|>system\n{_WITHOUT}<|im_end|>\n<|im_start|>user\n{{instruction}}<|im_end|>\n"
        "<|im_start|>assistant\n",
        _AXOLOTL,
    ),
    "alpaca_phi": PromptRow(
        f"<|system|>\n{_WITH}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
        f"<|system|>\n{_WITHOUT}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
        _AXOLOTL,
    ),
}


def find_prompt(text: str) -> PromptRow:
    """The prompt of a name, or of a text with ``{instruction}``.

    Raises:
        DataError: it is neither.
    """
    if text in PROMPTS:
        return PROMPTS[text]
    if "{instruction}" not in text:
        raise DataError(
            f"unknown prompt {text!r}",
            where="data.train[].prompt",
            remedy=f"use {', '.join(PROMPTS)}, or a text with {{instruction}}",
            code="data.unknown_prompt",
        )
    return PromptRow(text, text, "")
