"""Qwen2.5-Omni's thinker: rotary tables cast with the module, the input upcast before flash_attn's rotary helper.

The real architecture with tiny random weights. Its vision blocks rotate with flash_attn's helper, as they did with the
releases of transformers that imported it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from tiny_model import plan
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni

from halftune.attention.contract import ENTRY_POINTS, ROTARY_ENTRY_POINT
from halftune.core.errors import DtypeContractError
from halftune.doctor.inputs import inputs_for
from halftune.precision.guard import Guard
from halftune.precision.patched import patched
from halftune.precision.report import check_dtypes
from halftune.precision.trace.fake_tensors import FakeTensors
from halftune.precision.trace.findings import Finding, findings
from halftune.precision.trace.tracer import Tracer

BF16 = torch.bfloat16
TEXT = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}}
TOKENS = {"image_token_id": 150, "video_token_id": 151, "audio_token_id": 152, "vision_start_token_id": 153}
EDGES = {"vision_end_token_id": 154, "audio_start_token_id": 155, "audio_end_token_id": 156}


def thinker_config() -> Qwen2_5OmniThinkerConfig:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 32}
    return Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, **HEADS, **ROPE},
        vision_config={**vision, "fullatt_block_indexes": [1], "window_size": 28},
        audio_config={**audio, "num_mel_bins": 16, "n_window": 50},
        **TOKENS,
        **EDGES,
    )


def thinker() -> Qwen2_5OmniThinkerForConditionalGeneration:
    torch.manual_seed(0)
    return Qwen2_5OmniThinkerForConditionalGeneration._from_config(thinker_config(), dtype=torch.float32)


def rotated(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    apply = import_module("flash_attn.layers.rotary").apply_rotary_emb
    half = cos.shape[-1] // 2
    wide = tensor.float()  # promotes x
    return apply(wide[None], cos[:, :half], sin[:, :half])[0].type_as(tensor)


@pytest.fixture
def old_helper(flash, monkeypatch: pytest.MonkeyPatch):
    """The vision blocks rotate q and k by the helper of flash-attn 2.7.4, by tables in the dtype of their frequencies.

    Releases of transformers from before 5 did both.
    """
    flash.version = (2, 7, 4)
    tables = omni.Qwen2_5OmniVisionRotaryEmbedding.forward

    def as_stored(self, x: torch.Tensor, position_ids: torch.Tensor):
        cos, sin = tables(self, x, position_ids)
        return cos.to(self.inv_freq.dtype), sin.to(self.inv_freq.dtype)

    monkeypatch.setattr(omni.Qwen2_5OmniVisionRotaryEmbedding, "forward", as_stored)

    def both(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        return rotated(q, cos, sin), rotated(k, cos, sin)

    monkeypatch.setattr(omni, "apply_rotary_pos_emb_vision", both)
    return flash


def inputs(dtype: torch.dtype) -> dict:
    made = inputs_for(thinker_config())
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


def parameters_cast(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    return model


def test_a_module_that_was_cast_whole_fails_on_the_raw_helper(old_helper) -> None:
    with pytest.raises(AssertionError) as caught:
        thinker().to(BF16)(**inputs(BF16))
    assert str(caught.value) == "Input and cos/sin must have the same dtype, got torch.float32 and torch.bfloat16"


def test_halftune_refuses_a_module_that_was_cast_whole() -> None:
    precision = plan("bf16", "bf16").precision
    check_dtypes(parameters_cast(thinker()), precision)
    with pytest.raises(DtypeContractError, match="rotary table is bfloat16; must be float32"):
        check_dtypes(thinker().to(BF16), precision)


def test_with_parameters_cast_text_pictures_and_sound_run(old_helper) -> None:
    out = parameters_cast(thinker())(**inputs(BF16)).logits
    assert out.isfinite().all()
    assert {dtypes for name, dtypes in old_helper.calls} == {(torch.float32,) * 3}


def test_guarded_it_runs_whatever_was_cast(old_helper) -> None:
    guard, model = Guard("cast", "bf16"), thinker().to(BF16)
    guard.watch(model)
    with patched(guard, ENTRY_POINTS, (ROTARY_ENTRY_POINT,)):
        out = model(**inputs(BF16))
    assert out.logits.isfinite().all()
    assert {dtypes for _, dtypes in old_helper.calls} == {(torch.float32,) * 3}, "the tables took the input's dtype"
    sites = {site.pop("site"): site for site in guard.report()["sites"]}
    assert list(sites) == ["model.visual.blocks.0.attn", "model.visual.blocks.1.attn"]
    assert {(site["casts"], site["arrived"]) for site in sites.values()} == {(2, "x fp32, cos bf16, sin bf16")}, (
        "q and k of two blocks"
    )


def test_the_line_that_upcasts_is_named(old_helper, traced_omni) -> None:
    (finding,) = [one for one in traced_omni(lambda: thinker().to(BF16)) if one.target == "rotary"]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# promotes x"))
    assert (finding.operand, finding.op, finding.becomes, finding.cause) == ("x", "float(bf16)", "fp32", "asked for")
    assert (Path(finding.file), finding.line) == (Path(__file__), line)
    assert (finding.site, finding.layers) == ("model.visual.blocks.*.attn", {"train": 2})


class Counting(Guard):
    """Adds up what its casts write."""

    written = 0

    def _handle_cast(self, site, target, operands, dtype):
        dtype = super()._handle_cast(site, target, operands, dtype)
        for operand in operands.values():
            if operand.dtype is not dtype:
                self.written += operand.numel() * (dtype.itemsize + operand.requires_grad * operand.dtype.itemsize)
        return dtype


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen tower"])
def test_the_cost_in_a_tower_is_what_the_guard_writes(old_helper, traced_omni, frozen: bool) -> None:
    def make() -> torch.nn.Module:
        model = thinker().to(BF16)
        model.model.visual.requires_grad_(not frozen)
        return model

    guard = Counting("cast", "bf16")
    with patched(guard, ENTRY_POINTS, (ROTARY_ENTRY_POINT,)):
        make()(**inputs(BF16))
    (finding,) = [one for one in traced_omni(make) if one.target == "rotary"]
    tables = 2 * 2 * 2 * 16 * 8 * 4  # cos and sin of q and k in two blocks, 16 patches, 8 frequencies, fp32
    assert finding.bytes_per_step == guard.written == tables
    assert finding.guard == "casts cos and sin to fp32"
    assert finding.passes == (("forward",) if frozen else ("forward", "backward"))


@pytest.fixture
def traced_omni():
    def trace(make) -> list[Finding]:
        tracer = Tracer(plan("bf16", "bf16").precision, functions=ENTRY_POINTS, rotary=(ROTARY_ENTRY_POINT,))
        given = inputs(BF16)
        with FakeTensors() as mode:
            model = make()
            mode.strip(model)
            fake = {name: mode.from_tensor(x) if x.is_floating_point() else x for name, x in given.items()}
            with tracer.phase("train", model, grad=True):
                model(**fake).logits.float().sum().backward()
        return findings(tracer.arrivals, mode="cast", scale=1.0, objection=lambda arrival: "", training="train")

    return trace
