"""The loss of a model whose logits are its head's product and nothing else: computed without holding the logits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from halftune.model.patch import rehearsal
from halftune_kernels.ops.linear_cross_entropy import linear_cross_entropy_sum

_PROBE = 2  # tokens
_proven: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def plain_head(base: Any, inputs: Mapping[str, Any]) -> nn.Linear | None:
    """The head of a model that returns its head's product untouched; None for any other.

    Soft-capped, scaled, adapted, wrapped and watched heads are other ones, and so is every head in fp16, whose unscaled
    gradients would vanish. Whether the logits are touched after the head is found out once per model, by a forward pass
    over two tokens of the batch; it draws nothing from the global random state.

    Args:
        base: the transformers model itself.
        inputs: of a forward pass, without labels; on the model's device.
    """
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    if type(head) is not nn.Linear or torch.compiler.is_compiling() or "forward" in vars(head):
        return None
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return None
    if _computes_in(head) == torch.float16:
        return None
    if base not in _proven:
        _proven[base] = _returns_what_its_head_returns(base, head, inputs)
    return head if _proven[base] else None


@contextmanager
def hidden_instead_of_logits(head: nn.Linear) -> Iterator[None]:
    """Inside, the head returns its input, in the dtype that it would compute in; to other threads its product."""
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
    """Sum of the cross-entropy of a head over the rows that have a target; see ``linear_cross_entropy_sum``."""
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_cross_entropy_sum(hidden, head.weight, targets, head.bias, scale=scale, all_labelled=all_labelled)


def _computes_in(head: nn.Linear) -> torch.dtype:
    kind = head.weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype


def _returns_what_its_head_returns(model: Any, head: nn.Linear, inputs: Mapping[str, Any]) -> bool:
    """Runs a few tokens and looks whether the model's logits are the very tensor that its head returned."""
    returned: list[torch.Tensor] = []
    watching = head.register_forward_hook(
        lambda _module, _inputs, output: returned.append(cast("torch.Tensor", output))
    )
    device = head.weight.device
    try:
        drawing = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with torch.no_grad(), rehearsal(), drawing:
            logits = model(**_few_tokens(inputs), use_cache=False).logits
    finally:
        watching.remove()
    return len(returned) == 1 and returned[0] is logits


def _few_tokens(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The first tokens of the first row, as one sample where the row is packed."""
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
