"""Pairs and prompts with videos: DPO by its formula on transformers' own model, and answers of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from media_runs import fed
from test_media_answers import BAD, BETA, GOOD, check, model_of, said
from test_media_rollouts import assert_answers, method
from test_video import given, recipe
from tiny_video import KINDS, write_video
from torch.nn.functional import logsigmoid

from halftune.methods import AdapterOff, make_method
from halftune.model.policy.policy import PolicyModel

ASKED = [("<video>What moves?", ["a.gif"]), ("<video>And <video>?", ["b.gif", "a.gif"]), ("What is red?", [])]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    write_video(folder / "a.gif")
    write_video(folder / "b.gif", 7, (33, 47))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("kind", "packing"), [("qwen2_5_vl", True), ("qwen2_5_vl", False), ("qwen3_vl", True)])
def test_dpo_is_its_formula_on_transformers_own_model(
    kind: str, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, [{"prompt": text, "chosen": GOOD, "rejected": BAD, "videos": films} for text, films in ASKED])
    data = {"packing": packing, "max_length": 512}
    loaded, plan = recipe(tmp_path, kind, data=data, method={"type": "dpo", "beta": BETA})
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    assert ("seq_idx" in batch.tokens) == packing
    model = model_of(loaded, plan)

    def of_processor(text: str, films: list[str], answer: str) -> tuple[dict[str, torch.Tensor], int]:
        row = {"messages": [said("user", text), said("assistant", answer)], "videos": films}
        asked = given(kind, {**row, "messages": row["messages"][:1]}, images, tmp_path, monkeypatch, prompt=True)
        inputs = dict(given(kind, row, images, tmp_path, monkeypatch))
        inputs.pop("video_metadata", None)
        return {name: torch.as_tensor(one) for name, one in inputs.items()}, len(asked["input_ids"][0])

    def known(inputs: dict[str, torch.Tensor], start: int) -> torch.Tensor:
        dtype, ids = next(model.parameters()).dtype, inputs["input_ids"]
        cast = {name: one.to(dtype) if name == "pixel_values_videos" else one for name, one in inputs.items()}
        logits = model(**cast, use_cache=False).logits
        end = start + int((ids[0, start:] == images._own.tokenizer.eos_token_id).nonzero()[0]) + 1
        return logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[start - 1 : end - 1, 0].sum()

    def ratio(inputs: dict[str, torch.Tensor], start: int) -> torch.Tensor:
        with torch.no_grad(), model.disable_adapter():
            before = known(inputs, start)
        return known(inputs, start) - before

    pairs = [[of_processor(text, films, answer) for answer in (GOOD, BAD)] for text, films in ASKED]
    for index, pair in enumerate(pairs):
        for segment, (inputs, _) in zip(feed.split.example(index).segments, pair, strict=True):
            assert segment.input_ids.tolist() == inputs["input_ids"][0].tolist()

    def wanted() -> torch.Tensor:
        return -logsigmoid(BETA * torch.stack([ratio(*good) - ratio(*bad) for good, bad in pairs])).sum()

    own = make_method(loaded.run.method)
    policy = PolicyModel(model)
    check(lambda batch: own.loss(policy, batch, AdapterOff(policy)).total, batch, model, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_a_batch_are_those_of_each_prompt_alone(kind: str, tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": text, "videos": films} for text, films in ASKED])
    assert_answers(tmp_path, *fed(*recipe(tmp_path, kind, method=method(tmp_path))))
