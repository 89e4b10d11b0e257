"""Loss and log-probabilities of labels, without the logits of all positions at once.

Where the logits are the plain product of a linear head, the loss never materialises them. Otherwise the model's own
code after the decoder (head, its adapter, scaling, soft-capping) runs on chunks of the decoder's output: meanwhile the
decoder's forward returns the chunk. Logits that exist already are summed without a second copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from halftune.data.store import NO_LABEL
from halftune.model.attention.register import probe_pass
from halftune_kernels.ops.linear_cross_entropy import linear_cross_entropy_sum

# Bytes of fp32 scratch per chunk of rows: fits the cache on a CPU, keeps other devices busy.
_LOSS_CHUNK_BYTES = {"cpu": 2 << 20}
_LOSS_CHUNK_BYTES_ELSEWHERE = 64 << 20

# Operations whose backward pass does not read their result: the gradient may overwrite it. Views and dtype conversions
# do not save it either.
_KEEP_NO_RESULT = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Addmm", "Bmm", "Linear", "View", "UnsafeView", "ReshapeAlias", "Mul", "Div", "Add", "ToCopy")
)


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    """Sum of :func:`cross_entropy_rows`: an fp32 scalar; fp64 for fp64 logits."""
    return cross_entropy_rows(logits, targets, **options).sum()


def cross_entropy_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunk_bytes: int | None = None,
    overwrite: bool | None = None,
    all_labelled: bool = False,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``-log softmax(logits)[target]`` of each row, computed in fp32; 0 for a row without a target.

    The fp32 copy is at most one chunk of rows, and the gradient overwrites the logits if nothing else needs them. Same
    rounding as ``F.cross_entropy(logits.float(), targets, reduction="none")``.

    Args:
        logits: ``[N, V]``, any float dtype.
        targets: ``[N]`` int64, -100 for none.
        chunk_bytes: of the fp32 scratch; the default depends on the device.
        overwrite: whether the gradient may overwrite ``logits``; by default only if the operation that produced them is
            known not to save them.
        all_labelled: every row has a target; otherwise finding the targets synchronises with the device.
        label_smoothing: as in ``F.cross_entropy``; see ``linear_cross_entropy_sum``.

    Returns:
        fp32 ``[N]``; fp64 for fp64 logits.
    """
    if overwrite is None:
        overwrite = _may_overwrite(logits)
    rows = scratch_rows(logits) if chunk_bytes is None else max(1, chunk_bytes // (4 * logits.shape[-1]))
    with torch.autocast(logits.device.type, enabled=False):
        found = _CrossEntropy.apply(logits, targets, rows, overwrite, all_labelled, label_smoothing)
        return found  # type: ignore[return-value]


def scratch_rows(logits: torch.Tensor) -> int:
    """Rows of logits whose fp32 scratch fits the cache."""
    size = _LOSS_CHUNK_BYTES.get(logits.device.type, _LOSS_CHUNK_BYTES_ELSEWHERE)
    return max(1, size // (4 * logits.shape[-1]))


class _CrossEntropy(torch.autograd.Function):
    """Saves log Σ exp per row; backward recomputes the softmax from it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        rows: int,
        overwrite: bool,
        all_labelled: bool,
        smoothing: float,
    ) -> torch.Tensor:
        every = torch.arange(targets.numel(), device=targets.device)
        kept = every if all_labelled else (targets != NO_LABEL).nonzero().squeeze(1)
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_sums = torch.zeros(targets.shape[0], 1, dtype=exact, device=logits.device)
        losses = torch.zeros_like(log_sums)
        everywhere = kept.numel() == targets.numel()
        for start in range(0, kept.numel(), rows):
            index = slice(start, start + rows) if everywhere else kept[start : start + rows]
            chunk, target = logits[index], targets[index, None]
            # log_softmax is one fused pass; log Σ exp follows from what it did to the target's logit.
            chances = F.log_softmax(chunk, dim=-1, dtype=exact)
            at_target = chances.gather(1, target)
            losses[index] = at_target.neg()
            if smoothing:
                losses[index] = (smoothing - 1) * at_target - smoothing * chances.mean(1, keepdim=True)
            del chances  # one chunk at a time
            log_sums[index] = chunk.gather(1, target).to(exact) - at_target
        ctx.save_for_backward(logits, targets, log_sums, kept)
        ctx.rows, ctx.overwrite, ctx.smoothing = rows, overwrite, smoothing
        return losses.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, log_sums, kept = ctx.saved_tensors
        everywhere = kept.numel() == targets.numel()
        # detach shares the version counter: another user of the logits gets an error instead of a wrong gradient.
        out = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        if not everywhere:
            out = out if ctx.overwrite else out.zero_()
        at_target = torch.full((), ctx.smoothing - 1, dtype=log_sums.dtype, device=logits.device)
        for start in range(0, kept.numel(), ctx.rows):
            index = slice(start, start + ctx.rows) if everywhere else kept[start : start + ctx.rows]
            target = targets[index, None]
            softmax = logits[index].to(log_sums.dtype, copy=True).sub_(log_sums[index]).exp_()
            softmax.scatter_add_(1, target, at_target.expand_as(target))
            if ctx.smoothing:
                softmax.sub_(ctx.smoothing / logits.shape[-1])
            out[index] = softmax.mul_(grad[index, None]).to(out.dtype)
        if ctx.overwrite and not everywhere:
            out.masked_fill_((targets == NO_LABEL)[:, None], 0)
        return out, None, None, None, None, None


def _may_overwrite(logits: torch.Tensor) -> bool:
    """Whether ``logits`` are views of the result of an operation that does not save it."""
    node = logits.grad_fn
    while node is not None and node.name() in _KEEP_NO_RESULT:
        if not node.name().endswith(("ViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0")):
            return True
        node = node.next_functions[0][0]
    return False


Head = Callable[[torch.Tensor], torch.Tensor]  # [N, H] -> [N, V]


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
    """

    rows: torch.Tensor
    head: Head
    vocabulary: int
    targets: torch.Tensor
    places: torch.Tensor
    frozen: bool = False


# Bytes of a chunk's fp32 logits, and minimum rows: reading the head once per chunk must stay cheap.
_CHUNK_BYTES = {"cpu": 4 << 20}
_CHUNK_BYTES_ELSEWHERE = 256 << 20
_FEWEST_ROWS = 128
_proven_logits: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def rows_at_a_time(vocabulary: int, device: torch.device) -> int:
    """Rows per chunk for a device."""
    return max(_FEWEST_ROWS, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE) // (4 * vocabulary))


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
    if base not in _proven_logits:
        with torch.no_grad():
            again = logits_of(base, body, outputs, outputs["last_hidden_state"][:, at].flatten(0, 1))
        limit = (1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2) * logits.detach().abs().max()
        _proven_logits[base] = bool((again - logits.detach().flatten(0, 1)).abs().max() <= limit)
    return _proven_logits[base]


def logits_of(base: PreTrainedModel, body: nn.Module, outputs: Any, rows: torch.Tensor) -> torch.Tensor:
    """Compute a model's logits ``[N, V]`` from rows ``[N, H]`` of its decoder's output.

    Args:
        base: the transformers model itself.
        body: its decoder; other threads see it unchanged.
        outputs: the decoder's output, for everything except the last hidden state.
        rows: rows of the last hidden state.
    """
    inside, own = threading.get_ident(), body.forward
    given = type(outputs)(**{**outputs, "last_hidden_state": rows[None]})

    def forward(*args: Any, **kwargs: Any) -> Any:
        return given if threading.get_ident() == inside else own(*args, **kwargs)

    quiet = {"output_router_logits": False} if "router_logits" in outputs else {}
    patched = "forward" in vars(body)
    body.forward = forward
    try:
        ids = torch.zeros(1, len(rows), dtype=torch.int64, device=rows.device)
        return type(base).forward(base, input_ids=ids, use_cache=False, **quiet).logits[0]
    finally:
        if patched:
            body.forward = own
        else:
            del body.forward


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
    if not _is_plain(head):
        return None
    if base not in _proven:
        returned: list[torch.Tensor] = []
        with _probing(head, returned):
            logits = base(**_few_tokens(inputs), use_cache=False).logits
        _proven[base] = len(returned) == 1 and returned[0] is logits
    return head if _proven[base] else None


def _is_plain(head: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a head can be only a product: not wrapped, hooked or compiled, and not in fp16."""
    if type(head) is not nn.Linear or torch.compiler.is_compiling() or "forward" in vars(head):
        return False
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    return not any(hooks) and _computes_in(head) != torch.float16


@contextmanager
def hidden_instead_of_logits(head: nn.Linear | None) -> Iterator[None]:
    """Inside, the head, if there is one, returns its input in its compute dtype; other threads get its output."""
    if head is None:
        yield
        return
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
    head: nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    *,
    all_labelled: bool = False,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum of a head's cross-entropy over rows with a target; see ``linear_cross_entropy_sum``."""
    options = {"scale": scale, "all_labelled": all_labelled, "label_smoothing": label_smoothing}
    with torch.autocast(hidden.device.type, enabled=False):
        return linear_cross_entropy_sum(hidden, head.weight, targets, head.bias, **options)


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
