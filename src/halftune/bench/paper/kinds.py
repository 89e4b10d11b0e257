"""What a kernel belongs to: matrix products, attention, norms … by its operator and where it is called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import CodeType, FrameType

GEMM, ATTENTION, LINEAR, NORM, ROPE = "GEMM", "attention", "linear attention", "norm", "rope"
ACTIVATION, LORA, HEAD, OPTIMIZER = "activation", "LoRA side products", "head and loss", "optimizer"
COPIES, OTHER = "copies and casts", "other"
KINDS = (GEMM, ATTENTION, LINEAR, NORM, ROPE, ACTIVATION, LORA, HEAD, OPTIMIZER, COPIES, OTHER)

# Functions around a call: (pattern of "file:function", kind). The innermost that matches counts.
_AROUND = (
    (re.compile(r"torch/optim/|halftune/optim/|clip_grad|grad_scaler|/train/parallel/strategy\.py"), OPTIMIZER),
    (re.compile(r"cross_entropy|:logprobs$|loss_utils\.py|:sum_losses$|model/head\.py"), HEAD),
    (re.compile(r":(rotate_half|apply_\w*rotary\w*|apply_rotary\w*)$|ops/\w*rope"), ROPE),
    (re.compile(r"ops/(rms|layer|gated_rms)_?norm"), NORM),
    (re.compile(r"ops/(gated_delta_rule|kda|ssd|rwkv7|causal_conv1d)/|:(torch_)?(chunk|recurrent)_\w+$"), LINEAR),
    (re.compile(r"paper/attention\.py:attend_as_cuda$"), ATTENTION),
    (re.compile(r"ops/float8_|torchao/float8/"), COPIES),
    (re.compile(r"ops/lora_mlp|ops/\w*glu"), ACTIVATION),
    (re.compile(r"ops/lora_"), LORA),
)
# Operators of halftune and other packages.
_CUSTOM = (
    (re.compile(r"float8|::dequantize"), COPIES),
    (re.compile(r"attention|varlen|flash"), ATTENTION),
    (re.compile(r"norm"), NORM),
    (re.compile(r"rope|rotary"), ROPE),
    (re.compile(r"glu|silu|gelu|activation"), ACTIVATION),
    (re.compile(r"lora"), LORA),
    (re.compile(r"cross_entropy|loss"), HEAD),
    (re.compile(r"adam|moments|clip"), OPTIMIZER),
    (re.compile(r"delta_rule|scan|conv1d|kda|ssd|rwkv"), LINEAR),
)
_COPIES = re.compile(
    r"^aten::(_to_copy|copy_|clone|contiguous|cat|stack|fill_|zero_|zeros\w*|ones\w*|full\w*|new_\w+)$"
)
# Classes of modules.
_MODULES = (
    (re.compile(r"Rotary"), ROPE),
    (re.compile(r"Norm"), NORM),
    (re.compile(r"^peft\."), LORA),
    (re.compile(r"SiLU|GELU|Activation$|MLP|FeedForward|GLU|Mlp"), ACTIVATION),
)


@dataclass(frozen=True)
class Context:
    """Where an operator is called.

    Attributes:
        module: path of the innermost named module; empty outside of the model.
        type: its class's name, after ``peft.`` for a class of that package.
        around: kind of the functions around the call, or empty.
    """

    module: str = ""
    type: str = ""
    around: str = ""


_roles: dict[CodeType, str] = {}


def around(frame: FrameType | None) -> str:
    """Kind of the innermost function around a frame that tells one; functions outside the model's call count, too."""
    while frame is not None:
        code = frame.f_code
        role = _roles.get(code)
        if role is None:
            where = f"{code.co_filename}:{code.co_name}"
            role = _roles[code] = _matching(_AROUND, where)
        if role:
            return role
        frame = frame.f_back
    return ""


def kind_of(name: str, context: Context, *, fused_attention: bool, low_rank: bool, product: bool) -> str:
    """The kind of a kernel.

    Args:
        name: of the operator.
        context: of its call, or of the forward call that it is the gradient of.
        fused_attention: it is an opaque attention operator.
        low_rank: it is a product with a side as short as an adapter's rank.
        product: it is a matrix product.
    """
    if fused_attention:
        return ATTENTION
    if context.module.endswith("lm_head"):
        return HEAD
    if context.around in (OPTIMIZER, HEAD, LINEAR, ATTENTION):
        return context.around
    own = LORA if low_rank else GEMM
    custom = "" if name.startswith(("aten::", "triton::")) else _matching(_CUSTOM, name)
    if product and custom in ("", LORA):
        return own
    return custom or _of_elements(name, context)


def _of_elements(name: str, context: Context) -> str:
    """The kind of a kernel that is no product."""
    if context.around in (ROPE, NORM, LORA, ACTIVATION, COPIES):
        return context.around
    if found := _matching(_MODULES, context.type):
        return found
    if ".lora_" in context.module:
        return LORA
    return COPIES if _COPIES.match(name) else OTHER


def _matching(table: tuple[tuple[re.Pattern[str], str], ...], text: str) -> str:
    return next((kind for pattern, kind in table if pattern.search(text)), "")
