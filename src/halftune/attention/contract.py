"""FlashAttention-2's argument checks as data, in its order and with its messages, and its one silent error.

Read from the sources of flash-attn 2.8.3 (``csrc/flash_attn/flash_api.cpp``: ``mha_fwd``, ``mha_varlen_fwd``,
``mha_bwd``; ``flash_attn/ops/triton/rotary.py``). Routing, guard, doctor and the tests' fake package use this file.
Before the checks, the package's Python code makes the last dimension contiguous and pads the head size to a multiple of
8 with zeros. It does not cast dtypes.

``AttentionPlan`` holds the backends that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from halftune.core.choice import Choice

Pass = Literal["forward", "varlen", "backward"]
EVERY: tuple[Pass, ...] = ("forward", "varlen", "backward")
FORWARDS: tuple[Pass, ...] = ("forward", "varlen")
DTYPES = ("float16", "bfloat16")
LOWEST_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
PAGE_MULTIPLE = 256
# (capability, largest head size with dropout): no backward kernel exists, and no error is raised. flash-attn's README:
# "Head dim 256 backward now works on consumer GPUs (if there's no dropout) as of flash-attn 2.5.5".
NO_DROPOUT_BACKWARD: dict[tuple[int, int], int] = {(8, 6): 192, (8, 9): 192, (12, 0): 192}
_K_SHAPE = "k must have shape (batch_size, seqlen_k, num_heads_k, head_size)"
_V_SHAPE = "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)"


class LinearRoute(NamedTuple):
    """The backend of the linear-attention layers.

    Attributes:
        chosen: ``halftune | fla | torch``; ``none`` if the model has no such layer.
        rejected: (backend, reason) of every other backend.
    """

    chosen: Choice[str]
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class AttentionPlan:
    """The attention backends of a run.

    Attributes:
        softmax: ``fa2 | fa3 | fa4 | sdpa | flex | eager``.
        provider: the package with the code: ``flash_attn``, ``flash_attn_3``, ``flash_attn_4``, ``torch``,
            ``transformers``, or ``model`` (the model's own attention code, without transformers' attention interface).
        varlen: method for packed rows: ``segments`` (SDPA or eager per sample, CPU and old GPUs), ``torch_varlen``,
            ``flash_attn_varlen``, ``flash_attn_3_varlen``, ``flash_attn_4_varlen``; ``block_mask`` (flex);
            ``none`` without packing.
        linear: backend of linear-attention layers: ``halftune | fla | torch``; ``none`` if the model has no such layer.
        rejected: (backend, reason) of every other backend.
        guard: ``cast | strict | off``.
        rejected_linear: (backend, reason) of every other backend of linear-attention layers.
    """

    softmax: Choice[str]
    provider: Choice[str]
    varlen: Choice[str]
    linear: Choice[str]
    rejected: tuple[tuple[str, str], ...]
    guard: str
    rejected_linear: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Operand:
    """Properties of a tensor that are checked: dtype (name without ``torch.``), shape, stride of the last dimension."""

    dtype: str
    shape: tuple[int, ...]
    last_stride: int = 1
    contiguous: bool = True

    @staticmethod
    def of(tensor: Any) -> Operand:
        """Describe a torch tensor, which may be a meta tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Operand(dtype, tuple(tensor.shape), tensor.stride(-1) if tensor.ndim else 1, tensor.is_contiguous())


@dataclass(frozen=True)
class Call:
    """A call of the kernel, after the package's Python code has adapted the arguments.

    Attributes:
        q, k, v: ``[B, T, H, D]``, ``[B, S, G, D]``, or ``[N, H, D]``, ``[M, G, D]`` of packed rows.
        capability: compute capability of the device.
        kind: the entry point.
        cu_seqlens: cumulative lengths of queries and keys, packed rows only.
        out, dout: backward only.
        dropout, softcap: options.
        alibi: ALiBi slopes.
        page: block size of a paged cache; 0 for no paged cache.
    """

    q: Operand
    k: Operand
    v: Operand
    capability: tuple[int, int] = LOWEST_CAPABILITY
    kind: Pass = "forward"
    cu_seqlens: tuple[Operand, ...] = ()
    out: Operand | None = None
    dout: Operand | None = None
    dropout: float = 0.0
    softcap: float = 0.0
    alibi: Operand | None = None
    page: int = 0

    @property
    def batch(self) -> int:
        """Rows, or samples of a packed row."""
        return self.cu_seqlens[0].shape[0] - 1 if self.kind == "varlen" and self.cu_seqlens else self.q.shape[0]

    @property
    def head_dim(self) -> int:
        """Head size of the queries."""
        return self.q.shape[-1]


