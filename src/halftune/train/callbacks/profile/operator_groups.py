"""What an operator is for, in words that a reader of a profile understands: matmul, attention, loss, data …"""

from __future__ import annotations

import re
from collections.abc import Sequence

WAIT, PYTHON = "halftune::data", "halftune::step"
"""Ranges that the profile opens: the next batch is awaited; a whole step (its own time is Python between operators)."""

# A range that an operator lies in says more than the operator's own name: (pattern of the range, group).
_AROUND: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"^{WAIT}$"), "data"),
    (re.compile(r"^Optimizer\.|clip_grad|GradScaler"), "optimizer"),
    (re.compile(r"cross_?entropy|nll_?loss|log_?softmax|linear_?loss", re.I), "loss"),
    (re.compile(r"attention|attn|flash_|varlen|delta_rule|causal_?segments", re.I), "attention"),
)
# The operator itself, the first pattern that is found in its name.
_ITSELF: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"^{PYTHON}$"), "Python"),
    (
        re.compile(r"^aten::(item|_local_scalar_dense|is_nonzero|nonzero)$|Synchronize$|Memcpy DtoH|StreamWaitEvent"),
        "host syncs",
    ),
    (re.compile(r"_foreach_|_fused_(adam|sgd|adagrad)|^aten::(_foreach_norm|linalg_vector_norm)$"), "optimizer"),
    (
        re.compile(
            r"^aten::((mm|addmm|bmm|baddbmm|addbmm|addmv|addr)_?|matmul|linear|einsum|dot|mv|_?conv\w*|mkldnn\w*)$|gemm|::linear"
        ),
        "matmul",
    ),
    (re.compile(r"^aten::_softmax"), "attention"),
    (
        re.compile(
            r"^aten::(fill_|zero_|zeros\w*|ones\w*|full\w*|empty\w*|new_\w+|copy_|_to_copy|to|clone|contiguous|cat)$"
        ),
        "fills and copies",
    ),
    (re.compile(r"^Mem(cpy|set)|^cudaMem(cpy|set)"), "fills and copies"),
    (
        re.compile(
            r"^aten::(embedding\w*|index\w*|gather|scatter\w*|take\w*|masked_\w+|where|arange|cumsum|sort|_index\w*)$"
        ),
        "indexing",
    ),
    (
        re.compile(
            r"^aten::(_?reshape\w*|_?unsafe_view|view\w*|transpose|t|slice\w*|select\w*|expand\w*|unsqueeze|squeeze\w*|"
            r"split\w*|chunk|narrow|permute|detach\w*|alias|as_strided\w*|unbind|unflatten|flatten|lift_fresh|resolve_\w+|"
            r"result_type|numpy_T|_reshape_alias|unsafe_split\w*)$|^detach_?$"
        ),
        "views",
    ),
    (re.compile(r"^(aten|halftune|prims)\w*::"), "elementwise"),
    (re.compile(r"^(cuda|hip)[A-Z]"), "launching kernels"),
    (re.compile(r"^autograd::|^torch::autograd::|Backward\d*$|Function$|^_?[A-Z]\w*$|AccumulateGrad$"), "Python"),
)
OTHER = "other"


def group_of(name: str, around: Sequence[str]) -> str:
    """The group of an operator.

    Args:
        name: as torch's profiler calls it, such as ``aten::mm``.
        around: names of the ranges and operators that it lies in, innermost first.

    Returns:
        ``matmul``, ``attention``, ``elementwise``, ``loss``, ``optimizer``, ``data``, ``fills and copies``, ``host
        syncs``, ``indexing``, ``views``, ``Python`` (interpreter and autograd between operators), … or ``other``.
    """
    for pattern, group in _AROUND:
        if pattern.search(name) or any(pattern.search(outer) for outer in around):
            return group
    return next((group for pattern, group in _ITSELF if pattern.search(name)), OTHER)
