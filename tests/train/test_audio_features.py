"""Features of frozen audio towers: kept in the cache, the same as computed ones, alone and beside images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from test_audio import fed, recipe
from test_features import result
from tiny_audio import KINDS, ROWS, heard, write_rows
from tiny_images import write_image

from halftune.config.facts.media import AUDIO_FAMILIES
from halftune.core.errors import PlanError
from halftune.data.media.feature_store import FeatureStore
from halftune.data.pipeline import prepare
from halftune.model.adapters import attach_adapter
from halftune.model.files.locate import media_of
from halftune.model.load.load import load_model
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.train.batches.features import FeatureProcessor, with_features
from halftune.train.batches.feed import Feed
from halftune.train.trainer import train

ALONE = [kind for kind in KINDS if AUDIO_FAMILIES[kind].alone]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def made(loaded: Any, plan: Any) -> tuple[Any, Feed, Feed]:
    """A model, and feeds of spectrograms and of features."""
    config = loaded.run
    data = prepare(config, load_tokenizer(config.model), images=media_of(config))
    model = attach_adapter(load_model(config.model, plan), config.adapter, plan, 0)
    feed = fed(loaded, plan)
    return model, feed, with_features(feed, model, plan, data, Accelerator(cpu=True))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ALONE)
def test_features_give_the_loss_of_spectrograms(kind: str, packing: bool, tmp_path: Path) -> None:
    data = {"cache_features": True, "packing": packing, "max_length": 512}
    loaded, plan = recipe(tmp_path, kind, data=data)
    model, sounds, features = made(loaded, plan)
    assert isinstance(features.images, FeatureProcessor)
    (computed,), (kept,) = (feed.micro_batches(feed.rows(0)) for feed in (sounds, features))
    assert "input_features" in computed.extras
    assert "input_features" not in kept.extras
    calls: list[object] = []
    hook = model.get_base_model().model.audio_tower.register_forward_hook(lambda *_: calls.append(_))
    again, others = result(model, plan, kept)
    assert not calls
    hook.remove()
    loss, gradients = result(model, plan, computed)
    assert again == pytest.approx(loss, rel=1e-6)
    for name, one in gradients.items():
        assert float((others[name] - one).norm()) <= 1e-5 * float(one.norm()) + 1e-9, name


def losses(folder: Path, kind: str, output: str, **data: Any) -> dict[int, float]:
    training = {
        "output_dir": str(folder / output), "num_train_epochs": 3, "per_device_train_batch_size": 1,
        "lr_scheduler_type": "constant", "learning_rate": 0.01,
    }  # fmt: skip
    loaded, plan = recipe(folder, kind, training=training, data={"max_length": 256, **data}, precision="bf16")
    assert plan.features is not None
    assert plan.features.value == data.get("cache_features", True)
    train(loaded, plan)
    lines = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ALONE)
def test_losses_of_three_epochs_are_the_same_bits(kind: str, tmp_path: Path, cache: Path) -> None:
    computed = losses(tmp_path, kind, "computed", cache_features=False)
    assert len(computed) == 3 * len(ROWS)
    assert not list(cache.rglob("*.features"))
    assert losses(tmp_path, kind, "kept") == computed
    paths = list(cache.rglob("*.features"))
    assert len(paths) == 3
    stored = FeatureStore(paths[0].parents[1]).read(paths[0].parent.name + paths[0].stem)
    assert stored is not None
    assert stored["audio_features"].dtype == torch.bfloat16


def test_images_and_sounds_of_a_row(tmp_path: Path) -> None:
    write_image(tmp_path / "red.png", 24, 24)
    both = {**heard("<audio>Is it <image>, and <audio>?", "0.9.wav", "0.31.wav"), "images": ["red.png"]}
    write_rows(tmp_path, [both, *ROWS])
    data = {"cache_features": True, "images": True, "packing": True, "max_length": 512}
    loaded, plan = recipe(tmp_path, "qwen2_5_omni_thinker", data=data)
    model, media, features = made(loaded, plan)
    (computed,), (kept,) = (feed.micro_batches(feed.rows(0)) for feed in (media, features))
    assert {"input_features", "pixel_values"} <= computed.extras.keys()
    assert not {"input_features", "pixel_values"} & kept.extras.keys()
    (again, _), (loss, _) = result(model, plan, kept), result(model, plan, computed)
    assert again == pytest.approx(loss, rel=1e-6)


def test_features_of_a_trained_audio_tower_are_refused(tmp_path: Path) -> None:
    model = {"name_or_path": str(tmp_path / "model"), "train": {"audio": "lora"}}
    _, plan = recipe(tmp_path, "qwen2_audio", model=model)
    assert plan.features is not None
    assert not plan.features.value
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, "qwen2_audio", model=model, data={"cache_features": True})
    assert error.value.code == "plan.parts_conflict"
