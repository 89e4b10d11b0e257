"""The Modelfile: its template renders what the chat template renders, token for token, or there is none."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from go_template import execute, read_modelfile
from tiny_gguf import byte_level, sentence_piece
from tiny_model import checkpoint, finished_run

from halftune.config import chat_templates
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.export.gguf.ollama import Turns, find_turns, modelfile
from halftune.export.gguf.vocabulary import Vocabulary, read_vocabulary
from halftune.export.options import Options
from halftune.export.targets import export_target
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.named_templates import jinja_of

_SPEC = importlib.util.spec_from_file_location("ollama_templates", Path(__file__).parents[1] / "data" / "templates.py")
assert _SPEC is not None
assert _SPEC.loader is not None
templates = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(templates)

SMOLLM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are SmolLM{{2}} \"\"\"\u00a0<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LENGTH, NUMBERED = "{{ messages | length }}", "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"
DATED = "{% for m in messages %}{{ strftime_now('%d %b %Y') }}{{ m.content }}{% endfor %}"
UNUSED_DATE = "{% if tools %}{{ strftime_now('%d') }}{% endif %}" + templates.LLAMA3
CUT = "{% for m in messages[-3:] %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
OWN = {"smollm": SMOLLM, "length": LENGTH, "numbered": NUMBERED, "dated": DATED, "date": UNUSED_DATE, "cut": CUT}
TABLE = {
    **{name: text for name, text in vars(templates).items() if name.isupper() and isinstance(text, str)},
    **{row.name: jinja_of(row) for row in chat_templates.templates()},
    **OWN,
}
UNLIKE = {"MISTRAL_TOOLS", "MISTRAL_MOVES", "PARTS", "length", "numbered", "dated", "cut"}
"""Templates that move or drop messages, write the date, or read lists of parts."""
WITHOUT_SYSTEM = {"GEMMA", "MISTRAL", "PLAIN_USERS", "gemma", "orion", "xverse", "minicpm", "yuan"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, tuple[Any, Vocabulary]]:
    found = {"bytes": byte_level("qwen2"), "pieces": sentence_piece("always")}
    return {name: (one, read_vocabulary(one)) for name, one in found.items()}


def given(tokenizers: dict[str, tuple[Any, Vocabulary]], template: str, kind: str = "bytes") -> tuple[Any, Vocabulary]:
    tokenizer, words = tokenizers[kind]
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer, words


def conversations(*, system: bool) -> Iterator[list[dict[str, str]]]:
    turns = [("user", "One {{ x }}?"), ("assistant", 'It\'s "one".'), ("user", "a\n\nb"), ("assistant", "<b>")]
    talk = [{"role": role, "content": text} for role, text in (*turns, *turns, *turns[:1])]
    for before in ([], [{"role": "system", "content": "Say {{ it }}\n\nbriefly."}])[: 1 + system]:
        for count in range(1, len(talk) + 1, 2):
            yield [*before, *talk[:count]]


def found(tokenizer: Any, words: Vocabulary) -> tuple[Turns | None, str]:
    """The turns, or the code of what is said instead."""
    try:
        return find_turns(tokenizer, words, {}), ""
    except ModelError as error:
        return None, error.code


@pytest.mark.parametrize("name", TABLE)
def test_each_template_is_reproduced_or_named(name: str, tokenizers: dict[str, tuple[Any, Vocabulary]]) -> None:
    for kind in tokenizers:
        tokenizer, words = given(tokenizers, TABLE[name], kind)
        for add_bos in (False, True):
            turns, code = found(tokenizer, replace(words, add_bos=add_bos))
            if turns is None:
                assert code == "export.ollama_template"
                prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
                assert name in UNLIKE or (add_bos and not prompt.startswith(tokenizer.bos_token))
                continue
            assert name not in UNLIKE
            assert (turns.system is None) == (name in WITHOUT_SYSTEM)
            ((_, template),) = [
                one for one in read_modelfile(modelfile("m.gguf", turns, [], 8, {})) if one[0] == "TEMPLATE"
            ]
            for asked in conversations(system=name not in WITHOUT_SYSTEM):
                sent = tokenizer.bos_token * add_bos + execute(template, asked)
                rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
                assert sent == rendered
                assert tokenizer.encode(sent, add_special_tokens=False) == tokenizer.encode(
                    rendered, add_special_tokens=False
                )


def test_an_end_of_text_that_llama_cpp_adds_is_named(tokenizers: dict[str, tuple[Any, Vocabulary]]) -> None:
    tokenizer, words = given(tokenizers, templates.LLAMA3)
    with pytest.raises(ModelError) as caught:
        find_turns(tokenizer, replace(words, add_eos=True), {})
    assert caught.value.code == "export.ollama_template"


def test_the_template_has_the_variables_of_training(tokenizers: dict[str, tuple[Any, Vocabulary]]) -> None:
    tokenizer, words = given(tokenizers, "{{ mood }}" + templates.GENERATION)
    assert find_turns(tokenizer, words, {"mood": "calm"}).render([]).startswith("calm")


def test_a_turn_ends_where_training_ended_it(tokenizers: dict[str, tuple[Any, Vocabulary]]) -> None:
    """So that a reader finds the parts of a template where Ollama's own templates have them."""
    turn = "{{ '<|turn|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
    default = turn.replace("m.role", "'system'").replace("m.content", "'be kind'")
    first = "{% if messages[0].role != 'system' %}" + default + "{% endif %}"
    tokenizer, words = given(
        tokenizers, first + "{% for m in messages %}" + turn + "{% endfor %}{{ '<|turn|>assistant\n' }}"
    )
    assert find_turns(tokenizer, words, {}).go() == (
        "{{ if .System }}<|turn|>system\n{{ .System }}<|end|>\n{{ else }}<|turn|>system\nbe kind<|end|>\n{{ end }}"
        '{{ range .Messages }}{{ if eq .Role "user" }}<|turn|>user\n{{ .Content }}<|end|>\n'
        '{{ else if eq .Role "assistant" }}<|turn|>assistant\n{{ .Content }}<|end|>\n{{ end }}{{ end }}'
        "<|turn|>assistant\n"
    )


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7}, {}),  # transformers answers greedily
        ({"do_sample": False, "temperature": 0.7}, {"temperature": "0"}),
        (
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
            {"temperature": "0.7", "top_k": "20", "top_p": "0.8", "repeat_penalty": "1.1"},
        ),
        ({"do_sample": True, "temperature": "x", "top_k": True, "top_p": float("nan"), "min_p": 0.1}, {"min_p": "0.1"}),
    ],
)
def test_parameters(generation: dict[str, Any], expected: dict[str, str]) -> None:
    text = modelfile("my model.gguf", None, ["</s>", "\n"], 512, generation)
    found = read_modelfile(text)
    assert found[:3] == [("FROM", "./my model.gguf"), ("stop", "</s>"), ("stop", "\n")]
    assert found[-1] == ("num_ctx", "512")
    assert dict(found[3:-1]) == expected


@pytest.mark.parametrize("template", [None, NUMBERED])
def test_the_command_for_ollama_is_printed_only_if_it_is_right(
    tmp_path: Path, template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gguf")
    caplog.set_level("WARNING", get_logger("halftune").name)
    model: dict[str, Any] = {"name_or_path": str(checkpoint(tmp_path / "base", vocab_size=4096))}
    model |= {"tokenizer": "builtin:qwen2-tiny"}
    if template is not None:
        (tmp_path / "own.jinja").write_text(template)
        model |= {"chat_template": str(tmp_path / "own.jinja")}
    run = open_run(str(finished_run(tmp_path / "run", model["name_or_path"], model=model)))
    lines = export_target(run, Options(tmp_path / "a model", "gguf"))
    found = dict(read_modelfile((tmp_path / "a model" / "Modelfile").read_text()))
    assert any(line.startswith("ollama create a-model -f '") for line in lines) == (template is None)
    assert ("TEMPLATE" in found) == (template is None)
    assert ("export.ollama_template" in caplog.text) == (template is not None)
    assert found["FROM"] == "./a model-bf16.gguf"
