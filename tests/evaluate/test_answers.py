"""Greedy answers in batches are those of one prompt at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import a_model, checkpoint, plan, section

from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ModelError
from halftune.evaluate import answers
from halftune.evaluate.answers import answer, batches
from halftune.evaluate.rows import Question
from halftune.model.generate import generate_reply
from halftune.model.load.load import load_model
from halftune.model.tokenizer.tokenizer import load_tokenizer

TEXTS = ["hello", "What is len?", "Write a long list of numbers, please: 1, 2, 3, 4, 5, 6, 7", "x"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = checkpoint(tmp_path_factory.mktemp("base") / "model", vocab_size=4096, initializer_range=0.5)
    return load_model(section(folder), plan(), for_training=False), load_tokenizer(section("builtin:qwen2-tiny"))


def asked(tokenizer: Any) -> list[Question]:
    found = []
    for text in TEXTS:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        found.append(Question(("a.jsonl", "line", 1), np.array(ids, np.int32), messages, ""))
    return found


def test_batches_answer_as_single_prompts_do(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    settings = GenerationSection(max_new_tokens=12)
    alone = [generate_reply(model, tokenizer, one.text, settings, plan()) for one in asked(tokenizer)]
    assert answer(model, tokenizer, asked(tokenizer), plan(), max_new_tokens=12) == alone
    assert len(set(alone)) > 1


def test_a_batch_that_does_not_fit_is_halved(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    whole, sizes = answers.generate_answers, []

    def limited(causal: Any, prompts: Any, **settings: Any) -> Any:
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise torch.OutOfMemoryError
        return whole(causal, prompts, **settings)

    expected = answer(model, tokenizer, asked(tokenizer), plan(), max_new_tokens=4)
    monkeypatch.setattr(answers, "generate_answers", limited)
    assert answer(model, tokenizer, asked(tokenizer), plan(), max_new_tokens=4) == expected
    assert sizes == [4, 2, 1, 1, 2, 1, 1]


def test_prompts_without_room_are_refused(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    room = model.config.max_position_embeddings
    long = Question(("a", "line", 1), np.zeros(room, np.int32), "", "")
    with pytest.raises(ModelError) as error:
        answer(model, tokenizer, [long], plan(), max_new_tokens=4)
    assert error.value.code == "infer.conversation_too_long"
    model.config.max_position_embeddings = len(asked(tokenizer)[0].ids) + 2
    try:
        short = answer(model, tokenizer, asked(tokenizer)[:1], plan(), max_new_tokens=12)
    finally:
        model.config.max_position_embeddings = room
    assert short == answer(model, tokenizer, asked(tokenizer)[:1], plan(), max_new_tokens=2)


def test_a_long_prompt_cuts_no_other_answer(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    room, questions = model.config.max_position_embeddings, asked(tokenizer)
    settings = {"plan": plan(), "max_new_tokens": 12}
    alone = [answer(model, tokenizer, [one], **settings)[0] for one in questions]
    model.config.max_position_embeddings = max(len(one.ids) for one in questions) + 2
    try:
        together = answer(model, tokenizer, questions, **settings)
    finally:
        model.config.max_position_embeddings = room
    longest = max(range(len(questions)), key=lambda place: len(questions[place].ids))
    assert together[longest] != alone[longest]  # cut
    assert [*together[:longest], *together[longest + 1 :]] == [*alone[:longest], *alone[longest + 1 :]]


def test_a_model_that_cannot_generate(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    monkeypatch.setattr(type(model), "can_generate", classmethod(lambda _: False))
    with pytest.raises(ModelError) as error:
        answer(model, loaded[1], asked(loaded[1]), plan(), max_new_tokens=4)
    assert error.value.code == "evaluate.no_generation"


def test_batches_hold_like_lengths() -> None:
    found = batches([5, 100, 7, 90, 6], 10, tokens=220)
    assert found == [[1, 3], [2, 4, 0]]
    assert batches([500, 1], 10, tokens=100) == [[0], [1]]
    assert batches([5, 100, 7, 90, 95], 10, tokens=220, room=100) == [[1], [4], [3, 2], [0]]
