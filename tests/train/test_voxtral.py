"""Voxtral beside mistral-common, its reference: ids and labels of conversations with sounds, and features."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_audio import fed, recipe
from tiny_audio import TEKKEN_AUDIO, audio_model, write_rows
from tiny_tekken import AUDIO, SPECIAL, write_tekken
from transformers import AutoFeatureExtractor, VoxtralProcessor

from halftune.data.store import NO_LABEL
from halftune.model.tokenizer.tokenizer import load_tokenizer

V13 = (*SPECIAL, *AUDIO[len(SPECIAL) :])
SHORT, LONG = "0.9.wav", "2.3.wav"  # of windows of two seconds
# Roles and texts; <audio> takes the next sound.
CONVERSATIONS: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "before": ([("user", "<audio>What is it?"), ("assistant", "A bird.")], [SHORT]),
    "after": ([("user", "What is this? \n<audio>"), ("assistant", "é日 12")], [LONG]),
    "alone": ([("user", "<audio>"), ("assistant", "A bird.")], [SHORT]),
    "two": ([("user", "<audio>Is it <audio> here?"), ("assistant", "No.\n")], [SHORT, LONG]),
    "side": ([("user", "<audio><audio> Which?"), ("assistant", "The first.")], [LONG, SHORT]),
    "turns": (
        [("user", "<audio>What?"), ("assistant", "A bird."), ("user", "And <audio>?"), ("assistant", "\nA cat.")],
        [SHORT, SHORT],
    ),
    "system": ([("system", " Be brief. "), ("user", "<audio>What?"), ("assistant", "A bird.")], [SHORT]),
    "text": ([("system", "Be brief."), ("user", "What is red?"), ("assistant", "A square.")], []),
}


def row_of(name: str) -> dict[str, Any]:
    turns, sounds = CONVERSATIONS[name]
    return {"messages": [{"role": role, "content": text} for role, text in turns], "audios": list(sounds)}


def parts_of(row: dict[str, Any], named: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a row with parts as their content; ``named`` makes that of a sound, by its file."""
    waiting, found = iter(row["audios"]), []
    for turn in row["messages"]:
        pieces = [one for one in re.split("(<audio>)", turn["content"]) if one]
        parts = [named(next(waiting)) if one == "<audio>" else {"type": "text", "text": one} for one in pieces]
        found.append({**turn, "content": parts if "<audio>" in pieces else turn["content"]})
    return found


def reference(module: str) -> Any:
    """A module of mistral-common; skips where it is not installed."""
    return pytest.importorskip(f"mistral_common.{module}", reason="mistral-common is not installed")


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_and_labels_are_those_of_mistral_common(name: str, tmp_path: Path) -> None:
    asked, modes = reference("protocol.instruct.request"), reference("protocol.instruct.validator").ValidationMode
    tokenizers = reference("tokens.tokenizers.mistral")
    write_rows(tmp_path, [row_of(name)])
    if name == "system":  # beside a sound, mistral-common takes none before version 13
        write_tekken(audio_model(tmp_path / "model", "voxtral"), V13, "v13", audio=TEKKEN_AUDIO)
    loaded, plan = recipe(tmp_path, "voxtral", data={"max_length": 512})
    segment = fed(loaded, plan).split.example(0).segments[0]
    messages = parts_of(row_of(name), lambda file: {"type": "audio_url", "audio_url": {"url": str(tmp_path / file)}})

    def encoded(count: int) -> list[int]:
        mode = modes.finetuning if count % 2 == len(messages) % 2 else modes.test
        own = tokenizers.MistralTokenizer.from_file(str(tmp_path / "model" / "tekken.json"), mode=mode)
        return own.encode_chat_completion(asked.ChatCompletionRequest.from_openai(messages[:count])).tokens

    expected = encoded(len(messages))
    assert segment.input_ids.tolist() == expected
    trained = [NO_LABEL] * len(expected)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = len(encoded(index)), len(encoded(index + 1))
            trained[start:end] = expected[start:end]
    assert segment.labels.tolist() == trained


def text_of(folder: Path, row: dict[str, Any]) -> str:
    """The tokens of a row as text; ``~`` stands for a window of two seconds."""
    write_rows(folder, [row])
    loaded, plan = recipe(folder, "voxtral", data={"max_length": 512})
    segment = fed(loaded, plan).split.example(0).segments[0]
    ids = segment.input_ids.tolist()
    assert segment.labels[ids.index(AUDIO.index("[AUDIO]"))] == NO_LABEL
    return str(load_tokenizer(loaded.run.model).decode(ids)).replace("[AUDIO]" * 25, "~")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("two", "<s>[INST][BEGIN_AUDIO]~Is it [BEGIN_AUDIO]~~ here?[/INST]No.\n</s>"),
        ("after", "<s>[INST]What is this? \n[BEGIN_AUDIO]~~[/INST]é日 12</s>"),
        ("system", "<s>[SYSTEM_PROMPT] Be brief. [/SYSTEM_PROMPT][INST][BEGIN_AUDIO]~What?[/INST]A bird.</s>"),
    ],
)
def test_sounds_stand_where_the_row_has_them(name: str, text: str, tmp_path: Path) -> None:
    assert text_of(tmp_path, row_of(name)) == text


OWN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p['type'] in ['input_audio', 'audio_url'] %}[AUDIO]{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("generated", [False, True])
def test_a_template_of_mistral_common_places_sounds(generated: bool, tmp_path: Path) -> None:
    """It takes OpenAI's parts; one as it generates, and a short one of the same kind."""
    folder, template = audio_model(tmp_path / "model", "voxtral"), OWN
    if generated:
        template = reference("integrations.chat_templates.chat_templates").convert_tokenizer_to_chat_template(
            folder / "tekken.json"
        )
    (folder / "chat_template.jinja").write_text(template)
    assert text_of(tmp_path, row_of("turns")) == (
        "<s>[INST][BEGIN_AUDIO]~What?[/INST]A bird.</s>[INST]And [BEGIN_AUDIO]~?[/INST]\nA cat.</s>"
    )


@pytest.mark.parametrize("name", ["before", "two"])
def test_a_prompt_and_its_features_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    """With windows of 30 seconds, as released: 375 tokens of 3,000 frames."""
    reference("tokens.tokenizers.mistral")
    backend: Any = import_module("transformers.tokenization_mistral_common").MistralCommonBackend
    model = audio_model(tmp_path / "model", "voxtral")
    for file, key in (("tekken.json", "chunk_length_s"), ("preprocessor_config.json", "chunk_length")):
        content = json.loads((model / file).read_text())
        content.get("audio", content)[key] = 30
        (model / file).write_text(json.dumps(content))
    row = row_of(name)
    row["audios"] = [f"{30 * index + 1.5}.wav" for index in range(len(row["audios"]))]
    write_rows(tmp_path, [row])
    loaded, plan = recipe(tmp_path, "voxtral", data={"max_length": 2048})
    feed = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    own: Any = VoxtralProcessor(AutoFeatureExtractor.from_pretrained(model), backend.from_pretrained(model))
    asked = parts_of(row, lambda file: {"type": "audio", "path": str(tmp_path / file)})[:1]
    made = own.apply_chat_template(asked)
    length = made["input_ids"].shape[1]
    assert torch.equal(batch.tokens["input_ids"][:, :length], made["input_ids"])
    assert (made["input_ids"] == own.audio_token_id).sum() == 375 * len(made["input_features"])
    assert torch.equal(cast(torch.Tensor, batch.extras["input_features"]), made["input_features"])
