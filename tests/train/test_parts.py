"""Parts of a multimodal model: which are trained, in which dtype, at which rate, and what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_images import assert_gradients, fed, in_fp64, plain, recipe, transformers_own
from tiny_images import KINDS
from transformers import AutoModelForImageTextToText

from halftune.config.facts.media import part_of
from halftune.config.facts.model import read_model_facts
from halftune.core.errors import PlanError
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.model.adapters import attach_adapter
from halftune.model.load.load import load_model
from halftune.model.load.towers import towers_of
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import open_run
from halftune.plan import resolve
from halftune.plan.weights.parts import tower_parts
from halftune.precision.dtypes import autocast, plain_name
from halftune.precision.report import check_dtypes
from halftune.train.setup import optimizer_of
from halftune.train.trainer import train


def with_parts(folder: Path, kind: str, adapter: str, parts: dict[str, str], **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    model = {"name_or_path": str(folder / "model"), "train": parts}
    options = {"type": "lora", "rank": 2} if adapter == "lora" else {"type": "none"}
    return recipe(folder, kind, adapter=options, model=model, **changes)


def attached(loaded: Any, plan: Any) -> Any:
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.3)
    return model


def part_in(base: Any, name: str) -> str:
    towers = towers_of(base)
    return part_of(name) if towers is not None and towers.contain(name) else "language"


def named_parts(model: Any) -> dict[str, set[str]]:
    """The parts of the trained weights, by kind: ``full`` or ``lora``."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    found: dict[str, set[str]] = {"full": set(), "lora": set()}
    for name, one in base.named_parameters():
        if one.requires_grad:
            where = part_in(base, plain_name(name))
            found["lora" if "lora_" in name else "full"].add(where)
    return found


def seeing(kind: str) -> tuple[str, ...]:
    """The parts that images pass; Gemma 4 without an encoder has no tower."""
    return ("projector",) if kind == "gemma4_unified" else ("vision", "projector")


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_has_a_tower_and_a_projector(kind: str, tmp_path: Path) -> None:
    _, plan = recipe(tmp_path, kind)
    loaded, _ = recipe(tmp_path, kind)
    facts = read_model_facts(loaded.run.model)
    parts = tower_parts(facts)
    assert {*seeing(kind)} <= parts.keys()
    assert ("audio" in parts) == ("omni" in kind)
    assert sum(one.size * one.count for part in parts.values() for one in part) == facts.tower_parameters
    assert [part.name for part in plan.parts] == [
        "language",
        *(p for p in ("vision", "audio", "projector") if p in parts),
    ]


FULL = {"language": "full", "vision": "full", "projector": "full"}
LORA = {"language": "lora", "vision": "lora", "projector": "full"}


