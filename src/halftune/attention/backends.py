"""Softmax-attention backends as data, one row each: what they need and where they end.

FlashAttention-2's limits are those of its contract (``attention/contract.py``), FlashAttention-4's from its beta.
"""

from __future__ import annotations

from dataclasses import dataclass

from halftune.attention.contract import HEAD_DIM_MULTIPLE, LOWEST_CAPABILITY, MAX_HEAD_DIM

HALF = ("bf16", "fp16")
ALL = (*HALF, "fp32")
ANY_CAPABILITY = (0, 0)
EVERYWHERE = ("cuda", "rocm", "xpu", "mps", "cpu")


@dataclass(frozen=True)
class Backend:
    """One way to compute softmax attention.

    Attributes:
        name: what the user writes.
        provider: who carries it out: ``flash_attn`` (the package), ``torch``, ``transformers``; families with attention
            code of their own (``OWN_ATTENTION``) are planned as ``model``.
        kinds: devices that it runs on.
        dtypes: dtypes of q, k and v.
        capabilities: lowest compute capability (CUDA only), and the majors that it has a backward pass for (empty: all
            from the lowest on).
        package: distribution that must be installed, or "".
        torch: lowest torch version, or "".
        max_head_dim: largest head size.
        head_dim_multiple: the head size must be a multiple of this.
        dropout, softcap, sinks: whether it can drop attention weights, cap logits, and have learned sinks.
        varlen: how it computes packed rows, "" where it cannot; by device kind where they differ.
    """

    name: str
    provider: str
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    capability: tuple[int, int] = ANY_CAPABILITY
    majors: tuple[int, ...] = ()
    package: str = ""
    torch: str = ""
    max_head_dim: int = 1 << 30
    head_dim_multiple: int = 1
    dropout: bool = True
    softcap: bool = True
    sinks: bool = False
    varlen: str = ""


# In the order in which `auto` tries them.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        "fa2",
        "flash_attn",
        ("cuda", "rocm"),
        HALF,
        capability=LOWEST_CAPABILITY,
        package="flash-attn",
        max_head_dim=MAX_HEAD_DIM,
        varlen="flash_attn_varlen",
    ),
    # FlashAttention-2 kernels that torch brings; no dropout, no soft-capping. Before 2.13 they take no scale, no window
    # and no grouped heads.
    Backend(
        "fa2",
        "torch",
        ("cuda",),
        HALF,
        capability=LOWEST_CAPABILITY,
        torch="2.13",
        max_head_dim=MAX_HEAD_DIM,
        head_dim_multiple=HEAD_DIM_MULTIPLE,
        dropout=False,
        softcap=False,
        varlen="torch_varlen",
    ),
    Backend("sdpa", "torch", EVERYWHERE, ALL, softcap=False, varlen="segments"),
    Backend("flex", "transformers", ("cuda",), ALL, capability=(8, 0), package="triton", dropout=False, sinks=True),
    Backend("eager", "transformers", EVERYWHERE, ALL, sinks=True, varlen="segments"),
)

# Only on request: fast, but young or not installable from the usual place.
ON_REQUEST: tuple[Backend, ...] = (
    Backend(
        "fa3",
        "transformers",
        ("cuda",),
        HALF,
        capability=(8, 0),
        package="flash-attn-3",
        max_head_dim=256,
        head_dim_multiple=8,
        dropout=False,
        sinks=True,
    ),
    Backend(
        "fa4",
        "transformers",
        ("cuda",),
        HALF,
        capability=(9, 0),
        majors=(9, 10, 11, 12),
        package="flash-attn-4",
        max_head_dim=256,
        head_dim_multiple=8,
        dropout=False,
        softcap=False,
    ),
)

# Head sizes up to which FlashAttention-4 trains on data-centre Blackwell, besides exactly 256.
FA4_BLACKWELL_HEAD_DIM = 128


@dataclass(frozen=True)
class Miscompile:
    """A range of Triton versions that computes something wrong on some devices: low ≤ version < high."""

    capability_major: int
    triton_low: str
    triton_high: str
    what: str


# flash-linear-attention's kernels on Hopper: right forward pass, wrong gradients.
LINEAR_MISCOMPILES = (Miscompile(9, "3.4", "3.7.1", "the delta rule's backward pass computes wrong gradients"),)
LINEAR_PACKAGES = ("flash-linear-attention", "fla-core")
# Families whose linear layers flash-linear-attention has kernels for; others keep transformers' torch code.
LINEAR_FAMILIES = ("qwen3_next", "qwen3_5", "qwen4_exp", "olmo_hybrid", "kimi_linear", "glm5_next", "bailing_hybrid")

# Families without a single layer of softmax attention.
NO_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "rwkv7", "xlstm"})

# Families of transformers whose attention does not go through its AttentionInterface: they compute it in their own way.
OWN_ATTENTION = frozenset(
    {
        "big_bird",
        "bloom",
        "codegen",
        "cpmant",
        "falcon",
        "fuyu",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "megatron-bert",
        "mpt",
        "mvp",
        "openai-gpt",
        "prophetnet",
        "reformer",
        "rembert",
        "roformer",
        "trocr",
        "xglm",
        "xlm",
        "xlnet",
    }
)
