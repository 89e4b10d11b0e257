"""The guard stands in front of the attention of towers: what reaches the kernels is what the plan says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from released_omni import released_tower
from standins.flash import flash_attn_installed
from tiny_audio import audio_model, rows_of, write_sound
from tiny_audio import write_rows as write_sounds
from tiny_images import ROWS, image_model, write_rows
from tiny_omni import CLASSES, omni_model

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.data.pipeline import prepare
from halftune.doctor.trace_model import trace_model
from halftune.hardware.catalogue import lookup
from halftune.methods import make_method
from halftune.model.adapters import attach_adapter
from halftune.model.attention.register import current_guard
from halftune.model.files.locate import media_of
from halftune.model.generate import autocast
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.train.batches.feed import Feed
from halftune.train.setup import media_inputs

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def flash() -> Iterator[ModuleType]:
    with flash_attn_installed() as pretend:
        yield pretend


HEARD = {
    "messages": [{"role": "user", "content": "<image><audio>Is it <audio>?"}, {"role": "assistant", "content": "No."}],
    "images": ["images/24x80.png"],
    "audios": ["0.9.wav", "0.4.wav"],
}


def recipe(folder: Path, kind: str, compute: str, adapter: str = "lora") -> tuple[Any, Plan]:
    model, hears = folder / "model", kind in CLASSES
    if not model.exists():
        if kind == "qwen3_asr":
            audio_model(model, kind)
            write_sounds(folder, rows_of(kind))
        else:
            omni_model(model, torch.bfloat16, kind) if hears else image_model(model, kind)
            write_rows(folder, [*ROWS, HEARD] if hears else ROWS)
        for name in HEARD["audios"]:
            write_sound(folder / name, float(Path(name).stem))
    tree = {
        "model": {"name_or_path": str(model)},
        "precision": compute,
        "adapter": adapter,
        "attention": "fa2",
        "data": {
            "train": str(folder / "rows.jsonl"),
            "images": kind != "qwen3_asr",
            "audio": hears or kind == "qwen3_asr",
            "max_length": 512,
        },
        "training": {"output_dir": str(folder / "run"), "gradient_checkpointing": False},
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(folder / "recipe.yaml")
    machine = lookup("a100")
    machine = replace(machine, packages=(*machine.packages, ("flash-attn", "2.8.3")))
    return loaded.run, resolve(loaded.run, machine, read_model_facts(loaded.run.model))


def step(run: Any, plan: Plan, flash: ModuleType) -> torch.nn.Module:
    """One forward and backward pass over all rows, in one packed row, on the CPU; forgets the calls before it."""
    tokenizer = load_tokenizer(run.model)
    data = prepare(run, tokenizer, images=media_of(run))
    feed = Feed(data.train, run, plan.batch, make_method(run.method), 0, images=media_inputs(run, tokenizer))
    (batch,) = feed.micro_batches(feed.rows(0))
    model = attach_adapter(load_model(run.model, plan), run.adapter, plan, 0)
    current_guard().watch(model)
    with autocast(plan.precision, torch.device("cpu")):
        policy = PolicyModel(model)
        policy.nll_sum(batch)  # the first looks at the head, too
        flash.calls.clear()
        loss = policy.nll_sum(batch)
    loss.backward()
    assert loss.isfinite()
    return model


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("compute", HALF)
@pytest.mark.parametrize("kind", [*CLASSES, "qwen3_asr", "qwen2_5_vl"])
def test_towers_call_the_plans_kernel_in_the_plans_format(
    flash: ModuleType, kind: str, compute: str, adapter: str, tmp_path: Path
) -> None:
    run, plan = recipe(tmp_path, kind, compute, adapter)
    assert plan.attention.softmax.value == "fa2"
    model = step(run, plan, flash)
    assert {dtypes for _, dtypes in flash.calls} == {(HALF[compute],) * 3}
    towers = {"visual", "audio_tower"} if kind in CLASSES else {"one"}
    assert Counter(name for name, _ in flash.calls) == {
        "flash_attn_varlen_func": 2 + len(towers)
    }  # two layers, each one
    report = current_guard().report()
    assert (report["casts"], report["sites"]) == (0, [])
    tables = {name: one for name, one in model.named_buffers() if "inv_freq" in name}
    assert kind == "qwen3_asr" or {"visual"} & {part for name in tables for part in name.split(".")}
    assert {one.dtype for one in tables.values()} == {torch.float32}


def half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    apply = import_module("flash_attn.layers.rotary").apply_rotary_emb
    width = cos.shape[-1] // 2
    return apply(x[None], cos[:, :width], sin[:, :width])[0]


def promoted(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]  # promoted


@pytest.mark.parametrize("rotate", [half, promoted])
def test_the_released_attention_of_omnis_tower_is_named(
    flash: ModuleType, rotate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As released with transformers 4.52: the vision attention calls flash_attn's functions by itself."""
    code = import_module("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")

    def released(self: Any, hidden_states: Any, cu_seqlens: Any, position_embeddings: Any, **_: Any) -> Any:
        attend = import_module("flash_attn").flash_attn_varlen_func
        heads = (hidden_states.shape[0], self.num_heads, -1)
        q, k, v = (layer(hidden_states).reshape(heads) for layer in (self.q, self.k, self.v))
        tables = [one.float() for one in position_embeddings]  # half
        q, k = (rotate(one, *tables) for one in (q, k))
        out = attend(q, k, v, cu_seqlens, cu_seqlens, 16, 16)
        return self.proj(out.reshape(heads[0], -1).to(hidden_states.dtype))

    monkeypatch.setattr(code.Qwen2_5OmniVisionAttention, "forward", released)
    run, plan = recipe(tmp_path, "qwen2_5_omni", "bf16")
    found = trace_model(run, plan).violations
    assert {one.site for one in found} == {"model.visual.blocks.*.attn"}
    target = "rotary" if rotate is half else "attention"
    lines = Path(__file__).read_text().splitlines()
    place = next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {rotate.__name__}"))
    assert {(one.target, Path(one.file), one.line) for one in found} == {(target, Path(__file__), place)}


@pytest.mark.parametrize("compute", HALF)
def test_under_a_plan_the_released_tower_has_tables_in_fp32(
    flash: ModuleType, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So doctor has nothing to say about the very file whose tables failed, and the guard nothing to do."""
    released_tower(tmp_path, monkeypatch)
    run, plan = recipe(tmp_path, "qwen2_5_omni", compute)
    assert not trace_model(run, plan).violations
    step(run, plan, flash)
    called = Counter(flash.calls)
    assert called.pop(("apply_rotary_emb", (torch.float32,) * 3)) == 2, "q and k"
    assert {dtypes for _, dtypes in called} == {(HALF[compute],) * 3}
    assert current_guard().report()["casts"] == 0
