"""Chat templates and tokenizers that are broken by one change are named; those of halftune are sound."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halftune.certify.certificate import Line
from halftune.certify.conversations import conversations
from halftune.certify.headers import IN_ANSWER, OPENS_THOUGHT, OTHER_PROMPT
from halftune.certify.tokenizer import check_tokenizer
from halftune.certify.workbench import Workbench
from halftune.config.facts.model import read_model_facts
from halftune.config.sections.model import ModelSection
from halftune.data.templates.features import SPLIT
from halftune.model.files.locate import locate

SOURCE = "builtin:qwen2-tiny"
KINDS = list(dict.fromkeys(kind for kind, _ in conversations()))
CALL, CALLS = "a tool call with text beside it", "two tool calls"
THOUGHT, LONG, TURNS = "<think> in the last of two answers", "long texts with a system message", "six turns"
TOOLS, REASONING = "tools with a system message", "reasoning in the last of two turns"
SAID = 'text(message) + "<|im_end|>'
PROMPT = '{{- "<|im_start|>assistant\\n" -}}{%- endif'
SHOWN = '{{- "<|im_start|>" + message.role +'
CASES: dict[str, tuple[str, str, str, list[str]]] = {
    "results dropped": ('text(message) + "\\n</tool', '"\\n</tool', "a tool message's text", [CALL, CALLS]),
    "results in an answer": ('{{- "<|im_start|>user" -}}', '{{- "<|im_start|>assistant" -}}', "header", [CALL, CALLS]),
    "parameters dropped": ("(tool | tojson)", "tool.function.name", "a parameter", [TOOLS, CALL, CALLS]),
    "one tool": ("for tool in tools", "for tool in tools[:1]", "a tool", [TOOLS, CALL, CALLS]),
    "no system with tools": ('{{- text(first) + "\\n\\n" -}}', "", "a system message's text", [TOOLS, CALL]),
    "answers cut": (SAID, SAID.replace("text(message)", "text(message)[:300]"), "an answer's text", [LONG]),
    "eight turns": ("for message in messages -%}", "for message in messages[:8] -%}", "a user message's", [TURNS]),
    "thought behind": (SAID, SAID.replace(" + ", ' + (message.reasoning_content or "") + '), "after", [REASONING]),
    "other prompt": (PROMPT, PROMPT.replace("assistant", "bot"), OTHER_PROMPT, KINDS[:4]),
    "a line more in the prompt": (PROMPT, PROMPT.replace("assistant\\n", "assistant\\n\\n"), OTHER_PROMPT, KINDS[:4]),
    "a space more in the prompt": (PROMPT, PROMPT.replace("assistant\\n", "assistant\\n "), OTHER_PROMPT, KINDS[:4]),
    "roles swapped": (SHOWN, SHOWN.replace(
        "message.role", '{"user": "assistant", "assistant": "user"}.get(message.role, message.role)'
    ), OTHER_PROMPT, KINDS[:4]),
    "system as answer": (SHOWN, SHOWN.replace(
        "message.role", '("assistant" if message.content.startswith("Say U") else message.role)'
    ), IN_ANSWER.format("user"), KINDS[:4]),
    "BOS twice": ("{%- macro", "{{ bos_token }}{{ bos_token }}{%- macro", "BOS", KINDS[:4]),
}  # fmt: skip


@pytest.fixture
def looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Line]]:
    """The lines about a copy of a builtin model's small files, of which some are changed."""
    monkeypatch.setattr("halftune.certify.conversations._TEXTS", ('Say {} & "so" <b>.',))

    def look(old: str = "", new: str = "", **files: dict[str, Any]) -> list[Line]:
        folder = tmp_path / "model"
        shutil.copytree(locate(ModelSection(name_or_path=SOURCE)), folder, ignore=shutil.ignore_patterns("*.safe*"))
        template = folder / "chat_template.jinja"
        text = template.read_text()
        assert old in text
        template.write_text(text.replace(old, new) if old else text)
        for name, values in files.items():
            path = folder / f"{name}.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
        section = ModelSection(name_or_path=str(folder))
        return list(check_tokenizer(Workbench(tmp_path, section, section), read_model_facts(section), folder))

    return look


def said(lines: list[Line], check: str, verdict: str) -> str:
    return "\n".join(line.evidence for line in lines if (line.check, line.verdict) == (check, verdict))


@pytest.mark.parametrize("name", CASES)
def test_a_template_with_one_fault_is_named_with_its_conversations(name: str, looked_at: Any) -> None:
    old, new, fault, kinds = CASES[name]
    found = looked_at(old, new, tokenizer_config={"bos_token": "<|im_start|>"})
    evidence = said(found, "template", "no")
    assert fault in evidence
    assert [kind for kind in KINDS if kind in evidence] == kinds


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (SAID, SAID.replace("text(message)", 'text(message).split("</think>")[-1]'), "<think>"),
        ("{%- if said -%}", "{%- if false -%}", "text beside a tool call"),
    ],
)
def test_what_published_templates_leave_out_on_purpose_is_noted(looked_at: Any, old: str, new: str, named: str) -> None:
    found = looked_at(old, new)
    assert named in said(found, "template", "note")
    assert not said(found, "template", "no")


def test_a_sound_folder(looked_at: Any) -> None:
    found = looked_at()
    assert [(line.check, line.verdict) for line in found] == [
        ("template", "yes"),
        ("template", "note"),
        ("tokenizer", "yes"),
    ]


def test_parallel_calls_that_are_split_and_a_thought_that_only_the_prompt_opens_are_noted(looked_at: Any) -> None:
    found = looked_at("for call in message.tool_calls", "for call in message.tool_calls[:1]")
    assert "parallel" in SPLIT
    assert "parallel tool calls" in said(found, "template", "note")
    assert not said(found, "template", "no")


def test_a_prompt_that_opens_a_thought_is_noted(looked_at: Any) -> None:
    found = looked_at(PROMPT, PROMPT.replace("assistant\\n", "assistant\\n<think>\\n"))
    assert OPENS_THOUGHT in said(found, "template", "note")
    assert not said(found, "template", "no")


@pytest.mark.parametrize(
    ("file", "values", "verdict", "named"),
    [
        ("config", {"vocab_size": 4000}, "no", "4,000"),
        ("generation_config", {"eos_token_id": 77}, "note", "(77)"),
        ("config", {"eos_token_id": 77}, "note", "(77)"),
        ("config", {"max_position_embeddings": 16}, "note", "16 positions"),
    ],
)
def test_a_tokenizer_that_is_not_the_models_is_named(
    file: str, values: dict[str, Any], verdict: str, named: str, looked_at: Any
) -> None:
    found = looked_at(**{file: values})
    assert named in said(found, "tokenizer", verdict)
    assert not said(found, "template", "no")
