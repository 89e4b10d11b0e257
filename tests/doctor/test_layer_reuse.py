"""A trace of one layer of each kind says what a trace of all layers says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standins.remote_code_models import stranger

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.doctor.trace_model import TraceReport, trace_model
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.precision.trace import layer_reuse

pytestmark = pytest.mark.usefixtures("own_module_cache")

SIZES = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TEXT = {**SIZES, "intermediate_size": 48, "vocab_size": 64}
KINDS = ["sliding_attention", "full_attention"] * 2
HYBRID = ["linear_attention", "full_attention"] * 3
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, adapter: str, **section: Any
) -> tuple[TraceReport, TraceReport, int]:
    """Of all layers, of one of each kind, and how many runs of a layer were spared."""
    tree = {
        "model": {"name_or_path": str(folder), "tokenizer": "builtin:qwen2-tiny", **section},
        "precision": "bf16",
        "adapter": adapter,
        "data": {"train": "builtin:python-docs"},
        "training": {"output_dir": "run"},
    }
    (folder.parent / "x.yaml").write_text(json.dumps(tree))
    config = load_config(folder.parent / "x.yaml").run
    plan = resolve(config, lookup("a100"), read_model_facts(config.model))
    spared: list[str] = []
    original = layer_reuse.LayerReuse._replay
    monkeypatch.setattr(layer_reuse.LayerReuse, "_replay", lambda *args: spared.append(args[2]) or original(*args))
    one = replace(trace_model(config, plan), seconds=0.0)
    monkeypatch.setattr(layer_reuse, "_FEWEST", 1000)
    return replace(trace_model(config, plan), seconds=0.0), one, len(spared)


@pytest.mark.parametrize(
    ("kind", "adapter", "more", "spared"),
    [
        pytest.param("qwen2", "lora", {}, 3 * 4, marks=pytest.mark.slow),
        ("gemma3_text", "none", {"layer_types": KINDS, "num_hidden_layers": len(KINDS)}, 3),
        pytest.param("qwen3_5_text", "none", {**LINEAR, "layer_types": HYBRID}, 3 * 3, marks=pytest.mark.slow),
    ],
)
def test_clean_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, adapter: str, more: dict, spared: int
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind, **TEXT, **more}))
    all_of_them, one, times = both(tmp_path / "model", monkeypatch, adapter)
    assert one == all_of_them
    assert times >= spared, "three forward passes, most of their layers from others"
    assert sum(one.calls.values()) == 3 * {**TEXT, **more}["num_hidden_layers"]


LATER = "x = x.float() if position == 3 else x\n            x = x + block(x)"
STRAYS = {
    "everywhere": ("", "q = F.layer_norm(q, q.shape[-1:])  # promotes q", [0, 1, 2, 3, 4, 5], True),
    "by its own index": ("", "q = q.float() if self.index % 3 == 2 else q  # promotes q", [2, 5], False),
    "by a look at its index": ("", "q = q.float() if getattr(self, 'index') == 4 else q  # promotes q", [4], False),
    "by an attribute": ("self.wide = index in (1, 4)", "q = q.float() if self.wide else q  # promotes q", [1, 4], True),
    "by the shape of a weight": (
        "self.extra = nn.Parameter(torch.ones(index // 4))",
        "q = q.float() if len(self.extra) else q  # promotes q",
        [4, 5],
        True,
    ),
    "from a layer on": ("", "v = v + x.view(v.shape)", [3, 4, 5], True),
}

PLAIN = {"everywhere", "by its own index", "from a layer on"}


@pytest.mark.parametrize(
    "case", [*sorted(PLAIN), *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(STRAYS.keys() - PLAIN))]
)
def test_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    made, attended, layers, some_spared = STRAYS[case]
    attend = f"{attended}\nfrom flash_attn import flash_attn_func\nout = flash_attn_func(q, k, v, causal=True)"
    made = f"self.index = index\n{made}".strip()
    folder = stranger(tmp_path / "model", attend, made=made, vocab_size=64, layers=6).folder
    code = next(folder.glob("modeling_*.py"))
    text = code.read_text()
    if case == "from a layer on":
        text = text.replace("for block in self.blocks:", "for position, block in enumerate(self.blocks):")
        text = text.replace("\n            x = x + (checkpoint(block", f"\n            {LATER}  # ")
        text = text.replace("x = self.embedding(input_ids)", "x = self.embedding(input_ids).bfloat16()")
    code.write_text(text)
    all_of_them, one, spared = both(folder, monkeypatch, "none", trust_remote_code=True)
    assert one == all_of_them
    assert (spared > 0) is some_spared
    (found,) = one.violations
    assert found.layers == {"train": len(layers), "chat": len(layers)}
    line = text.splitlines()[found.line - 1]
    assert "position == 3" in line if case == "from a layer on" else line.endswith("# promotes q")


def test_a_place_of_its_own_for_each_promotion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal layers get equal inputs, which two lines have promoted."""
    attend = "from flash_attn import flash_attn_func\nout = flash_attn_func(q, k, v + x.view(v.shape), causal=True)"
    folder = stranger(tmp_path / "model", attend, vocab_size=64, layers=6).folder
    code = next(folder.glob("modeling_*.py"))
    text = code.read_text().replace("for block in self.blocks:", "for position, block in enumerate(self.blocks):")
    text = text.replace(
        "\n            x = x + (checkpoint(block",
        "\n            x = x.float() if position == 2 else x"
        "\n            x = x.bfloat16().float() if position == 4 else x"
        "\n            x = x + block(x)  # ",
    )
    code.write_text(text.replace("x = self.embedding(input_ids)", "x = self.embedding(input_ids).bfloat16()"))
    all_of_them, one, spared = both(folder, monkeypatch, "none", trust_remote_code=True)
    assert one == all_of_them
    assert spared
    lines = {text.splitlines()[found.line - 1].rpartition(" if ")[2]: found.layers["train"] for found in one.violations}
    assert lines == {"position == 2 else x": 2, "position == 4 else x": 2}
