"""What a model's ``config.json`` says, as frozen data: the only thing about a model that the plan may look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """A causal language model as its config describes it.

    Attributes:
        name_or_path: as the user wrote it.
        model_type: transformers' ``model_type``.
        dtype: the checkpoint's own dtype, ``"bf16" | "fp16" | "fp32"``, or None where config.json does not say.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size: the usual sizes.
        tie_word_embeddings: whether the head is the embedding.
        num_parameters: all weights; exact where safetensors headers are at hand, else computed from the sizes.
        num_parameters_exact: which of the two.
        linear_layers: number of layers with linear attention or a state-space mixer (0: softmax attention only).
        sliding_window: window of local layers in tokens, or None.
        softcap: attention logit soft-capping value, or None.
        sinks: whether attention has learned sink logits (gpt_oss).
        attention_dropout: dropout on attention weights in training.
        num_experts, num_experts_per_token: 0 for dense models.
        quantization: quantisation method of the checkpoint, or None.
        max_position_embeddings: longest position the model was made for.
        raw: the whole parsed config.json (nested text_config already resolved into the fields above).
    """

    name_or_path: str
    model_type: str
    dtype: str | None
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    num_parameters: int
    num_parameters_exact: bool
    linear_layers: int = 0
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    attention_dropout: float = 0.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    quantization: str | None = None
    max_position_embeddings: int | None = None
    raw: dict | None = None
