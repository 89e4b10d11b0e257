"""What a kernel moves and computes: bytes read and written, FLOPs, launches; by operator and operands.

Bytes are those of device memory, each distinct operand once: a broadcast dimension (stride 0) counts once, a view
nothing, and what a cache saves by chance nothing. FLOPs are those of matrix units, a multiply-add counts as two;
arithmetic of elementwise kernels is never their bound and not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from halftune.bench.paper.attention import Lengths, attention_cost, is_attention
from halftune.precision.resolve import has_grouped_kernel

# Operators that return without launching a kernel, beside views.
_FREE = re.compile(
    r"^(aten::(empty\w*|new_empty\w*|_unsafe_view|lift_fresh|lift|detach_?|alias|set_|resize_|record_stream|is_\w+|"
    r"sym_\w+|size|stride|_local_scalar_dense|item|_version|_has_\w+|t_|transpose_|unsqueeze_|squeeze_|as_strided_|"
    r"_assert_tensor_metadata|_fused_sdp_choice|result_type|_reshape_alias|pin_memory)|prims?::\w+|profiler::\w+)$"
)
# Overwrite their first operand without reading it.
_OVERWRITE = re.compile(r"^aten::(fill_|zero_|copy_|normal_|uniform_|random_|bernoulli_|exponential_|set_data)$")
# Read only the chosen rows of their first operand, as many as they return.
_GATHER = re.compile(r"^aten::(embedding|index|index_select|gather|take|take_along_dim|_unsafe_index)$")
# Write only the chosen rows of their first operand; a functional form copies it first.
_SCATTER = re.compile(r"^aten::_?(index_put|index_put_impl|index_add|index_copy|scatter|scatter_add|scatter_reduce)_?$")
# A zeroed tensor of the input's size, then the gradient.
_PADDED = re.compile(r"^aten::(slice|select|narrow|diagonal|as_strided)_(backward|scatter)$")
# torch's kernels over lists of tensors, before CUDA 13 (ATen/native/cuda/MultiTensorApply.cuh): kChunkSize,
# depth_to_max_blocks and depth_to_max_tensors; a launch takes 4 KB of arguments there.
_CHUNK, _BLOCKS = 65536, 320
_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # tensors of one such launch, by operands per tensor
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward")
_SEVERAL = {
    **dict.fromkeys(("aten::slice_backward", "aten::select_backward", "aten::embedding_dense_backward"), 2),
    **dict.fromkeys(("aten::sort", "aten::topk", "aten::cumsum"), 2),
    "aten::constant_pad_nd": 2,
    "halftune::adapted_activation": 3,  # and the sum over parts, and its cast
    "halftune::adapted_activation_backward_": 4,  # and a sum for each factor
}


@dataclass(frozen=True)
class Cost:
    """A call's traffic in bytes, FLOPs, launches, and the dtype of its largest operand."""

    read: int
    written: int
    flops: float = 0.0
    launches: int = 1
    dtype: torch.dtype = torch.float32
    rate: str = ""
    """Key of the roofline's attention rates, followed by ``/backward`` in the backward pass; empty for others."""
    hopper: float = 0.0
    """Seconds on Hopper of a kernel that neither traffic nor large products bound; 0 for others."""
    exact: bool = False
    """Whether it is a product in float8 without fast accumulation."""


def is_free(func: Any) -> bool:
    """Whether an operator launches nothing: a view, an allocation, a question."""
    returns = func._schema.returns
    view = bool(returns) and any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return view or bool(_FREE.match(func._schema.name))


