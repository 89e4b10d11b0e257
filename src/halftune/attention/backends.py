"""Softmax-attention backends as data, one row each: requirements and limits.

FlashAttention-2's limits are those of its contract (``attention/contract.py``), the later ones' from their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from halftune.attention.contract import HEAD_DIM_MULTIPLE, LOWEST_CAPABILITY, MAX_HEAD_DIM

HALF = ("bf16", "fp16")
ALL = (*HALF, "fp32")
ANY_CAPABILITY = (0, 0)
EVERYWHERE = ("cuda", "rocm", "xpu", "mps", "cpu")
_FLASH_MASK = "transformers.masking_utils:flash_attention_mask"
# Largest head size that FlashAttention-4 trains on data-centre Blackwell, apart from exactly 256.
FA4_BLACKWELL_HEAD_DIM = 128
LINEAR_PACKAGES = ("flash-linear-attention", "fla-core")


@dataclass(frozen=True)
class Backend:
    """A backend of softmax attention.

    Attributes:
        name: the name in the config (``attention.backend``).
        provider: the package with the code: ``flash_attn``, ``flash_attn_3``, ``flash_attn_4``, ``torch``,
            ``transformers``; for model families with their own attention code the plan says ``model``.
        kinds: supported device types.
        dtypes: dtypes of q, k and v.
        capability: minimum compute capability (CUDA only).
        majors: major capabilities with a backward pass; empty: all from the minimum on.
        auto: major capabilities on which `auto` chooses it; empty: all.
        package: required distribution, or "".
        torch: minimum torch version, or "".
        max_head_dim: largest head size.
        head_dim_multiple: the head size must be a multiple of this.
        dropout, softcap, sinks: whether attention dropout, logit soft-capping and attention sinks are supported.
        varlen: method for packed rows; "" if unsupported.
        attend: ``module:function`` with the signature of transformers' attention interface; "" with a ``kernel``.
        mask: ``module:function`` that builds masks, with the signature of transformers' mask interface.
        kernel: ``module:function`` that returns a varlen kernel (``flash.Varlen``), for batches and packed rows.
    """

    name: str
    provider: str
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    capability: tuple[int, int] = ANY_CAPABILITY
    majors: tuple[int, ...] = ()
    auto: tuple[int, ...] = ()
    package: str = ""
    torch: str = ""
    max_head_dim: int = 1 << 30
    head_dim_multiple: int = 1
    dropout: bool = True
    softcap: bool = True
    sinks: bool = False
    varlen: str = ""
    attend: str = ""
    mask: str = ""
    kernel: str = ""


# In order of preference for `auto`.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        "fa3",
        "flash_attn_3",
        ("cuda",),
        HALF,
        capability=(8, 0),
        auto=(9,),
        package="flash-attn-3",
        max_head_dim=256,
        head_dim_multiple=8,
        dropout=False,
        varlen="flash_attn_3_varlen",
        mask=_FLASH_MASK,
        kernel="halftune.attention.flash:flash_attn_3_varlen",
    ),
    Backend(
        "fa4",
        "flash_attn_4",
        ("cuda",),
        HALF,
        capability=(9, 0),
        majors=(9, 10, 11, 12),
        auto=(9, 10, 11),
        package="flash-attn-4",
        max_head_dim=256,
        head_dim_multiple=8,
        dropout=False,
        softcap=False,
        varlen="flash_attn_4_varlen",
        mask=_FLASH_MASK,
        kernel="halftune.attention.flash:flash_attn_4_varlen",
    ),
    Backend(
        "fa2",
        "flash_attn",
        ("cuda", "rocm"),
        HALF,
        capability=LOWEST_CAPABILITY,
        package="flash-attn",
        max_head_dim=MAX_HEAD_DIM,
        varlen="flash_attn_varlen",
        mask=_FLASH_MASK,
        kernel="halftune.attention.flash:flash_attn_varlen",
    ),
    # FlashAttention-2 kernels included in torch: no dropout, no soft-capping.
    Backend(
        "fa2",
        "torch",
        ("cuda",),
        HALF,
        capability=LOWEST_CAPABILITY,
        torch="2.11",
        max_head_dim=MAX_HEAD_DIM,
        head_dim_multiple=HEAD_DIM_MULTIPLE,
        dropout=False,
        softcap=False,
        varlen="torch_varlen",
        mask=_FLASH_MASK,
        kernel="halftune.attention.flash:torch_varlen",
    ),
    Backend(
        "sdpa",
        "torch",
        EVERYWHERE,
        ALL,
        softcap=False,
        varlen="segments",
        attend="halftune.attention.varlen:sdpa",
        mask="transformers.masking_utils:sdpa_mask",
    ),
    Backend(
        "flex",
        "transformers",
        ("cuda",),
        ALL,
        capability=(8, 0),
        package="triton",
        dropout=False,
        sinks=True,
        varlen="block_mask",
        attend="transformers.integrations.flex_attention:flex_attention_forward",
        mask="transformers.masking_utils:flex_attention_mask",
    ),
    Backend(
        "eager",
        "transformers",
        EVERYWHERE,
        ALL,
        sinks=True,
        varlen="segments",
        attend="halftune.attention.varlen:eager",
        mask="transformers.masking_utils:eager_mask",
    ),
)


def backend_of(name: str, provider: str) -> Backend:
    """Return the row of a plan's backend; rows with the same name differ by provider."""
    rows = [row for row in BACKENDS if row.name == name]
    return next((row for row in rows if row.provider == provider), rows[0])


@dataclass(frozen=True)
class Miscompile:
    """A range of Triton versions with wrong results on some devices: low ≤ version < high."""

    capability_major: int
    triton_low: str
    triton_high: str
    what: str


# flash-linear-attention's kernels on Hopper: correct forward pass, wrong gradients.
LINEAR_MISCOMPILES = (Miscompile(9, "3.4", "3.7.1", "the delta rule's backward pass computes wrong gradients"),)