@pytest.mark.parametrize(("adapter", "parts"), [("none", FULL), ("lora", LORA)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_towers_are_transformers(kind: str, adapter: str, parts: dict[str, str], tmp_path: Path) -> None:
    parts = {part: how for part, how in parts.items() if part in ("language", *seeing(kind))}
    loaded, plan = with_parts(tmp_path, kind, adapter, parts)
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    model = attached(loaded, plan)
    check_dtypes(model, plan.precision)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    saved = model.state_dict().keys() if adapter == "none" else ()
    buffers = [one for name, one in model.named_buffers() if name in saved]  # the files' headers count them
    assert sum(map(torch.numel, [*trained.values(), *buffers])) == plan.num_trainable.value
    loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    ours = {name: one.grad.clone() for name, one in trained.items()}  # each has one
    kinds = named_parts(model)
    assert kinds["full"] == ({*parts} if adapter == "none" else {"projector"})
    model = transformers_own(model, loaded, adapter)
    expected, rounded = plain(model, batch, images, tmp_path)
    assert abs(float(loss.detach()) - expected) < 1e-5 * expected
    _, exact = plain(in_fp64(model), batch, images, tmp_path)
    unused = ours.keys() - exact.keys()  # layers that no output depends on
    assert all(not ours[name].any() for name in unused)
    assert_gradients({name: one for name, one in ours.items() if name in exact}, rounded, exact)


FROZEN_LANGUAGE = {"language": "frozen", "projector": "full"}
# adapter, parts → the weights of which parts are trained, by kind
CHOICES: dict[str, tuple[str, dict[str, str], dict[str, set[str]]]] = {
    "projector alone": ("none", FROZEN_LANGUAGE, {"full": {"projector"}, "lora": set()}),
    "frozen projector": ("none", {"vision": "full"}, {"full": {"language", "vision"}, "lora": set()}),
    "by default": ("lora", {}, {"full": set(), "lora": {"language"}}),
    "vision alone": ("lora", {"language": "frozen", "vision": "lora"}, {"full": set(), "lora": {"vision"}}),
    "all by lora": (
        "lora", {"vision": "lora", "projector": "lora"}, {"full": set(), "lora": {"language", "vision", "projector"}},
    ),
    "projector beside": ("lora", {"projector": "full"}, {"full": {"projector"}, "lora": {"language"}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava_next"])
@pytest.mark.parametrize("asked", CHOICES)
def test_the_asked_parts_are_trained(asked: str, kind: str, tmp_path: Path) -> None:
    adapter, parts, expected = CHOICES[asked]
    loaded, plan = with_parts(tmp_path, kind, adapter, parts)
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    assert named_parts(model) == expected
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert trained == plan.num_trainable.value
    assert {part.name: part.trained.value for part in plan.parts} == {
        part: "full" if part in expected["full"] else "lora" if part in expected["lora"] else "frozen"
        for part in ("language", "vision", "projector")
    }
    assert all((part.learning_rate is None) == (part.trained.value == "frozen") for part in plan.parts)


@pytest.mark.parametrize(("adapter", "parts"), [("lora", LORA), ("none", FROZEN_LANGUAGE), ("none", FULL)])
def test_dtypes_of_parts_are_planned(adapter: str, parts: dict[str, str], tmp_path: Path) -> None:
    loaded, plan = with_parts(tmp_path, "qwen2_5_vl", adapter, parts, precision="bf16")
    feed, _ = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    model = attached(loaded, plan)
    with autocast(plan.precision, torch.device("cpu")):
        PolicyModel(model).nll_sum(batch).backward()
    planned = {part.name: part.dtype.value for part in plan.parts}
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, one in base.named_parameters():
        part = part_in(base, plain_name(name))
        dtype = "fp32" if one.requires_grad else plan.precision.storage.value
        assert one.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], name
        if one.requires_grad and "lora_" not in name:
            assert planned[part] == "fp32"
    assert all(one.dtype == torch.float32 for name, one in base.named_buffers() if "inv_freq" in name)


def test_parts_have_their_own_learning_rates(tmp_path: Path) -> None:
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "learning_rate": 1e-3}
    training["part_learning_rates"] = {"vision": 1e-5, "projector": 1e-2}
    loaded, plan = with_parts(tmp_path, "qwen2_5_vl", "lora", LORA, training=training)
    model = attached(loaded, plan)
    optimizer = optimizer_of(loaded.run, plan, model)
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    expected = {"language": 1e-3, "vision": 1e-5, "projector": 1e-2}
    for name, one in model.get_base_model().named_parameters():
        if one.requires_grad:
            part = part_in(model.get_base_model(), plain_name(name))
            assert rates.pop(id(one)) == pytest.approx(expected[part])
    assert not rates
    assert {part.name: part.learning_rate.value for part in plan.parts if part.learning_rate} == expected


REFUSED: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "no adapter": ("none", {"vision": "lora"}, {}, "model.train.vision"),
    "second copy": ("lora", {"vision": "full"}, {}, "model.train.vision"),
    "language in full": ("lora", {"language": "full", "vision": "lora"}, {}, "model.train.language"),
    "nothing": ("none", {"language": "frozen"}, {}, "model.train"),
    "no part for lora": ("lora", FROZEN_LANGUAGE, {}, "adapter"),
    "no such part": ("lora", {"audio": "lora"}, {"data": {"audio": True}}, "data.audio"),
    "text": ("lora", {"vision": "lora"}, {"data": {"images": False}}, "model.train.vision"),
    "no such layers": (
        "lora", {"vision": "lora"}, {"adapter": {"type": "lora", "target_modules": ["down_proj", "q_proj"]}},
        "model.train.vision",
    ),
    "other adapter": ("lora", {"vision": "lora"}, {"adapter": {"type": "oft"}}, "model.train"),
    "rate of a frozen part": (
        "lora", {}, {"training": {"output_dir": "x", "part_learning_rates": {"vision": 1e-5}}},
        "training.part_learning_rates.vision",
    ),
    "layers of a frozen part": (
        "none", FROZEN_LANGUAGE, {"adapter": {"type": "none", "train_layers": 1}}, "model.train.language",
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", REFUSED)
def test_what_cannot_be_trained_is_refused(asked: str, tmp_path: Path) -> None:
    adapter, parts, changes, where = REFUSED[asked]
    options = changes.pop("adapter", {"type": "none"} if adapter == "none" else {"type": "lora", "rank": 2})
    model = {"name_or_path": str(tmp_path / "model"), "train": parts}
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, "qwen3_vl", adapter=options, model=model, **changes)
    assert where in [problem.where for problem in error.value.problems]
    assert {problem.code for problem in error.value.problems} <= {"plan.parts_conflict", "plan.images_unsupported"}


def losses(folder: Path, output: str, adapter: str, parts: dict[str, str], steps: int, **data: Any) -> dict[int, float]:
    training = {
        "output_dir": str(folder / output), "max_steps": steps, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2, "save_steps": 2, "learning_rate": 0.01,
        "part_learning_rates": {"projector": 0.02},
    }  # fmt: skip
    train(*with_parts(folder, "qwen3_vl", adapter, parts, training=training, data=data))
    lines = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("adapter", "parts"), [("lora", LORA), ("none", FROZEN_LANGUAGE), ("none", FULL)])
def test_a_run_of_parts_resumes_is_exported_and_loads_plainly(
    adapter: str, parts: dict[str, str], tmp_path: Path
) -> None:
    packed = {"packing": True, "max_length": 128}
    whole = losses(tmp_path, "whole", adapter, parts, 4, **packed)
    losses(tmp_path, "parts", adapter, parts, 2, **packed)
    assert losses(tmp_path, "parts", adapter, parts, 4, **packed) == whole
    assert len(set(whole.values())) == len(whole)
    out = tmp_path / "parts" / "final"
    if adapter == "lora":
        export_run(open_run(str(tmp_path / "parts"), ["precision=fp32"]), out := tmp_path / "exported")
        base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
        unmerged = PeftModel.from_pretrained(base, str(tmp_path / "parts" / "final")).eval()
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", out))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    language = {name for name in changed if "language_model" in name or "lm_head" in name}
    assert bool(language) == (parts["language"] != "frozen")
    assert {part_of(name) for name in changed - language} == {p for p in ("vision", "projector") if p in parts}
    loaded, plan = with_parts(tmp_path, "qwen3_vl", adapter, parts)
    feed, _ = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    plainly = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        loss = float(PolicyModel(plainly).nll_sum(batch))
        if adapter == "lora":
            assert float(PolicyModel(unmerged).nll_sum(batch)) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("machine", ["a100", "cpu"])
def test_the_plan_has_a_row_for_each_part(machine: str, tmp_path: Path) -> None:
    loaded, _ = with_parts(tmp_path, "qwen3_vl", "lora", {"projector": "full"}, precision="bf16", attention="auto")
    plan = resolve(loaded.run, lookup(machine), read_model_facts(loaded.run.model))
    rows = {part.name: part for part in plan.parts}
    assert rows["vision"].attention.value == rows["language"].attention.value
    assert rows["vision"].dtype.value == "bf16"
    assert rows["projector"].dtype.value == "fp32"
    assert all(
        choice.reason for part in plan.parts for choice in (part.trained, part.dtype, part.attention, part.keep_fp32)
    )
