"""The memory estimate: its parts, and that it moves the way memory moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halftune.config.facts.model import ModelFacts, facts_from_config
from halftune.hardware import Kind
from halftune.hardware.memory import Workload, estimate

RAW = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 4096,
}
LORA = Workload(
    kind="cuda",
    storage=2,
    trainable=4,
    compute=2,
    autocast=True,
    trained=100_000,
    adapter=100_000,
    optimizer_state=800_000,
    tokens=8192,
    length=1024,
    labelled=0.5,
    accumulation=1,
    attention="sdpa",
    checkpointing=False,
)


def facts(**extra: Any) -> ModelFacts:
    return facts_from_config({**RAW, **extra}, "here")


FULL = replace(LORA, storage=4, trained=facts().num_parameters, adapter=0, optimizer_state=8 * facts().num_parameters)


def test_weights_gradients_and_moments_are_exact() -> None:
    count = facts().num_parameters
    lora, full = estimate(LORA, facts()), estimate(FULL, facts())
    assert (lora.weights, lora.gradients, lora.optimizer) == (2 * count + 400_000, 400_000, 800_000)
    assert (full.weights, full.gradients, full.optimizer) == (4 * count, 4 * count, 8 * count)
    assert estimate(replace(FULL, optimizer_state=0), facts()).optimizer == 0


def test_the_total_is_the_sum_less_the_overlap() -> None:
    made = estimate(FULL, facts())
    parts = (made.weights, made.gradients, made.optimizer, made.activations, made.logits, made.overhead)
    assert made.total == sum(parts) - made.overlap
    assert made.overlap == made.gradients < made.activations
    assert estimate(replace(FULL, accumulation=2), facts()).overlap == 0


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ({"checkpointing": True}, {}),
        ({"tokens": 4096}, {}),
        ({}, {"attention": "eager"}),
        ({}, {"adapted_inputs": 10_000}),
        ({"compute": 2}, {"compute": 4, "storage": 4, "autocast": False}),
    ],
)
def test_activations_move_the_right_way(smaller: dict[str, Any], larger: dict[str, Any]) -> None:
    assert (
        estimate(replace(LORA, **smaller), facts()).activations < estimate(replace(LORA, **larger), facts()).activations
    )


def test_activations_grow_with_tokens_not_with_length() -> None:
    once, twice = estimate(LORA, facts()), estimate(replace(LORA, tokens=16384), facts())
    assert twice.activations == pytest.approx(2 * once.activations, rel=1e-6)
    assert estimate(replace(LORA, length=2048), facts()).activations == once.activations


def test_logits_exist_where_a_label_is() -> None:
    """Of rows side by side a position is kept where any row has a label; of a packed row only the labelled ones."""
    packed = replace(LORA, packed=True, half_range=True)
    assert estimate(packed, facts()).logits < estimate(replace(LORA, half_range=True), facts()).logits
    everything = estimate(replace(packed, labelled=1.0), facts()).logits
    assert everything - estimate(packed, facts()).logits == 4096 * (4096 + 256) * 2


def test_a_plain_heads_logits_are_never_held() -> None:
    """Unless fp16 computes, or the model caps or scales them."""
    plain, capped = facts(), facts(final_logit_softcapping=30.0)
    rows = 4096 * 4096 * 2  # half of the tokens, the vocabulary, bytes
    packed = replace(LORA, packed=True)
    assert estimate(packed, capped).logits - estimate(packed, plain).logits == rows
    assert estimate(replace(packed, half_range=True), plain).logits - estimate(packed, plain).logits == rows


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fused_layers_keep_less(kind: Kind) -> None:
    """Two products of four of a feed-forward block; on CUDA the inputs of norms in bf16, not in fp32."""
    work, found = replace(LORA, kind=kind), facts()
    saved = estimate(work, found).activations - estimate(replace(work, fused=True), found).activations
    norms = 2 * found.num_layers + 1 if kind == "cuda" else 0
    products = found.num_layers * 2 * found.intermediate_size * LORA.compute
    assert saved == pytest.approx(work.tokens * (products + 2 * norms * found.hidden_size), rel=0.02)


def test_weights_in_float8_take_half() -> None:
    saved = estimate(LORA, facts()).weights - estimate(replace(LORA, float8=1000), facts()).weights
    assert saved == 1000


def test_quantised_linear_layers_are_small() -> None:
    quantised = facts(quantization_config={"quant_method": "bitsandbytes"})
    linear = 8 * (4 * 256 * 256 + 3 * 256 * 1024)  # embedding, output layer and norms stay in bf16
    saved = estimate(LORA, facts()).weights - estimate(LORA, quantised).weights
    assert saved == pytest.approx(linear * (2 - 0.56), abs=1)


def test_experts_cost_what_is_active() -> None:
    sparse = facts(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    dense, few = estimate(LORA, facts()), estimate(LORA, sparse)
    assert few.weights > 3 * dense.weights
    assert dense.activations < few.activations < 2 * dense.activations


def test_dora_keeps_two_outputs_of_every_adapted_layer() -> None:
    dora, saving = replace(LORA, dora_outputs=1000), replace(LORA, checkpointing=True)
    more = estimate(dora, facts()).activations - estimate(LORA, facts()).activations
    assert more >= LORA.tokens * 1000 * 2 * LORA.compute
    once = estimate(replace(saving, dora_outputs=1000), facts()).activations - estimate(saving, facts()).activations
    assert once == pytest.approx(2 * more / facts().num_layers, rel=1e-3)  # of one layer, and their gradients


def test_what_scans_keep_and_work_with() -> None:
    """Every linear layer keeps; one works, where the tensors of the layer behind it are gone already."""
    hybrid = replace(facts(), linear_layers=4)
    plain = replace(LORA, tokens=128)

    def activations(**changes: Any) -> int:
        return estimate(replace(plain, **changes), hybrid).activations

    assert activations(scan_kept=1 << 20) == activations() + (4 << 20)
    recomputed = {"checkpointing": True}
    assert activations(scan_kept=1 << 20, **recomputed) == activations(**recomputed) + (1 << 20)
    small, large = activations(scan_workspace=1 << 10), activations(scan_workspace=1 << 30)
    assert small == activations(scan_workspace=1) < activations()  # what is counted apart is not guessed as well
    assert large > small + (1 << 29)
