"""Features of a frozen vision tower: kept in the cache, the same as computed ones, and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from test_images import fed, recipe
from tiny_images import KINDS, write_image

from halftune.config.facts.media import IMAGE_FAMILIES
from halftune.core.errors import PlanError
from halftune.data.media.feature_store import FeatureStore
from halftune.data.pipeline import prepare
from halftune.model.adapters import attach_adapter
from halftune.model.files.locate import media_of
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.precision.dtypes import autocast
from halftune.train.batches import frozen_towers
from halftune.train.batches.features import FeatureProcessor, with_features
from halftune.train.batches.feed import Feed
from halftune.train.trainer import train


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def made(loaded: Any, plan: Any) -> tuple[Any, Feed, Feed]:
    """A model, and feeds of pixels and of features."""
    config = loaded.run
    data = prepare(config, load_tokenizer(config.model), images=media_of(config))
    model = attach_adapter(load_model(config.model, plan), config.adapter, plan, 0)
    feed, _ = fed(loaded, plan)
    return model, feed, with_features(feed, model, plan, data, Accelerator(cpu=True))


def result(model: Any, plan: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    with autocast(plan.precision, torch.device("cpu")):
        loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    return float(loss.detach()), {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_features_give_the_loss_of_pixels(kind: str, packing: bool, tmp_path: Path) -> None:
    if packing and (kind == "llama4" or IMAGE_FAMILIES[kind].two_way):
        pytest.skip("not packed")
    data = {"cache_features": True, "packing": packing, "max_length": 512}
    loaded, plan = recipe(tmp_path, kind, data=data)
    model, pixels, features = made(loaded, plan)
    assert isinstance(features.images, FeatureProcessor)
    (seen,), (kept,) = (feed.micro_batches(feed.rows(0)) for feed in (pixels, features))
    assert "pixel_values" in seen.extras
    assert not {"pixel_values", "pixel_attention_mask", "image_position_ids"} & kept.extras.keys()
    (loss, gradients), (again, others) = result(model, plan, seen), result(model, plan, kept)
    # a few towers' matmuls round differently for one image than for several
    assert again == pytest.approx(loss, rel=1e-6)
    for name, one in gradients.items():
        assert float((others[name] - one).norm()) <= 1e-5 * float(one.norm()) + 1e-9, name


def losses(folder: Path, output: str, *, steps: int, epochs: int = 3, **data: Any) -> dict[int, float]:
    training = {
        "output_dir": str(folder / output), "num_train_epochs": epochs, "per_device_train_batch_size": 2,
        "save_steps": 2, "lr_scheduler_type": "constant", "max_steps": steps, "learning_rate": 0.01,
    }  # fmt: skip
    loaded, plan = recipe(folder, "qwen3_vl", training=training, data={"max_length": 128, **data}, precision="bf16")
    train(loaded, plan)
    lines = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def files(cache: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in cache.rglob("*.features")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packing", [True, False])
def test_losses_are_the_same_bits_with_and_without(packing: bool, tmp_path: Path, cache: Path) -> None:
    data = {"packing": packing, "group_by_length": False}
    computed = losses(tmp_path, "computed", steps=4, cache_features=False, **data)
    assert not files(cache)
    assert losses(tmp_path, "kept", steps=4, **data) == computed
    first = files(cache)
    assert len(first) == 3
    losses(tmp_path, "parts", steps=2, cache_features=True, **data)
    assert losses(tmp_path, "parts", steps=4, **data) == computed, "resumed"
    assert files(cache) == first


@pytest.mark.filterwarnings("ignore")
def test_damaged_features_are_computed_again(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"packing": True, "cache_features": True}
    before = losses(tmp_path, "one", steps=4, **data)
    paths = [Path(name) for name in files(cache)]
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    paths[1].write_bytes(b"")
    paths[2].unlink()
    assert losses(tmp_path, "two", steps=4, **data) == before
    assert paths[0].read_bytes() == content
    assert all(FeatureStore(path.parents[1]).read(path.parent.name + path.stem) is not None for path in paths)
    assert sum("corrupt features" in record.message for record in caplog.records) == 2


def test_the_key_is_of_image_tower_size_and_code(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, plan = recipe(tmp_path, "qwen2_5_vl", data={"cache_features": True})
    made(loaded, plan)
    first = {path.parents[1] for path in cache.rglob("*.features")}
    write_image(tmp_path / "images/33x47.png", 33, 47)  # other pixels
    made(loaded, plan)
    assert len(files(cache)) == 4
    assert {path.parents[1] for path in cache.rglob("*.features")} == first
    made(*recipe(tmp_path, "qwen2_5_vl", data={"cache_features": True}, precision="bf16"))
    made(*recipe(tmp_path, "qwen2_5_vl", data={"cache_features": True, "image_max_pixels": 500}))
    assert len({path.parents[1] for path in cache.rglob("*.features")}) == 3
    with torch.no_grad():
        base = load_model(loaded.run.model, plan)
        for name, one in base.named_parameters():
            if "visual.merger" in name or "lm_head" in name:
                one.mul_(1.5)
        base.save_pretrained(tmp_path / "model")
    made(loaded, plan)
    assert len({path.parents[1] for path in cache.rglob("*.features")}) == 4
    monkeypatch.setattr(frozen_towers, "code_of", lambda folder: f"older {folder.name}")  # other pixels of a file
    made(loaded, plan)
    assert len({path.parents[1] for path in cache.rglob("*.features")}) == 5


OFF: dict[str, dict[str, Any]] = {
    "trained tower": {"model": {"train": {"vision": "lora"}}},
    "trained projector": {"model": {"train": {"projector": "full"}}},
    "one epoch": {"training": {"num_train_epochs": 1, "max_steps": None}},
    "no cache": {"data": {"cache": False}},
    "asked": {"data": {"cache_features": False}},
}


@pytest.mark.parametrize("asked", OFF)
def test_when_features_are_not_kept(asked: str, tmp_path: Path) -> None:
    changes = {name: dict(value) for name, value in OFF[asked].items()}
    if "model" in changes:
        changes["model"]["name_or_path"] = str(tmp_path / "model")
    if "training" in changes:
        changes["training"]["output_dir"] = str(tmp_path / "run")
    _, plan = recipe(tmp_path, "qwen3_vl", **changes)
    assert plan.features is not None
    assert not plan.features.value
    _, plan = recipe(tmp_path, "qwen3_vl")
    assert plan.features is not None
    assert plan.features.value


def test_features_of_a_trained_tower_are_refused(tmp_path: Path) -> None:
    model = {"name_or_path": str(tmp_path / "model"), "train": {"vision": "lora"}}
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, "qwen3_vl", model=model, data={"cache_features": True})
    assert error.value.code == "plan.parts_conflict"


def test_a_full_disk_turns_it_off(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, plan = recipe(tmp_path, "qwen2_5_vl")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    _, _, feed = made(loaded, plan)
    assert not isinstance(feed.images, FeatureProcessor)
