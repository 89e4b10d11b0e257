"""The trace of models with images: their towers' attention is traced, and a rotary embedding that promotes is named."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tiny_audio
from tiny_images import ROWS, image_model, write_rows

from halftune.config.facts.media import AUDIO_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.doctor.inputs import _QWEN_VL
from halftune.doctor.trace_model import TraceReport, trace_model
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve


def traced(folder: Path, kind: str, *, images: bool = True, compute: str = "bf16") -> TraceReport:
    hears = kind in AUDIO_FAMILIES
    make, rows = (tiny_audio.audio_model, tiny_audio.write_rows) if hears else (image_model, write_rows)
    tree = {
        "model": {"name_or_path": str(make(folder / "model", kind))},
        "precision": compute,
        "adapter": "lora",
        "data": {
            "train": str(rows(folder, tiny_audio.rows_of(kind) if hears else ROWS)),
            "audio" if hears else "images": images,
        },
        "training": {"output_dir": str(folder / "run")},
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    run = load_config(folder / "recipe.yaml").run
    return trace_model(run, resolve(run, lookup("a100"), read_model_facts(run.model)))


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("qwen2_5_vl", "qwen3_5") else pytest.param(kind, marks=pytest.mark.slow) for kind in _QWEN_VL],
)
def test_the_towers_attention_is_traced(kind: str, tmp_path: Path) -> None:
    report = traced(tmp_path, kind)
    language = 1 if kind.startswith("qwen3_5") else 2  # softmax layers; the tower has one layer
    assert report.calls["attention, train"] == language + 1
    assert not report.violations


@pytest.mark.parametrize(
    ("kind", "compute"),
    [("qwen2_audio", "bf16"), ("qwen2_audio", "fp16"), ("qwen3_asr", "bf16"), ("glmasr", "fp16"), ("voxtral", "bf16")],
)
def test_an_audio_towers_attention_is_traced(kind: str, compute: str, tmp_path: Path) -> None:
    report = traced(tmp_path, kind, compute=compute)
    assert report.calls["attention, train"] == 2 + 1  # of the language model, and of the tower
    assert not report.violations
    assert not report.notes


def test_without_images_only_the_language_model_is_traced(tmp_path: Path) -> None:
    report = traced(tmp_path, "qwen2_5_vl", images=False)
    assert report.calls["attention, train"] == 2
    assert report.notes


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_a_towers_rotary_embedding_that_promotes_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = import_module(f"transformers.models.{kind}.modeling_{kind}")
    own = code.apply_rotary_pos_emb_vision

    def promoting(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return own(q.float(), k.float(), cos.float(), sin.float())  # and not back

    monkeypatch.setattr(code, "apply_rotary_pos_emb_vision", promoting)
    report = traced(tmp_path, kind)
    assert report.violations
    assert {Path(one.file).name for one in report.violations} == {Path(__file__).name}
