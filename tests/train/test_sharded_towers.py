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


def written(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Writes a model; returns a row of each kind of media that its type is trained on, by the key of ``data``."""
    rows = {}
    if kind in tiny_audio.KINDS:
        tiny_audio.audio_model(folder / "model", kind, images=kind in tiny_images.KINDS)
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
    return rows


def keys_of(rows: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``data`` for these kinds of media."""
    return {**dict.fromkeys(rows, True), **(tiny_video.PIXELS if "videos" in rows else {})}


def section(folder: Path, rows: dict[str, Any], mode: str) -> dict[str, Any]:
    """``model``, of which the projector is trained, or all parts that these media use are ``full`` or ``lora``."""
    model = {"name_or_path": str(folder / "model")}
    if mode == "projector":
        return {**model, "train": {"projector": "full"}}
    found = tower_parts(read_model_facts(ModelSection.model_validate(model)))
    needs = {"vision": {"images", "videos"}, "audio": {"audio"}, "projector": set(rows)}
    return {**model, "train": {part: mode for part, of in needs.items() if part in found and of & rows.keys()}}


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
    rows = written(tmp_path, kind)
    file, seeing = as_file(tmp_path, [*rows.values(), TEXT]), section(tmp_path, rows, "full")
    training = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": len(rows) + 1}
    loaded, plan = media_recipe(tmp_path, file, keys_of(rows), adapter="none", model=seeing, training=training)
    feed, images = fed(loaded, plan)
    batches = [feed.micro_batches([row])[0] for row in feed.rows(0)]
    batches += feed.micro_batches(feed.rows(0))  # all kinds at once
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
    assert len(calls) == len(rows) + 2
    assert all(one == calls[0] for one in calls)
    assert set(calls[0]) == set(range(len(layers)))
    assert all(one == without[0] for one in without), "what processes reduce together"


MORE = {"llava": {"vision_feature_layer": -2}}  # no output depends on the last layer
FULL, LORA = {"adapter": "none"}, {"adapter": {"type": "lora", "rank": 2}}
CHECKPOINTS = {"training": {"gradient_checkpointing": True}}
# kind, media, what is trained of the towers, changes of the recipe
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "full": ("qwen2_5_vl", "images", "full", {**FULL, "data": {"packing": True, "max_length": 128}}),
    "lora": ("qwen2_5_omni_thinker", "audio images videos", "projector", LORA),
    "all in full": ("qwen3_omni_moe_thinker", "audio images", "full", FULL),
    "all by lora": ("qwen3_vl", "images videos", "lora", LORA),
    "sounds last": ("gemma4", "audio images", "full", FULL),
    "unread layer": ("llava", "images", "full", FULL),
    "frozen": ("qwen2_5_omni_thinker", "audio images videos", "frozen", LORA),
    "sounds": ("qwen2_audio", "audio", "full", FULL),
    "checkpointing": ("qwen2_5_vl", "images videos", "full", {**FULL, **CHECKPOINTS}),
    "pairs": ("qwen3_vl", "images videos", "lora", {**LORA, "method": "dpo"}),
    "other modules": ("qwen2_5_vl", "images", "lora", {**LORA, "distributed": {"fsdp": {"wrap": ["Qwen2_5_VLMLP"]}}}),
}


def as_pair(row: dict[str, Any]) -> dict[str, Any]:
    turns = row["messages"]
    others = {"prompt": turns[0]["content"], "chosen": turns[1]["content"], "rejected": "A blue circle."}
    return {**{name: value for name, value in row.items() if name != "messages"}, **others}


def run(folder: Path, case: str, rows: dict[str, Any], name: str, processes: int, steps: int = 4) -> Any:
    """A recipe of a case and its plan: four rows a step, at most one of a kind with media."""
    mode, changes = CASES[case][2:]
    lines = [*rows.values(), *[TEXT] * (4 - len(rows))]
    file = as_file(folder, [as_pair(row) for row in lines] if "method" in changes else lines)
    training = {
        "output_dir": str(folder / name), "max_steps": steps, "per_device_train_batch_size": 2 // processes,
        "gradient_accumulation_steps": 2, "eval_steps": 2, "save_steps": 2, "learning_rate": 0.01,
        "lr_scheduler_type": "constant", "weight_decay": 0.1, "adam_epsilon": 1e-3, **changes.get("training", {}),
    }  # fmt: skip
    shared = {**changes.get("distributed", {}), "strategy": "fsdp2"} if processes > 1 else {}
    own = {
        "data": {"eval": str(file), **changes.get("data", {})}, "model": section(folder, rows, mode),
        "training": training, "distributed": {**shared, "num_processes": processes},
    }  # fmt: skip
    if case == "lora":
        media = [str(folder / SEEN["images"][0])]
        own["logging"] = {"sample_prompts": ["<image>What is it?"], "sample_media": media, "probes": 1}
        own["generation"] = {"max_new_tokens": 4, "temperature": 0}
    loaded, _ = media_recipe(folder, file, keys_of(rows), **{**changes, **own})
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model), world_size=processes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_sharded_towers_as_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    kind, media = CASES[case][:2]
    rows = {name: row for name, row in written(tmp_path, kind).items() if name in media.split()}
    made = partial(run, tmp_path, case, rows)
    shared = [made("two", 2), made("rest", 2, steps=2), made("rest", 2)]
    assert all(plan.distribution.value == "fsdp2" for _, plan in shared)
    assert in_processes(2, train_all(shared)) == [0, 0]
    assert in_processes(1, train_all([made("one", 1)])) == [0]
    for name, limit in {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 1e-4}.items():
        assert apart(curve(tmp_path / "two", name), curve(tmp_path / "one", name)) < limit
    finals = {
        name: load_file(next((tmp_path / name / "final").glob("*.safetensors"))) for name in ("one", "two", "rest")
    }
    assert finals["one"].keys() == finals["two"].keys() == finals["rest"].keys()
    # A gradient that rounds to its neighbour moves a weight by learning_rate / adam_epsilon = 10 times that.
    rounding = 10 * max(curve(tmp_path / "one", "grad_norm")) * torch.finfo(torch.float32).eps
    for name, one in finals["one"].items():
        torch.testing.assert_close(finals["two"][name], one, rtol=1e-4, atol=rounding)
        assert torch.equal(finals["rest"][name], finals["two"][name])
    if case == "lora":
        shown = [json.loads((tmp_path / name / "samples.json").read_text()) for name in ("one", "two")]
        assert shown[0] == shown[1]


def test_an_encoder_that_skips_layers_at_random_is_not_sharded(tmp_path: Path) -> None:
    written(tmp_path, "qwen2_audio")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "audio_config": {**config["audio_config"], "encoder_layerdrop": 0.1}}))
    with pytest.raises(PlanError) as error:
        media_recipe(tmp_path, as_file(tmp_path, [HEARD]), {"audio": True}, distributed={"strategy": "fsdp2"})
    assert error.value.code == "plan.strategy_unavailable"