@dataclass(frozen=True)
class Check:
    """A check: the passes that make it, the condition, and the message of the RuntimeError if it fails."""

    passes: tuple[Pass, ...]
    holds: Callable[[Call], bool]
    text: str


def _same(name: str) -> Callable[[Call], bool]:
    """Whether an operand is absent or has the queries' dtype."""

    def holds(call: Call) -> bool:
        operand: Operand | None = vars(call)[name]
        return operand is None or operand.dtype == call.q.dtype

    return holds


def _last(*names: str) -> Callable[[Call], bool]:
    def holds(call: Call) -> bool:
        operands: list[Operand | None] = [vars(call)[name] for name in names]
        return all(operand is None or operand.last_stride == 1 for operand in operands)

    return holds


def _int32(at: int) -> Callable[[Call], bool]:
    return lambda call: len(call.cu_seqlens) <= at or call.cu_seqlens[at].dtype == "int32"


def _whole(at: int) -> Callable[[Call], bool]:
    return lambda call: len(call.cu_seqlens) <= at or call.cu_seqlens[at].contiguous


def _keys_fit(call: Call) -> bool:
    """Whether keys have the queries' batch size (dense rows) and head size."""
    rows = call.kind == "varlen" or call.k.shape[0] == call.q.shape[0]
    return rows and call.k.shape[-1] == call.head_dim


