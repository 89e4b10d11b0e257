"""A batch: the tensors of one forward pass on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

# int64[P], an extra: positions that predict a label in at least one row. Computed on the CPU: on a GPU it would sync.
LABEL_POSITIONS = "label_positions"
# fp32[E], a column: the weight of each example in the loss normaliser; 0 for filler examples.
WEIGHT = "weight"

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Whole examples as tensors: B rows of T positions, which hold S segments of E examples.

    A padded row holds one segment; packed, one row holds all of them. Segments of one example follow each other.

    Attributes:
        tokens: tensors ``[B, T]``, aligned with positions (``input_ids``, ``labels`` …).
        extras: tensors without a position axis, or integers (``cu_seq_lens_q``, ``max_length_q``, ``LABEL_POSITIONS``).
        columns: fp32 ``[E]``: ``WEIGHT``, and the examples' own columns.
        segment_of_example: int64 ``[S]``, the example that each segment belongs to.
        weight: the batch's part of the loss normaliser, as the method defines it.
        fed, real, trained: token counts: with padding, without padding, with a predicted label.
        examples: indices into the split; empty for a filler batch that keeps processes in step.
    """

    tokens: dict[str, Tensor]
    extras: dict[str, Tensor | int] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    segment_of_example: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    weight: float = 0.0
    fed: int = 0
    real: int = 0
    trained: int = 0
    examples: tuple[int, ...] = ()

    @property
    def inputs(self) -> dict[str, Tensor | int]:
        """Keyword arguments of a transformers forward pass: all tokens and extras except labels and their positions."""
        both = {**self.tokens, **self.extras}
        return {name: value for name, value in both.items() if name not in ("labels", LABEL_POSITIONS)}

    def pinned(self) -> Batch:
        """A copy in pinned memory, for asynchronous copies to a GPU."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """A copy on ``device``; asynchronous from pinned memory, ordered by the current CUDA stream."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def changed(group: dict[str, T]) -> dict[str, T]:
            return {name: change(value) if torch.is_tensor(value) else value for name, value in group.items()}  # type: ignore[misc]

        return replace(
            self,
            tokens=changed(self.tokens),
            extras=changed(self.extras),
            columns=changed(self.columns),
            segment_of_example=change(self.segment_of_example),
        )
