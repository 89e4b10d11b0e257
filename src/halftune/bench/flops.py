"""Floating-point operations per token, by a stated convention."""

from __future__ import annotations

from dataclasses import dataclass

from halftune.config.facts.architecture import total_elements
from halftune.config.facts.model import ModelFacts


@dataclass(frozen=True)
class Flops:
    """Operations of training; a multiply-add counts as two.

    Attributes:
        body: per token without padding, for the weights of all layers.
        head: per trained token, for the output matrix: logits are computed at labels only.
        attention: per token without padding, for query-key and weight-value products.
        convention: description of what is counted.
    """

    body: float
    head: float
    attention: float
    convention: str

    def per_second(self, real: float, trained: float, seconds: float) -> float:
        """Return the FLOP/s of a run over ``real`` tokens, ``trained`` of them labelled."""
        return ((self.body + self.attention) * real + self.head * trained) / seconds


def training_flops(facts: ModelFacts, trained: int, *, adapter: bool, attended: float) -> Flops:
    """Return the operations of a step, without recomputation and padding.

    With N weights, a token costs 2N forward, 2N for the gradients of activations and 2N for those of weights, and
    attention 12·L·H·Q·T at sequence length T (Chowdhery et al. 2022, *PaLM*, appendix B). Frozen weights have no
    gradient: 4N, and 6 per adapter weight.

    Args:
        facts: the model.
        trained: number of trained weights.
        adapter: whether the base model's weights are frozen.
        attended: mean over tokens of their sample's length; packed samples attend to themselves only.
    """
    head = facts.vocab_size * facts.hidden_size
    body = _active(facts) - head * (1 if facts.tie_word_embeddings else 2)
    factor = 4 if adapter else 6
    softmax_layers = facts.num_layers - facts.linear_layers
    attention = 12.0 * softmax_layers * facts.num_heads * facts.head_dim * attended
    words = [
        f"4N + 6·adapter + 12·L·H·Q·T, weights frozen (N = {body:,} without the embedding)"
        if adapter
        else f"PaLM's 6N + 12·L·H·Q·T (N = {body:,} without the embedding)",
        f"T = {attended:,.0f}, the mean sample of a token",
        f"the head's {head:,} at trained tokens only",
        "padding and recomputation not counted",
    ]
    if facts.num_experts:
        words.append(f"{facts.num_experts_per_token} of {facts.num_experts} experts")
    if facts.linear_layers:
        words.append(f"attention of {softmax_layers} softmax layers only")
    return Flops(factor * body + (6 * trained if adapter else 0), factor * head, attention, "; ".join(words))


def _active(facts: ModelFacts) -> int:
    """Number of weights used per token: of experts, only those that it is routed to."""
    if not facts.num_experts:
        return facts.num_parameters
    experts = total_elements(tensor for tensor in facts.tensors if ".experts" in tensor.name)
    return facts.num_parameters - experts + experts * facts.num_experts_per_token // facts.num_experts
