"""The first bug itself: the vision tower of transformers 4.52.4's Qwen2.5-Omni, on kernels with flash_attn's checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from released_omni import released_tower
from test_omni import inputs, thinker
from tiny_model import plan

from halftune.attention.contract import ENTRY_POINTS, ROTARY_ENTRY_POINT
from halftune.core.choice import Format
from halftune.precision.guard import Guard
from halftune.precision.patched import patched
from halftune.precision.trace.fake_tensors import FakeTensors
from halftune.precision.trace.findings import findings
from halftune.precision.trace.tracer import Tracer

HALF: dict[Format, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def released(flash: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    flash.version = (2, 7, 4)
    return released_tower(tmp_path, monkeypatch)


def whole(name: Format) -> Any:
    """The thinker, cast with all its buffers."""
    made: Any = thinker()
    return made.to(HALF[name])


@pytest.mark.parametrize("name", HALF)
def test_the_released_tower_fails_when_cast_whole(released: Path, name: Format) -> None:
    with pytest.raises(AssertionError, match="Input and cos/sin must have the same dtype"):
        whole(name)(**inputs(HALF[name]))


@pytest.mark.parametrize("name", HALF)
def test_doctor_names_the_released_line(released: Path, name: Format) -> None:
    tracer = Tracer(plan(name, name).precision, functions=ENTRY_POINTS, rotary=(ROTARY_ENTRY_POINT,))
    with FakeTensors() as mode:
        model = whole(name)
        mode.strip(model)
        given = inputs(HALF[name]).items()
        fake = {key: mode.from_tensor(one) if one.is_floating_point() else one for key, one in given}
        with tracer.phase("train", model, grad=True):
            model(**fake).logits.float().sum().backward()
    all_found = findings(tracer.arrivals, mode="cast", scale=1.0, objection=lambda arrival: "", training="train")
    (found,) = [one for one in all_found if one.target == "rotary"]
    lines = enumerate(released.read_text().splitlines(), 1)
    assert Path(found.file) == released
    assert found.line in [number for number, text in lines if text.strip() == "tensor_ = tensor.float()"]
    assert (found.operand, found.becomes, found.site) == ("x", "fp32", "model.visual.blocks.*.attn")
    assert found.layers == {"train": 2}


@pytest.mark.parametrize("name", HALF)
def test_the_guard_mends_it(released: Path, flash: Any, name: Format) -> None:
    guard, model = Guard("cast", name), whole(name)
    guard.watch(model)
    with patched(guard, ENTRY_POINTS, (ROTARY_ENTRY_POINT,)):
        assert model(**inputs(HALF[name])).logits.isfinite().all()
    sites = {one["site"]: (one["casts"], one["arrived"]) for one in guard.report()["sites"]}
    arrived = f"x fp32, cos {name}, sin {name}"
    assert sites == {f"model.visual.blocks.{index}.attn": (2, arrived) for index in range(2)}  # q and k
    at = {called: {dtypes for each, dtypes in flash.calls if each == called} for called, _ in flash.calls}
    assert at == {"apply_rotary_emb": {(torch.float32,) * 3}, "flash_attn_varlen_func": {(HALF[name],) * 3}}
