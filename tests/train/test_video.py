"""Videos in rows, from the file to the loss: ids equal to the processor's, loss and gradients to transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_video import KINDS, PIXELS, ROWS, own_processor, video_model, write_rows
from transformers import AutoModelForImageTextToText

from halftune.config.facts.media import VIDEO_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.data.media.frames import decoded, examine
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL
from halftune.hardware.catalogue import lookup
from halftune.methods import make_method
from halftune.model.adapters import attach_adapter
from halftune.model.files.locate import media_of
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.train.batches.feed import Feed
from halftune.train.setup import media_inputs


def recipe(folder: Path, kind: str, **changes: Any) -> tuple[Any, Plan]:
    model, rows = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        video_model(model, kind)
    data = {"train": str(rows if rows.exists() else write_rows(folder, ROWS)), "videos": True, "packing": False}
    data |= PIXELS if "omni" in kind else {}
    tree = {
        "model": {"name_or_path": str(model)},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 2},
        "data": {**data, "group_by_length": False, **changes.pop("data", {})},
        "training": {"output_dir": str(folder / "run"), "max_steps": 2, "per_device_train_batch_size": 3},
        "logging": {"progress": False, "probes": 0},
        **changes,
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(folder / "recipe.yaml")
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))


def fed(loaded: Any, plan: Plan) -> tuple[Feed, Any]:
    config = loaded.run
    tokenizer = load_tokenizer(config.model)
    data = prepare(config, tokenizer, images=media_of(config))
    images = media_inputs(config, tokenizer)
    return Feed(data.train, config, plan.batch, make_method(config.method), 0, images=images), images


def test_the_table_is_tested() -> None:
    assert set(KINDS) == set(VIDEO_FAMILIES)


def parts(content: str) -> list[dict[str, str]]:
    pieces = content.replace("<video>", "\0<video>\0").split("\0")
    return [{"type": "video"} if one == "<video>" else {"type": "text", "text": one} for one in pieces if one]


def given(kind: str, row: dict[str, Any], images: Any, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """What transformers' own processor makes of a row: ids, and the inputs of the forward pass."""
    text = images._own.tokenizer.apply_chat_template(
        [{**turn, "content": parts(turn["content"])} for turn in row["messages"]], tokenize=False
    )
    if not row["videos"]:
        return images._own(text=[text], return_tensors="pt")
    kept = images._own.video_processor
    own = own_processor(kind, images, patch)
    files = [(folder / name).read_bytes() for name in row["videos"]]
    films = [examine(file) for file in files]
    whole = [np.stack(list(decoded(file, range(film.frames)))) for file, film in zip(files, films, strict=True)]
    told = [
        {"total_num_frames": one.frames, "fps": one.fps, "duration": one.frames / one.fps, "height": one.height,
         "width": one.width}
        for one in films
    ]  # fmt: skip
    size = {"size": {"shortest_edge": 64, "longest_edge": 512}} if "omni" in kind else {}
    fps = {"fps": 2.0} if KINDS[kind] == "qwen2_vl" else {}  # whose files name none
    asked = {"video_metadata": told, "do_sample_frames": True, "return_metadata": True, **fps, **size}
    made = own(text=[text], videos=whole, return_tensors="pt", videos_kwargs=asked)
    own.video_processor = kept
    return made


@pytest.mark.parametrize(
    ("adapter", "packing"),
    [("lora", True), *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("lora", False), ("none", True)))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_transformers(
    kind: str, adapter: str, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"packing": packing, "max_length": 512}
    loaded, plan = recipe(tmp_path, kind, adapter={"type": adapter}, data=data)
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    assert len(batch.examples) == len(ROWS)
    assert ("seq_idx" in batch.tokens) == packing
    model: Any = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.3)
    loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    ours = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert ours
    if adapter == "none":
        auto: Any = AutoModelForImageTextToText
        if kind == "qwen2_5_omni_thinker":
            from transformers import Qwen2_5OmniThinkerForConditionalGeneration as auto
        model = auto.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    rows = {index: given(kind, ROWS[index], images, tmp_path, monkeypatch) for index in batch.examples}
    expected, rounded = plain(model, batch, feed, rows)
    assert abs(float(loss.detach()) - expected) < 1e-5 * expected
    _, exact = plain(model.double(), batch, feed, rows)
    largest = max(float(one.norm()) for one in exact.values())
    for name, mine in ours.items():  # sums of terms of both signs have rounding errors of the size of the terms
        allowed = 1e-5 * exact[name].norm() + 2 * (rounded[name] - exact[name]).norm()
        assert float((mine - exact[name]).norm()) <= float(allowed) + torch.finfo(torch.float32).eps * largest, name


def plain(model: Any, batch: Any, feed: Feed, rows: dict[int, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' forward pass on each sample alone, with its processor's inputs."""
    model.zero_grad()
    total, kind = torch.zeros(()), next(model.parameters()).dtype
    for place, index in enumerate(batch.examples):
        segment, made = feed.split.example(index).segments[0], dict(rows[index])
        assert segment.input_ids.tolist() == made["input_ids"][0].tolist()
        if "pixel_values_videos" in made:
            made["pixel_values_videos"] = made["pixel_values_videos"].to(kind)
            if "seq_idx" in batch.tokens:
                axes = positions(model, made)
                where = batch.tokens["seq_idx"][0] == place
                assert torch.equal(batch.tokens["position_ids"][1:, :, where], axes)
        made.pop("video_metadata", None)
        logits = model(**made, use_cache=False).logits[0, :-1]
        labels = torch.from_numpy(segment.labels.astype("int64"))[1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
    total.backward()
    return float(total.detach()), {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def positions(model: Any, made: dict[str, Any]) -> torch.Tensor:
    body = getattr(model, "get_base_model", lambda: model)().model
    if "video_second_per_grid" in made:
        return body.get_rope_index(
            made["input_ids"], video_grid_thw=made["video_grid_thw"], second_per_grids=made["video_second_per_grid"]
        )[0]
    names = ("mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    return body.get_rope_index(made["input_ids"], **{name: made[name] for name in names if name in made})[0]
