"""What a model's head gets and makes of it: the hidden states at the labels, and logits of a few of them at a time.

There are two ways to them. A plain linear head is left out of the forward pass, which returns the head's input: no
logits are made, and the loss computes product and gradient itself. All other heads (adapted, scaled, soft-capped) run
as the model's own code on chunks of the decoder's output: meanwhile the decoder's forward returns the chunk. This way
the pass itself must call the head at one position, whose zero gradient is as large as the head's weight: of a plain
head, the first way spares it. The second way serves plain heads, too, where each row's own logits are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from halftune.model.attention.register import probe_pass

Head = Callable[[torch.Tensor], torch.Tensor]  # [N, H] -> [N, V]

# Attributes of a model: what was found when a head was looked at, which is done once.
_IS_PLAIN, _IS_REPRODUCED = "halftune_head_is_plain", "halftune_head_is_reproduced"


@contextmanager
def _in_place_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, this thread runs ``forward`` where it calls a module; other threads run the module's own."""
    inside, own, patched = threading.get_ident(), module.forward, "forward" in vars(module)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (forward if threading.get_ident() == inside else own)(*args, **kwargs)

    module.forward = chosen
    try:
        yield
    finally:
        if patched:
            module.forward = own
        else:
            del module.forward


def hidden_instead_of_logits(head: nn.Linear | None) -> AbstractContextManager[None]:
    """Inside, the head, if there is one, returns its input in its compute dtype; other threads get its output."""
    return nullcontext() if head is None else _in_place_of(head, lambda input: input.to(_computes_in(head)))


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
    if not _may_be_plain(head):
        return None
    if not hasattr(base, _IS_PLAIN):
        returned: list[torch.Tensor] = []
        with _probing(head, returned):
            logits = base(**_few_tokens(inputs), use_cache=False).logits
        setattr(base, _IS_PLAIN, len(returned) == 1 and returned[0] is logits)
    return head if getattr(base, _IS_PLAIN) else None


def _may_be_plain(head: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a head can be only a product: not wrapped, hooked or compiled, and not in fp16."""
    if type(head) is not nn.Linear or torch.compiler.is_compiling() or "forward" in vars(head):
        return False
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    return not any(hooks) and _computes_in(head) != torch.float16


def _computes_in(head: nn.Linear) -> torch.dtype:
    kind = head.weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype


@contextmanager
def _probing(head: nn.Linear, returned: list[torch.Tensor]) -> Iterator[None]:
    """Inside is a forward pass that leaves no trace, and collects what the head returns."""
    watching = head.register_forward_hook(lambda _head, _inputs, output: returned.append(cast("torch.Tensor", output)))
    device = head.weight.device
    drawing = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with watching, torch.no_grad(), probe_pass(), drawing:
        yield


_PROBE = 2  # tokens


def _few_tokens(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The first tokens of the first row, without images; a packed row becomes one sample."""
    few, shape = {}, inputs["input_ids"].shape
    tokens = min(_PROBE, shape[1])
    for name, value in inputs.items():
        if name.startswith("cu_seq_lens"):
            few[name] = torch.tensor([0, tokens], dtype=value.dtype, device=value.device)
        elif name.startswith("max_length"):
            few[name] = tokens
        elif value.shape[:2] == shape:
            few[name] = value[:1, :tokens]
            if name.endswith("token_type_ids"):  # image tokens without their image are text
                few[name] = torch.zeros_like(few[name])
    if "position_ids" in few:
        few["position_ids"] = torch.arange(tokens, device=few["position_ids"].device)[None]
    return few


@dataclass(frozen=True)
class HeadRows:
    """What a head computes the logits of a batch's labels from.

    Attributes:
        rows: ``[N, H]``, N > 0.
        head: from rows to logits ``[N, V]``.
        vocabulary: V.
        targets: int64 ``[N]``.
        places: int64 ``[K]``: indices of the labels in the batch; K is N, or 0 where one row stands for none.
        frozen: nothing between rows and logits is trained, and each row gives its own logits only.
        plain: the logits are a product that nothing else needs: they may be overwritten.
    """

    rows: torch.Tensor
    head: Head
    vocabulary: int
    targets: torch.Tensor
    places: torch.Tensor
    frozen: bool = False
    plain: bool = False


def is_frozen(base: nn.Module, body: nn.Module) -> bool:
    """Whether a model trains nothing outside of its decoder; a tied head is outside, too."""
    outside = [one.parameters() for one in base.children() if one is not body]
    return not any(one.requires_grad for one in chain(base.parameters(recurse=False), *outside))


def decoder_of(base: Any) -> nn.Module | None:
    """The decoder of a transformers model with a head; None for other models."""
    body = base.base_model if isinstance(base, PreTrainedModel) else None
    return None if body is base else body


@contextmanager
def outputs_of(body: nn.Module) -> Iterator[list[Any]]:
    """Inside, collects the outputs of a module."""
    seen: list[Any] = []
    with body.register_forward_hook(lambda _module, _inputs, output: seen.append(output)):
        yield seen


def is_head_of(base: PreTrainedModel, body: nn.Module, outputs: Any, at: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether :func:`logits_of` reproduces a model's logits ``[B, 1, V]`` at one position; checked once per model."""
    if not isinstance(outputs, ModelOutput) or not torch.is_tensor(outputs.get("last_hidden_state")):
        return False
    if not hasattr(base, _IS_REPRODUCED):
        with torch.no_grad():
            again = logits_of(base, body, outputs, outputs["last_hidden_state"][:, at].flatten(0, 1))
        limit = (1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2) * logits.detach().abs().max()
        setattr(base, _IS_REPRODUCED, bool((again - logits.detach().flatten(0, 1)).abs().max() <= limit))
    return getattr(base, _IS_REPRODUCED)


def logits_of(base: PreTrainedModel, body: nn.Module, outputs: Any, rows: torch.Tensor) -> torch.Tensor:
    """Compute a model's logits ``[N, V]`` from rows ``[N, H]`` of its decoder's output.

    Args:
        base: the transformers model itself.
        body: its decoder; other threads see it unchanged.
        outputs: the decoder's output, for everything except the last hidden state.
        rows: rows of the last hidden state.
    """
    given = type(outputs)(**{**outputs, "last_hidden_state": rows[None]})
    quiet = {"output_router_logits": False} if "router_logits" in outputs else {}
    ids = torch.zeros(1, len(rows), dtype=torch.int64, device=rows.device)
    with _in_place_of(body, lambda *_args, **_kwargs: given):
        return type(base).forward(base, input_ids=ids, use_cache=False, **quiet).logits.flatten(0, 1)