# In flash-attn's order.
CHECKS: tuple[Check, ...] = (
    Check(EVERY, lambda c: c.capability >= LOWEST_CAPABILITY, "FlashAttention only supports Ampere GPUs or newer."),
    Check(EVERY, lambda c: c.q.dtype in DTYPES, "FlashAttention only support fp16 and bf16 data type"),
    Check(EVERY, _same("k"), "query and key must have the same dtype"),
    Check(EVERY, _same("v"), "query and value must have the same dtype"),
    Check(("backward",), _same("out"), "query and out must have the same dtype"),
    Check(("backward",), _same("dout"), "query and dout must have the same dtype"),
    Check(("varlen",), _int32(0), "cu_seqlens_q must have dtype int32"),
    Check(("varlen",), _int32(1), "cu_seqlens_k must have dtype int32"),
    Check(EVERY, _last("q", "k", "v"), "Input tensor must have contiguous last dimension"),
    Check(("backward",), _last("out"), "out tensor must have contiguous last dimension"),
    Check(("backward",), _last("dout"), "dout tensor must have contiguous last dimension"),
    Check(("varlen",), _whole(0), "cu_seqlens_q must be contiguous"),
    Check(("varlen",), _whole(1), "cu_seqlens_k must be contiguous"),
    Check(("varlen",), lambda c: not (c.softcap > 0 and c.dropout > 0), "Softcapping does not support dropout for now"),
    Check(("varlen",), lambda c: c.page % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256"),
    Check(EVERY, lambda c: c.batch > 0, "batch size must be positive"),
    Check(
        FORWARDS,
        lambda c: c.head_dim <= MAX_HEAD_DIM,
        "FlashAttention forward only supports head dimension at most 256",
    ),
    Check(
        FORWARDS,
        lambda c: c.head_dim % HEAD_DIM_MULTIPLE == 0,
        "query, key, value, and out_ must have a head_size that is a multiple of 8",
    ),
    Check(("backward",), lambda c: c.head_dim % HEAD_DIM_MULTIPLE == 0, "head_size should be a multiple of 8"),
    Check(
        ("backward",),
        lambda c: c.head_dim <= MAX_HEAD_DIM,
        "FlashAttention backward only supports head dimension at most 256",
    ),
    Check(
        EVERY,
        lambda c: c.k.shape[-2] > 0 and c.q.shape[-2] % c.k.shape[-2] == 0,
        "Number of heads in key/value must divide number of heads in query",
    ),
    Check(
        ("forward", "backward"),
        lambda c: not (c.softcap > 0 and c.dropout > 0),
        "Softcapping does not support dropout for now",
    ),
    Check(EVERY, _keys_fit, _K_SHAPE),
    Check(EVERY, lambda c: c.v.shape == c.k.shape, _V_SHAPE),
    Check(EVERY, lambda c: c.alibi is None or c.alibi.dtype == "float32", "ALiBi slopes must have dtype fp32"),
    Check(EVERY, _last("alibi"), "ALiBi slopes tensor must have contiguous last dimension"),
)


def violations(call: Call) -> Iterator[str]:
    """Messages of all failed checks, in order; the kernel raises the first."""
    return (check.text for check in CHECKS if call.kind in check.passes and not check.holds(call))


def lacks_backward(capability: tuple[int, int] | None, head_dim: int, dropout: float) -> bool:
    """Whether the backward pass would leave the gradients of q, k and v uninitialised, without an error."""
    limit = NO_DROPOUT_BACKWARD.get(capability) if capability else None
    return limit is not None and dropout > 0 and head_dim > limit


@dataclass(frozen=True)
class EntryPoint:
    """A function of the package that models import directly.

    Attributes:
        module, name: of the function.
        operands: parameters that must share one dtype; casts are reported for the first.
        packed: number of tensors among q, k, v stacked in the first operand along axis -3 (1: not stacked).
    """

    module: str
    name: str
    operands: tuple[str, ...]
    packed: int = 1


_FUNCTIONS, _FUNCTIONS_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"
_CACHED = ("q", "k_cache", "v_cache", "k", "v")
ENTRY_POINTS: tuple[EntryPoint, ...] = (
    EntryPoint(_FUNCTIONS, "flash_attn_func", ("q", "k", "v")),
    EntryPoint(_FUNCTIONS, "flash_attn_varlen_func", ("q", "k", "v")),
    EntryPoint(_FUNCTIONS, "flash_attn_kvpacked_func", ("q", "kv"), packed=2),
    EntryPoint(_FUNCTIONS, "flash_attn_varlen_kvpacked_func", ("q", "kv"), packed=2),
    EntryPoint(_FUNCTIONS, "flash_attn_qkvpacked_func", ("qkv",), packed=3),
    EntryPoint(_FUNCTIONS, "flash_attn_varlen_qkvpacked_func", ("qkv",), packed=3),
    EntryPoint(_FUNCTIONS, "flash_attn_with_kvcache", _CACHED),
    EntryPoint(_FUNCTIONS_3, "flash_attn_func", ("q", "k", "v")),
    EntryPoint(_FUNCTIONS_3, "flash_attn_varlen_func", ("q", "k", "v")),
    EntryPoint(_FUNCTIONS_3, "flash_attn_qkvpacked_func", ("qkv",), packed=3),
    EntryPoint(_FUNCTIONS_3, "flash_attn_with_kvcache", _CACHED),
)
# torch's flex attention, also imported directly; requires one dtype for all three operands, even under autocast.
FLEX_ENTRY_POINT = EntryPoint("torch.nn.attention.flex_attention", "flex_attention", ("query", "key", "value"))
ROTARY_ENTRY_POINT = EntryPoint("flash_attn.layers.rotary", "apply_rotary_emb", ("x", "cos", "sin"))

# Functions of linear attention and state-space layers that transformers' modeling modules look up in their globals, and
# the operands that require one half dtype; decays and states may be fp32.
LINEAR_ENTRY_POINTS: tuple[EntryPoint, ...] = (
    EntryPoint("", "torch_chunk_gated_delta_rule", ("query", "key", "value")),
    EntryPoint("", "torch_recurrent_gated_delta_rule", ("query", "key", "value")),
    EntryPoint("", "chunk_gated_delta_rule", ("q", "k", "v")),
    EntryPoint("", "fused_recurrent_gated_delta_rule", ("q", "k", "v")),
    EntryPoint("", "chunk_kimi_delta_attention", ("query", "key", "value")),
    EntryPoint("", "chunk_kda", ("q", "k", "v")),
    EntryPoint("", "mamba2_chunk_scan", ("hidden_states", "B", "C")),
    EntryPoint("", "mamba2_selective_state_update", ("hidden_states", "B", "C")),
    EntryPoint("", "chunk_rwkv7", ("r", "k", "v", "a", "b")),
    EntryPoint("", "fused_recurrent_rwkv7", ("r", "k", "v", "a", "b")),
    EntryPoint("", "rwkv7", ("r", "k", "v", "a", "b")),
    EntryPoint("", "rwkv7_step", ("r", "k", "v", "a", "b")),
)
