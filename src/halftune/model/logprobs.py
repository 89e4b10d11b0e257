"""Log-probabilities of labels with any head, materialising the logits of a few rows at a time.

The model's own code after the decoder (head, its adapter, scaling, soft-capping) runs on chunks of the decoder's
output: meanwhile the decoder's forward returns the chunk.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

Head = Callable[[torch.Tensor], torch.Tensor]  # [N, H] -> [N, V]

# Bytes of a chunk's fp32 logits, and minimum rows: reading the head once per chunk must stay cheap.
_CHUNK_BYTES = {"cpu": 4 << 20}
_CHUNK_BYTES_ELSEWHERE = 256 << 20
_FEWEST_ROWS = 128
_proven: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def logprobs(head: Head, rows: torch.Tensor, targets: torch.Tensor, temperature: float, chunk: int) -> torch.Tensor:
    """``log softmax(head(rows) / temperature)[target]`` of each row, in fp32 (fp64 for fp64).

    Args:
        head: from rows to logits.
        rows: ``[N, H]``, N > 0.
        targets: int64 ``[N]``.
        temperature: above 0.
        chunk: rows at a time.
    """

    def some(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = head(part)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits = logits if temperature == 1.0 else logits.to(wide) / temperature
        return F.log_softmax(logits, dim=-1, dtype=wide).gather(1, target[:, None]).squeeze(1)

    parts = zip(rows.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([checkpoint(some, part, target, use_reentrant=False) for part, target in parts])


def rows_at_a_time(vocabulary: int, device: torch.device) -> int:
    """Rows per chunk for a device."""
    return max(_FEWEST_ROWS, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE) // (4 * vocabulary))


def decoder_of(base: Any) -> nn.Module | None:
    """The decoder of a transformers model with a head; None for other models."""
    body = base.base_model if isinstance(base, PreTrainedModel) else None
    return None if body is base else body


@contextmanager
def outputs_of(body: nn.Module) -> Iterator[list[Any]]:
    """Inside, collects the outputs of a module."""
    seen: list[Any] = []
    handle = body.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


def is_head_of(base: PreTrainedModel, body: nn.Module, outputs: Any, at: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether :func:`logits_of` reproduces a model's logits ``[B, 1, V]`` at one position; checked once per model."""
    if not isinstance(outputs, ModelOutput) or not torch.is_tensor(outputs.get("last_hidden_state")):
        return False
    if base not in _proven:
        with torch.no_grad():
            again = logits_of(base, body, outputs, outputs["last_hidden_state"][:, at].flatten(0, 1))
        limit = (1e-4 if logits.dtype in (torch.float32, torch.float64) else 2e-2) * logits.detach().abs().max()
        _proven[base] = bool((again - logits.detach().flatten(0, 1)).abs().max() <= limit)
    return _proven[base]


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
