"""Images in rows, from the file to the loss: ids equal to the processor's, loss and gradients to transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_images import KINDS, ROWS, image_model, write_rows
from transformers import AutoModelForImageTextToText

from halftune.config.facts.images import IMAGE_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL
from halftune.hardware.catalogue import lookup
from halftune.methods import make_method
from halftune.model.adapters import attach_adapter
from halftune.model.load import load_model
from halftune.model.locate import images_of
from halftune.model.policy import PolicyModel
from halftune.model.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.train.feed import Feed
from halftune.train.setup import image_inputs


def recipe(folder: Path, kind: str, **changes: Any) -> tuple[Any, Plan]:
    model, rows = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        image_model(model, kind)
    data = {"train": str(rows if rows.exists() else write_rows(folder, ROWS)), "images": True, "group_by_length": False}
    tree = {
        "model": {"name_or_path": str(model)},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 2},
        "data": {**data, **changes.pop("data", {})},
        "training": {"output_dir": str(folder / "run"), "max_steps": 2, "per_device_train_batch_size": 3},
        "logging": {"progress": False},
        **changes,
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(folder / "recipe.yaml")
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))


def fed(loaded: Any, plan: Plan) -> tuple[Feed, Any]:
    config = loaded.run
    tokenizer = load_tokenizer(config.model)
    data = prepare(config, tokenizer, images=images_of(config))
    images = image_inputs(config, tokenizer)
    return Feed(data.train, config, plan.batch, make_method(config.method), 0, images=images), images


def test_the_table_is_tested() -> None:
    assert set(KINDS) == set(IMAGE_FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_processors(kind: str, tmp_path: Path) -> None:
    feed, images = fed(*recipe(tmp_path, kind))
    assert len(feed.split) == len(ROWS)
    for index, row in enumerate(ROWS):
        segment = feed.split.example(index).segments[0]
        text = images._own.tokenizer.apply_chat_template(
            [{**turn, "content": parts(turn["content"])} for turn in row["messages"]], tokenize=False
        )
        opened = [Image.open(tmp_path / name) for name in row["images"]]
        expected = images._own(text=[text], images=opened or None)["input_ids"][0]
        assert segment.input_ids.tolist() == list(expected)
        assert (
            images._own.tokenizer.decode(segment.input_ids[segment.loss_mask]).count("A red square.")
            == len(row["messages"]) // 2
        )


def parts(content: str) -> list[dict[str, str]]:
    pieces = content.replace("<image>", "\0<image>\0").split("\0")
    return [{"type": "image"} if one == "<image>" else {"type": "text", "text": one} for one in pieces if one]


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_transformers(kind: str, adapter: str, tmp_path: Path) -> None:
    loaded, plan = recipe(tmp_path, kind, adapter={"type": adapter})
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.3)
    PolicyModel(model).nll_sum(batch).backward()
    ours = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert ours
    assert not [name for name in ours if "vision" in name or "visual" in name or "project" in name.split(".")[-2]]

    model.zero_grad()
    order = [ROWS[index] for index in batch.examples]
    opened = [[Image.open(tmp_path / name) for name in row["images"]] for row in order]
    given = opened if images.family.nested else [image for group in opened for image in group]
    plain = images._own.image_processor(given, **{**images._options, "return_tensors": "pt"})
    arguments = {name: plain[name] for name in images.family.inputs}
    if images.family.token_types:
        arguments[images.family.token_types] = batch.tokens[images.family.token_types]
    if adapter == "none":  # transformers' own, as it loads it
        plain_model = AutoModelForImageTextToText.from_pretrained(loaded.run.model.name_or_path, dtype=torch.float32)
        model_loss = PolicyModel(model).nll_sum(batch).detach()
        model = plain_model.train()
    else:
        model_loss = PolicyModel(model).nll_sum(batch).detach()
    logits = model(
        input_ids=batch.tokens["input_ids"], attention_mask=batch.tokens["attention_mask"], use_cache=False, **arguments
    ).logits
    targets = batch.tokens["labels"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets, ignore_index=NO_LABEL, reduction="sum"
    )
    loss.backward()
    assert abs(float(model_loss - loss.detach())) < 1e-5 * float(loss)
    for name, one in model.named_parameters():
        if name in ours:
            assert float((one.grad - ours[name]).norm()) <= 1e-5 * float(ours[name].norm()) + 1e-8, name
