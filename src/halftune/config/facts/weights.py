"""The weight tensors of a decoder, as its modeling code builds them: names and shapes without building anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

TensorKind = Literal["linear", "embedding", "parameter"]


@dataclass(frozen=True)
class Tensor:
    """Equal weight tensors, one per layer in ``layers``.

    Attributes:
        name: full parameter name; ``*`` stands for the layer's number.
        shape: as torch has it, so ``[out, in]`` for a linear layer.
        layers: numbers of the layers that have it; empty for a tensor outside the layers.
        kind: ``linear`` for the weight of an ``nn.Linear`` (or transformers' ``Conv1D``), which an adapter can wrap;
            ``embedding`` for a look-up table; ``parameter`` for all else (norms, biases, fused experts, routers).
    """

    name: str
    shape: tuple[int, ...]
    layers: tuple[int, ...] = ()
    kind: TensorKind = "parameter"

    @property
    def count(self) -> int:
        """How many such tensors there are."""
        return len(self.layers) or 1

    @property
    def size(self) -> int:
        """Elements of one of them."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """Name of the module that owns it, ``*`` for the layer's number."""
        return self.name.rpartition(".")[0]

    def modules(self) -> Iterable[str]:
        """The owning modules' names, one per layer."""
        if not self.layers:
            return (self.module,)
        return (self.module.replace("*", str(layer), 1) for layer in self.layers)


@dataclass
class Sheet:
    """Collects the tensors of a model while a family's description is read out."""

    tensors: list[Tensor] = field(default_factory=list)

    def linear(
        self, module: str, n_in: int, n_out: int, *, layers: Sequence[int] = (), bias: bool = False, tensor: str = ""
    ) -> None:
        """A linear layer ``[out, in]``; ``tensor`` overrides the name of its weight."""
        self.tensors.append(Tensor(f"{module}.{tensor or 'weight'}", (n_out, n_in), tuple(layers), "linear"))
        if bias:
            self.parameter(f"{module}.bias", n_out, layers=layers)

    def embedding(self, module: str, rows: int, width: int) -> None:
        """A look-up table ``[rows, width]``."""
        self.tensors.append(Tensor(f"{module}.weight", (rows, width), (), "embedding"))

    def parameter(self, name: str, *shape: int, layers: Sequence[int] = ()) -> None:
        """A bare parameter."""
        self.tensors.append(Tensor(name, shape, tuple(layers)))

    def norm(self, module: str, width: int, *, layers: Sequence[int] = (), bias: bool = False) -> None:
        """An RMSNorm, or a LayerNorm with its bias."""
        self.parameter(f"{module}.weight", width, layers=layers)
        if bias:
            self.parameter(f"{module}.bias", width, layers=layers)


@dataclass(frozen=True)
class Family:
    """How a Llama-like family builds its layers. A string in a bias field is the config key that switches it.

    Attributes:
        qkv_bias, o_bias, mlp_bias: biases of the projections.
        qk_norm: norm of queries and keys: none, per head (``head``) or over all heads (``full``).
        norms: the layer's norms over the hidden size.
        norm: ``rms`` (weight), ``layer`` (weight and bias) or ``none`` (no parameters).
        mlp: ``gated`` (gate, up, down), ``fused`` (gate and up in one, phi3), ``plain`` (c_fc, c_proj).
        fused_qkv: q, k and v in one matrix.
        out_gate: the query projection also makes a gate for the output (qwen3_next).
        sinks: learned sink logits per head.
        defaults: what transformers assumes where config.json is silent.
        moe: experts, see ``halftune.config.facts.families``.
    """

    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: Literal["", "head", "full"] = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: Literal["rms", "layer", "none"] = "rms"
    mlp: Literal["gated", "fused", "plain"] = "gated"
    fused_qkv: bool = False
    out_gate: bool = False
    sinks: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    moe: str = ""


@dataclass(frozen=True)
class Sizes:
    """The numbers that a Llama-like description needs, defaults filled in."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool


def attention(sheet: Sheet, family: Family, raw: dict[str, Any], sizes: Sizes, layers: Sequence[int]) -> None:
    """Softmax attention of the given layers."""
    if not layers:
        return
    place = "model.layers.*.self_attn"
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    bias, out_bias = switched(family.qkv_bias, raw), switched(family.o_bias, raw)
    if family.fused_qkv:
        sheet.linear(f"{place}.qkv_proj", sizes.hidden, q + 2 * kv, layers=layers, bias=bias)
    else:
        gated = 2 if family.out_gate else 1
        sheet.linear(f"{place}.q_proj", sizes.hidden, q * gated, layers=layers, bias=bias)
        sheet.linear(f"{place}.k_proj", sizes.hidden, kv, layers=layers, bias=bias)
        sheet.linear(f"{place}.v_proj", sizes.hidden, kv, layers=layers, bias=bias)
    sheet.linear(f"{place}.o_proj", q, sizes.hidden, layers=layers, bias=out_bias)
    if family.qk_norm:
        whole = family.qk_norm == "full"
        sheet.norm(f"{place}.q_norm", q if whole else sizes.head_dim, layers=layers)
        sheet.norm(f"{place}.k_norm", kv if whole else sizes.head_dim, layers=layers)
    if family.sinks:
        sheet.parameter(f"{place}.sinks", sizes.heads, layers=layers)


def feed_forward(
    sheet: Sheet, family: Family, raw: dict[str, Any], hidden: int, width: int, layers: Sequence[int], place: str
) -> None:
    """A dense feed-forward block at module ``place``."""
    if not layers:
        return
    bias = switched(family.mlp_bias, raw)
    if family.mlp == "fused":
        sheet.linear(f"{place}.gate_up_proj", hidden, 2 * width, layers=layers, bias=bias)
        sheet.linear(f"{place}.down_proj", width, hidden, layers=layers, bias=bias)
        return
    names = ("c_fc",) if family.mlp == "plain" else ("gate_proj", "up_proj")
    for name in names:
        sheet.linear(f"{place}.{name}", hidden, width, layers=layers, bias=bias)
    sheet.linear(
        f"{place}.{'c_proj' if family.mlp == 'plain' else 'down_proj'}", width, hidden, layers=layers, bias=bias
    )


def frame(sheet: Sheet, family: Family, sizes: Sizes) -> None:
    """Embedding, head and all norms over the hidden size."""
    layers = range(sizes.layers)
    sheet.embedding("model.embed_tokens", sizes.vocab, sizes.hidden)
    if family.norm != "none":
        for name in family.norms:
            sheet.norm(f"model.layers.*.{name}", sizes.hidden, layers=layers, bias=family.norm == "layer")
        sheet.norm("model.norm", sizes.hidden, bias=family.norm == "layer")
    if not sizes.tied:
        sheet.linear("lm_head", sizes.hidden, sizes.vocab)


def switched(bias: str | bool, raw: dict[str, Any]) -> bool:
    """Whether a bias is there: fixed by the family, or by a key of its config."""
    return bool(raw.get(bias, False)) if isinstance(bias, str) else bias
