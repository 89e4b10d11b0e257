"""Warnings of a plan: what no decision says by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halftune.attention.contract import AttentionPlan
from halftune.config.facts.families import other_class
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.hardware import Hardware
from halftune.plan.first_rate import rate_warning
from halftune.precision import PrecisionPlan

_OLD_CUDA = (7, 5)
_BROKEN_GRAPHS = (
    "training.torch_compile with packed rows: attention by segments or by a block mask ends a graph in every layer: "
    "compiling takes minutes, and little is fused; data.packing: false compiles whole layers."
)
_UNFUSED_FLOAT8 = (
    "precision.linear: fp8 in full fine-tuning without training.torch_compile: torchao rounds each factor of a product "
    "by 16 kernels, and a step takes longer than in bf16; set training.torch_compile: true."
)


def _of_the_machine(hardware: Hardware, world_size: int, machines: int) -> Iterator[str]:
    for note in hardware.notes:
        yield f"{note[0].upper()}{note[1:]}."
    everyone = len(hardware.devices) * machines
    if hardware.kind != "cpu" and world_size < everyone:
        yield f"{world_size} of {everyone} devices is used (distributed.num_processes)."
    old = [device.name for device in hardware.devices if device.capability and device.capability < _OLD_CUDA]
    if old:
        yield f"{old[0]}: torch's CUDA 13 builds have no kernels below compute capability 7.5; use a CUDA 12 build."


def _of_the_class(config: RunConfig, facts: ModelFacts, raw: dict[str, Any]) -> Iterator[str]:
    """Warnings about the parts of a checkpoint that the loaded class does not have."""
    if not facts.scores and (other := other_class(raw, facts.multimodal)):
        named, loaded = other
        yield f"config.json names the class {named}; {loaded} is loaded, with a head for tokens."
    if heads := facts.prediction_heads:
        stored = facts.quantization if config.model.quantization == "none" else None
        named = f"{len(heads)} tensors for multi-token prediction, first {heads[0]}"
        left_out = f"{named}: not trained, and left out of merged models, as the base is in {stored}."
        yield left_out if stored else f"{named}: not trained, saved unchanged."


def plan_warnings(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, world_size: int, verdict: Choice[str]
) -> list[str]:
    """What the parts do not see by themselves."""
    warnings = [*_of_the_machine(hardware, world_size, config.distributed.num_machines)]
    longest = facts.max_position_embeddings
    if longest and config.data.max_length > longest:
        warnings.append(
            f"data.max_length is {config.data.max_length:,}, and the model was made for {longest:,} positions."
        )
    warnings += [*_unembedded(facts), *rate_warning(config)]
    raw: dict[str, Any] = facts.raw or {}
    if not (config.model.trust_remote_code and "auto_map" in raw):
        warnings += _of_the_class(config, facts, raw)
    if verdict.value == "does not fit":
        warnings.append(f"The run is not expected to fit: {verdict.reason}.")
    return warnings


def _unembedded(facts: ModelFacts) -> list[str]:
    """What is to be said of a tokenizer that knows more tokens than the model has embeddings."""
    rows, tokens = facts.vocab_size, facts.tokens
    if tokens is None or tokens.all <= rows:
        return []
    if tokens.ordinary > rows:
        said = (
            f"The tokenizer has {tokens.ordinary:,} tokens, the model {rows:,} embeddings: text with one of the others"
        )
        return [f"{said} stops the run (model.tokenizer names the tokenizer that the model was trained with)."]
    said = f"The tokenizer's added tokens go up to id {tokens.all - 1:,}, the model has {rows:,} embeddings"
    return [f"{said}: a row with one of the others stops the run; padding may be one."]


def of_compiling(
    config: RunConfig, facts: ModelFacts, attention: AttentionPlan, precision: PrecisionPlan
) -> Iterator[str]:
    """What torch.compile breaks where it is asked for, and what is slow without it."""
    if precision.trains_in_float8 and not config.training.torch_compile:
        yield _UNFUSED_FLOAT8
    outside = attention.softmax.value in ("eager", "flex") or facts.attention_dropout > 0
    if config.training.torch_compile and attention.varlen.value in ("segments", "block_mask") and outside:
        yield _BROKEN_GRAPHS
