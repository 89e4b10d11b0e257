"""Qwen trained with LoRA, then chatted with through FlashAttention, with nobody passing a dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_model import because, checkpoint, finished_run, plan
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import flash_attention_mask

from halftune.attention.flash import FlashAttention, flash_attn_varlen
from halftune.config.builtin_models import VOCAB_SIZE
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.doctor.trace_model import objection
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.model.attention.register import current_guard
from halftune.model.result.completed_run import open_run
from halftune.plan import resolve
from halftune.precision.trace.findings import findings
from halftune.precision.trace.tracer import Tracer

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def raw_kernel(flash):
    """The stand-in under a name in transformers' interface, with nothing in front of it."""
    kernel = FlashAttention(flash_attn_varlen())
    AttentionInterface.register("raw_fa", kernel.batch)
    AttentionMaskInterface.register("raw_fa", flash_attention_mask)
    yield flash
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("raw_fa", None)


def test_an_fp32_checkpoint_without_a_dtype_fails_on_the_raw_kernel(raw_kernel, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "merged", F32)  # what merging an adapter leaves behind
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="raw_fa")
    with pytest.raises(RuntimeError) as caught:
        model.generate(torch.arange(8)[None], max_new_tokens=3, do_sample=False)
    assert str(caught.value) == "FlashAttention only support fp16 and bf16 data type"


@pytest.mark.parametrize(
    ("adapter", "own"),
    [
        ("lora", F32),
        ("none", torch.float16),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("lora", torch.float16), ("lora", BF16), ("none", F32), ("none", BF16))
        ],
    ],
)
def test_a_run_of_halftunes_chats_in_the_plans_format(
    flash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: torch.dtype, adapter: str
) -> None:
    base = checkpoint(tmp_path / "base", own, vocab_size=VOCAB_SIZE)
    folder = finished_run(tmp_path / "run", base, adapter=adapter, precision="bf16")
    run = open_run(folder)
    attention = replace(run.plan.attention, softmax=because("fa2"), provider=because("flash_attn"))
    session = open_session(replace(run, plan=replace(run.plan, attention=attention)))
    flash.calls.clear()
    for tuned in (True, False):
        assert isinstance(session.answer("What is a list?", tuned=tuned), str)
    assert {dtypes for _, dtypes in flash.calls} == {(BF16, BF16, BF16)}
    assert len(flash.calls) >= 4, "two layers, with the training and without"
    assert current_guard().report()["casts"] == 0


def test_nobody_passes_a_dtype(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", F32)
    (tmp_path / "x.yaml").write_text(
        f"model: {{name_or_path: {base}, tokenizer: 'builtin:qwen2-tiny'}}\n"
        "attention: fa2\nadapter: lora\ndata: {train: builtin:python-docs}\ntraining: {output_dir: run}\n"
    )
    config = load_config(tmp_path / "x.yaml").run
    made = resolve(config, lookup("a100"), read_model_facts(config.model))
    assert (made.precision.compute.value, made.attention.softmax.value) == ("bf16", "fa2")


@pytest.mark.parametrize(("operand", "projection"), [("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")])
def test_the_line_that_computes_in_fp32_is_named(tmp_path: Path, operand: str, projection: str) -> None:
    """Nothing promotes where nobody passes a dtype: the weights were read in fp32, and autocast is off in a chat."""
    folder = checkpoint(tmp_path / "merged", F32)
    precision = replace(plan("bf16", "fp32").precision, autocast=because(False))
    tracer = Tracer(precision)
    AttentionInterface.register("traced", tracer.attention)
    AttentionMaskInterface.register("traced", lambda *args, **kwargs: None)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="traced").eval()
        with tracer.phase("chat", model, grad=False):
            model(torch.arange(8)[None])
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("traced", None)
    found = findings(tracer.arrivals, mode="cast", scale=1.0, objection=objection, training="train")
    (finding,) = [one for one in found if one.operand == operand]
    assert (finding.arrives, finding.computes, finding.layers) == ("fp32", "bf16", {"chat": 2})
    assert finding.file.endswith("modeling_qwen2.py")
    assert f"self.{projection}(hidden_states)" in finding.source
    assert f"self_attn.{projection}.weight" in finding.cause
    assert finding.cause.endswith("are fp32 and autocast is off"), "weight and bias"
    assert finding.raw == "FlashAttention only support fp16 and bf16 data type"
