"""Runs on tiny models that see or hear: the recipe with its plan, and the feed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.data.pipeline import prepare
from halftune.hardware.catalogue import lookup
from halftune.methods import make_method
from halftune.model.files.locate import media_of
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.train.batches.feed import Feed
from halftune.train.setup import media_inputs


def media_recipe(folder: Path, rows: Path, own: dict[str, Any], **changes: Any) -> tuple[Any, Plan]:
    """LoRA in fp32 on the model in ``folder / "model"``, with the keys ``own`` of ``data``.

    ``changes["data"]`` adds to ``data``; other sections of ``changes`` take the place of those here.
    """
    given = {"train": str(rows), "packing": False, "group_by_length": False, **own, **changes.pop("data", {})}
    tree = {
        "model": {"name_or_path": str(folder / "model")},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 2},
        "data": given,
        "training": {"output_dir": str(folder / "run"), "max_steps": 2, "per_device_train_batch_size": 3},
        "logging": {"progress": False, "probes": 0},
        **changes,
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(folder / "recipe.yaml")
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))


def fed(loaded: Any, plan: Plan) -> tuple[Feed, Any]:
    """The feed of a run, and what makes its inputs of media."""
    config = loaded.run
    tokenizer = load_tokenizer(config.model)
    data = prepare(config, tokenizer, images=media_of(config))
    images = media_inputs(config, tokenizer)
    return Feed(data.train, config, plan.batch, make_method(config.method), 0, images=images), images