def touched(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor; a broadcast dimension counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return math.prod(sizes) * tensor.element_size()


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Tensors in nested arguments."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each operand once: those with the same storage, offset and shape are one."""
    found: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        at = tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        found.setdefault(at, tensor)
    return list(found.values())


def cost_of(func: Any, args: Any, kwargs: dict[str, Any], out: Any, lengths: Lengths) -> Cost:
    """The cost of an operator's call.

    Args:
        func: an ``OpOverload``.
        args, kwargs: its operands.
        out: what it returned.
        lengths: values of an integer tensor, or None; boundaries of packed samples.
    """
    name = func._schema.name
    read, written = _traffic(func, args, kwargs, out)
    operands = tensors_in((args, kwargs, out))
    dtype = max(operands, key=lambda tensor: tensor.numel()).dtype if operands else torch.float32
    if is_attention(name):
        found = attention_cost(name, named_arguments(func, args, kwargs), lengths)
        read, written, dtype = read + found.extra, written + found.extra, operands[0].dtype  # a mask may be larger
        return Cost(read, written, found.flops, found.launches, dtype, rate=found.rate)
    flops = flops_of(func, args, kwargs, out)
    if flops:
        dtype = _product_dtype(args)
    if name in _GROUPED:
        read -= _of_no_row(*args[:2])
    exact = name == "aten::_scaled_mm" and not named_arguments(func, args, kwargs)["use_fast_accum"]
    return Cost(read, written, flops, _launches(name, args), dtype, exact=exact)


def named_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in an operator's schema, defaults included."""
    schema = func._schema.arguments
    defaults = {one.name: one.default_value for one in schema if one.has_default_value()}
    return defaults | {one.name: value for one, value in zip(schema, args, strict=False)} | kwargs


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """FLOPs by torch's formulas, or by ``FLOPS`` for operators of other packages; 0 without one."""
    own = FLOPS.get(func._schema.name)
    if own is not None:
        return own(args, out)
    formula = flop_registry.get(func.overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _grouped_flops(args: Any, _out: Any) -> float:
    """``[N, K] · [G, K, M]``, each row with one matrix; or ``[K, N] · [N, M]``, every row once: the gradient."""
    a, b = args[0], args[1]
    return 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _of_no_row(a: torch.Tensor, b: torch.Tensor) -> int:
    """Bytes of the matrices that ``[N, K] · [G, K, M]`` does not read, where rows are fewer than matrices."""
    return touched(b) * max(0, len(b) - len(a)) // len(b) if b.ndim == 3 else 0


def _in_place_flops(args: Any, _out: Any) -> float:
    """``out += a · b``."""
    return 2.0 * math.prod(args[1].shape) * args[2].shape[-1]


def _adapted_flops(products: int) -> Callable[[Any, Any], float]:
    """``products`` with each of the three factors, which are the last operands."""

    def flops(args: Any, _out: Any) -> float:
        tokens, *_ = tensors_in(args)[0].shape
        return 2.0 * products * tokens * sum(factor.numel() for factor in tensors_in(args)[-3:])

    return flops


FLOPS: dict[str, Callable[[Any, Any], float]] = {
    "aten::addmm_": _in_place_flops,
    "aten::baddbmm_": _in_place_flops,
    **dict.fromkeys(_GROUPED[:2], _grouped_flops),
    _GROUPED[2]: lambda args, out: 2 * _grouped_flops(args, out),  # also of frozen weights
    "halftune::adapted_activation": _adapted_flops(1),
    "halftune::adapted_activation_backward_": _adapted_flops(2),  # the updates again, and three gradients
}
"""FLOPs of operators that torch has no formula for, from (operands, result)."""


def _product_dtype(args: Any) -> torch.dtype:
    """A product computes in the narrowest of its operands."""
    floating = [tensor.dtype for tensor in tensors_in(args) if tensor.is_floating_point()]
    return min(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _traffic(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> tuple[int, int]:
    name = func._schema.name
    operands = tensors_in((args, kwargs))
    operand_ids = {id(operand) for operand in operands}
    created = sum(touched(tensor) for tensor in distinct(tensors_in(out)) if id(tensor) not in operand_ids)
    if _GATHER.match(name):
        indices = sum(map(touched, distinct(operands[1:])))
        return created + indices, created
    if _SCATTER.match(name):
        return _scattered(name, operands)
    if _PADDED.match(name):
        gradient = touched(operands[0])
        return gradient, created + gradient
    written = {id(tensor) for tensor in _mutated(func, args, kwargs)}
    changed = [tensor for tensor in distinct(operands) if id(tensor) in written]
    inputs = [tensor for tensor in distinct(operands) if id(tensor) not in written]
    read = sum(map(touched, [*inputs, *_read_too(name, func, changed, kwargs)]))
    return read, created + sum(map(touched, changed))


def _scattered(name: str, operands: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes read and written where rows are written at indices."""
    rest = sum(map(touched, distinct(operands[1:])))
    whole = 0 if name.endswith("_") else touched(operands[0])
    rows = max((touched(one) for one in operands[1:] if one.is_floating_point()), default=0)
    return rest + whole, (rows or touched(operands[0])) + whole


def _mutated(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Operands that an operator writes, by its schema; AdamW's gradients are read unless a scaler changes them."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name == "grads" and kwargs.get("grad_scale") is None:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        yield from tensors_in(value)


def _read_too(name: str, func: Any, changed: list[torch.Tensor], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Written operands whose old values count."""
    if _OVERWRITE.match(name) or kwargs.get("beta") == 0:
        return []
    targets = {
        id(tensor) for one in func._schema.arguments if one.is_out for tensor in tensors_in(kwargs.get(one.name))
    }
    return [tensor for tensor in changed if id(tensor) not in targets]


def loops_over_groups(name: str, args: Any) -> bool:
    """Whether an operator multiplies group by group, for which the host waits for their sizes."""
    if name not in _GROUPED or args[0].ndim == args[1].ndim == 3:
        return False
    half = {args[0].dtype, args[1].dtype} == {torch.bfloat16}
    return name != _GROUPED[0] or not has_grouped_kernel(torch.cuda.get_device_capability(), "bf16" if half else "")


def _of_groups(name: str, args: Any) -> int:
    """Launches of an operator that loops over groups: of each a product (none for weights without a row), and fills."""
    many = min(len(args[0]), len(args[1])) if args[1].ndim == 3 else len(args[2])
    return {_GROUPED[0]: many, _GROUPED[1]: many + 1}.get(name, 2 * many + 2)


def _launches(name: str, args: Any) -> int:
    if loops_over_groups(name, args):
        return _of_groups(name, args)
    if "_foreach_" in name or "_fused_" in name:
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and tensors_in(arg)]
        if lists:
            first, depth = tensors_in(lists[0]), min(max(len(lists), 1), 5)
            chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in first)
            return max(-(-len(first) // _PER_LAUNCH[depth]), -(-chunks // _BLOCKS))
    return _SEVERAL.get(name, 1)
