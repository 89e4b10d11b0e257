"""Loss of models whose logits are the plain product of a linear head, without materialising the logits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from halftune.model.patch import probe_pass
from halftune_kernels.ops.linear_cross_entropy import linear_cross_entropy_sum

_PROBE = 2  # tokens
_proven: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def plain_head(base: Any, inputs: Mapping[str, Any]) -> nn.Linear | None:
    """The head of a model that returns the head's output unchanged; None for other models.

    None for soft-capped, scaled, adapted, wrapped and hooked heads, and for fp16, whose unscaled gradients would
    underflow. A forward pass over two tokens checks once per model whether the logits are changed after the head; it
    does not change the global random state.

    Args:
        base: the transformers model itself.
        inputs: forward arguments without labels, on the model's device.
    """
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    if type(head) is not nn.Linear or torch.compiler.is_compiling() or "forward" in vars(head):
        return None
    if any((head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)):
        return None
    if _computes_in(head) == torch.float16:
        return None
    if base not in _proven:
        _proven[base] = _returns_what_its_head_returns(base, head, inputs)
    return head if _proven[base] else None


@contextmanager
def hidden_instead_of_logits(head: nn.Linear) -> Iterator[None]:
    """Inside, the head returns its input in its compute dtype; other threads get its output."""
    inside = threading.get_ident()

    def forward(input: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != inside:
            return type(head).forward(head, input)
        return input.to(_computes_in(head))

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def head_loss_sum(
    head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, scale: float, *, all_labelled: bool = False
) -> torch.Tensor:
    """Sum of a head's cross-entropy over rows with a target; see ``linear_cross_entropy_sum``."""
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_cross_entropy_sum(hidden, head.weight, targets, head.bias, scale=scale, all_labelled=all_labelled)


def _computes_in(head: nn.Linear) -> torch.dtype:
    kind = head.weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype


def _returns_what_its_head_returns(model: Any, head: nn.Linear, inputs: Mapping[str, Any]) -> bool:
    """Run a few tokens and check that the model's logits are the tensor that its head returned."""
    returned: list[torch.Tensor] = []
    watching = head.register_forward_hook(
        lambda _module, _inputs, output: returned.append(cast("torch.Tensor", output))
    )
    device = head.weight.device
    try:
        drawing = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with torch.no_grad(), probe_pass(), drawing:
            logits = model(**_few_tokens(inputs), use_cache=False).logits
    finally:
        watching.remove()
    return len(returned) == 1 and returned[0] is logits


def _few_tokens(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The first tokens of the first row; a packed row becomes one sample."""
    few = {}
    tokens = min(_PROBE, inputs["input_ids"].shape[1])
    for name, value in inputs.items():
        if name.startswith("cu_seq_lens"):
            few[name] = torch.tensor([0, tokens], dtype=value.dtype, device=value.device)
        elif name.startswith("max_length"):
            few[name] = tokens
        else:
            few[name] = value[:1, :tokens]
    if "position_ids" in few:
        few["position_ids"] = torch.arange(tokens, device=few["position_ids"].device)[None]
    return few
