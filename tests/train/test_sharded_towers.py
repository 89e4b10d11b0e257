"""Towers in shards: every process calls every tower in every pass, and what a batch lacks changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_audio
import tiny_images
import tiny_video
import torch
from media_runs import fed, media_recipe
from process_group import apart, curve, in_processes, train_all
from safetensors.torch import load_file
from test_parts import attached

from halftune.config.facts.media import VIDEO_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.sections.model import ModelSection
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.data.pipeline import prepare
from halftune.hardware.catalogue import lookup
from halftune.model.files.locate import media_of
from halftune.model.load.parts import trained_in_towers
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve
from halftune.plan.weights.parts import tower_parts
from halftune.train.batches.absent_media import call_all_towers
from halftune.train.parallel.fsdp2 import modules_to_wrap

SEEN = tiny_images.asked("<image>What is it?", images=("images/60x40.png",))
HEARD = tiny_audio.heard("<audio>What is it?", "0.9.wav")
MOVING = tiny_video.seen("<video>What is it?", videos=("videos/12-40x24.gif",))
TEXT = tiny_images.asked("What is red?")
KINDS = dict.fromkeys((*tiny_images.KINDS, *tiny_audio.KINDS))


def written(folder: Path, kind: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """A model, a row of each kind of media that its type is trained on, and the keys of ``data`` for them."""
    rows = {}
    if kind in tiny_audio.KINDS:
        tiny_audio.audio_model(folder / "model", kind)
        tiny_audio.write_rows(folder, [HEARD])
        rows["audio"] = HEARD
    else:
        tiny_images.image_model(folder / "model", kind, **MORE.get(kind, {}))
    if kind in tiny_images.KINDS:
        tiny_images.write_rows(folder, [SEEN])
        rows["images"] = SEEN
    if kind in tiny_video.KINDS and not VIDEO_FAMILIES[kind].shared:
        tiny_video.with_video(folder / "model", kind)
        tiny_video.write_rows(folder, [MOVING])
        rows["videos"] = MOVING
    return rows, {**dict.fromkeys(rows, True), **(tiny_video.PIXELS if "videos" in rows else {})}


def parts_of(folder: Path, used: dict[str, Any], mode: str = "full") -> dict[str, str]:
    """``model.train`` with all parts that the media of a run use."""
    found = tower_parts(read_model_facts(ModelSection(name_or_path=str(folder / "model"))))
    needs = {"vision": {"images", "videos"}, "audio": {"audio"}, "projector": set(used)}
    return {part: mode for part, of in needs.items() if part in found and of & used.keys()}


def as_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def gradients(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad()
    loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


def _note(called: list[int], index: int, _layer: Any, _args: Any) -> None:
    called.append(index)


@pytest.mark.parametrize("kind", KINDS)
def test_each_pass_calls_all_towers_and_absent_media_change_nothing(kind: str, tmp_path: Path) -> None:
    rows, data = written(tmp_path, kind)
    section = {"name_or_path": str(tmp_path / "model"), "train": parts_of(tmp_path, rows)}
    file = as_file(tmp_path, [*rows.values(), TEXT])
    loaded, plan = media_recipe(tmp_path, file, data, adapter="none", model=section)
    feed, images = fed(loaded, plan)
    batches = [feed.micro_batches([row])[0] for row in feed.rows(0)]
    model = attached(loaded, replace(plan, distribution=Choice("fsdp2", "")))
    alone = [gradients(model, batch) for batch in batches]
    tokenizer = load_tokenizer(loaded.run.model)
    prepared = prepare(loaded.run, tokenizer, images=media_of(loaded.run))
    call_all_towers(model, images, tokenizer, prepared, torch.device("cpu"))
    layers, called = modules_to_wrap(model, ()), list[int]()
    calls, without = list[list[int]](), list[set[str]]()
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(_note, called, index))
    inside = {id(one) for one in trained_in_towers(model)}
    named = [name for name, one in model.named_parameters() if id(one) in inside]
    for batch, (loss, expected) in zip(batches, alone, strict=True):
        again, found = gradients(model, batch)
        assert torch.equal(again, loss)
        for name, own in expected.items():
            one = found[name]
            assert one is None or (not one.any() if own is None else torch.equal(one, own)), name
            assert one is not None or own is None, name
        calls.append(called.copy())
        called.clear()
        without.append({name for name in named if found[name] is None})
    assert len(calls) == len(rows) + 1
    assert all(one == calls[0] for one in calls)
    assert set(calls[0]) == set(range(len(layers)))
    assert all(one == without[0] for one in without), "what processes reduce together"


MORE = {"llava": {"vision_feature_layer": -2}}  # no output depends on the last layer
FULL = {"adapter": "none"}
# kind, part of the rows, what is trained of the towers, changes of the recipe
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "full": ("qwen2_5_vl", "images", "full", {**FULL, "data": {"packing": True, "max_length": 128}}),
    "lora": ("qwen2_5_omni_thinker", "audio images videos", "projector", {}),
    "all in full": ("qwen3_omni_moe_thinker", "audio images", "full", FULL),
    "all by lora": ("qwen3_vl", "images videos", "lora", {}),
    "sounds last": ("gemma4", "audio images", "full", FULL),
    "unread layer": ("llava", "images", "full", FULL),
    "frozen": ("qwen2_5_omni_thinker", "audio images videos", "", {}),
    "sounds": ("qwen2_audio", "audio", "full", FULL),
    "checkpointing": ("qwen2_5_vl", "images videos", "full", {**FULL, "training": {"gradient_checkpointing": True}}),
}


def run(folder: Path, case: str, name: str, processes: int, steps: int = 4) -> Any:
    """A recipe of a case and its plan: four rows a step, at most one of a kind with media."""
    _, used, mode, changes = CASES[case]
    rows, data = json.loads((folder / "kept.json").read_text())
    media = {one: rows[one] for one in used.split()}
    chosen = parts_of(folder, media, mode) if mode not in ("", "projector") else {"projector": "full"} if mode else {}
    as_file(folder, [*media.values(), *[TEXT] * (4 - len(media))])
    loaded, _ = media_recipe(
        folder, folder / "rows.jsonl", {**{key: one for key, one in data.items() if key in media or key not in rows},
        "eval": str(folder / "rows.jsonl"), **changes.get("data", {})},
        model={"name_or_path": str(folder / "model"), "train": chosen},
        adapter=changes.get("adapter", {"type": "lora", "rank": 2}),
        training={
            "output_dir": str(folder / name), "max_steps": steps, "per_device_train_batch_size": 2 // processes,
            "gradient_accumulation_steps": 2, "eval_steps": 2, "save_steps": 2, "learning_rate": 0.01,
            "lr_scheduler_type": "constant", "weight_decay": 0.1, "adam_epsilon": 1e-3, **changes.get("training", {}),
        },
        distributed={"strategy": "fsdp2" if processes > 1 else "auto", "num_processes": processes},
    )  # fmt: skip
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model), world_size=processes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_sharded_towers_as_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "kept.json").write_text(json.dumps(written(tmp_path, CASES[case][0])))
    shared = [run(tmp_path, case, "two", 2), run(tmp_path, case, "rest", 2, steps=2), run(tmp_path, case, "rest", 2)]
    assert all(plan.distribution.value == "fsdp2" for _, plan in shared)
    assert in_processes(2, train_all(shared)) == [0, 0]
    assert in_processes(1, train_all([run(tmp_path, case, "one", 1)])) == [0]
    for name, limit in {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 1e-4}.items():
        assert apart(curve(tmp_path / "two", name), curve(tmp_path / "one", name)) < limit
    finals = {
        name: load_file(next((tmp_path / name / "final").glob("*.safetensors"))) for name in ("one", "two", "rest")
    }
    assert finals["one"].keys() == finals["two"].keys() == finals["rest"].keys()
    for name, one in finals["one"].items():
        torch.testing.assert_close(finals["two"][name], one, rtol=1e-4, atol=1e-6)
        assert torch.equal(finals["rest"][name], finals["two"][name])


def test_an_encoder_that_skips_layers_at_random_is_not_sharded(tmp_path: Path) -> None:
    _, data = written(tmp_path, "qwen2_audio")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "audio_config": {**config["audio_config"], "encoder_layerdrop": 0.1}}))
    with pytest.raises(PlanError) as error:
        media_recipe(tmp_path, as_file(tmp_path, [HEARD]), data, distributed={"strategy": "fsdp2"})
    assert error.value.code == "plan.strategy_unavailable"
