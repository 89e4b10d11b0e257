"""A batch: the tensors of one forward pass on one process, padded, or packed into one row with segment boundaries.

Shapes: B rows, T tokens of the longest row (or of all rows together), S segments, E examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from halftune.data.order.epoch import round_up
from halftune.data.store import NO_LABEL, Example, Segment


def collate(examples: Sequence[Example], pad_token_id: int, *, packed: bool) -> Batch:
    """Collate examples into the inputs of one forward pass; the caller sets ``weight`` and the token counts.

    Args:
        examples: at least one.
        pad_token_id: token id of padding.
        packed: no padding between segments and no attention across them.

    Returns:
        Padded: ``input_ids``, ``attention_mask``, ``labels``, int64[B, T], one segment a row, padded on
        the right to a multiple of 8 (mask 0, label -100). Packed: one row ``input_ids``, ``labels``, ``position_ids``
        int64[1, T] (positions restart at each segment, whose first token has no label) and ``seq_idx`` int32[1, T],
        the extras ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32[S + 1], ``max_length_q`` and ``max_length_k`` (int);
        padding to a multiple of 8 is a segment of its own.
    """
    segments = [segment for example in examples for segment in example.segments]
    batch = (_packed if packed else _padded)(segments, pad_token_id)
    owners = np.repeat(np.arange(len(examples)), [len(example.segments) for example in examples])
    return replace(batch, segment_of_example=torch.from_numpy(owners))


def _padded(segments: Sequence[Segment], pad_token_id: int) -> Batch:
    shape = (len(segments), round_up(max(len(segment.input_ids) for segment in segments)))
    ids_BT = np.full(shape, pad_token_id, dtype=np.int64)
    labels_BT = np.full(shape, NO_LABEL, dtype=np.int64)
    mask_BT = np.zeros(shape, dtype=np.int64)
    for row, segment in enumerate(segments):
        length = len(segment.input_ids)
        ids_BT[row, :length], labels_BT[row, :length], mask_BT[row, :length] = segment.input_ids, segment.labels, 1
    tokens = {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT}
    return Batch({name: torch.from_numpy(values) for name, values in tokens.items()})


def _packed(segments: Sequence[Segment], pad_token_id: int) -> Batch:
    lengths = [len(segment.input_ids) for segment in segments]
    total = sum(lengths)
    if tail := round_up(total) - total:
        lengths.append(tail)
    ends_S = np.cumsum(lengths, dtype=np.int64)
    starts_S = ends_S - np.asarray(lengths, dtype=np.int64)
    ids_T = np.full(total + tail, pad_token_id, dtype=np.int64)
    labels_T = np.full(total + tail, NO_LABEL, dtype=np.int64)
    ids_T[:total] = np.concatenate([segment.input_ids for segment in segments])
    labels_T[:total] = np.concatenate([segment.labels for segment in segments])
    labels_T[starts_S] = NO_LABEL
    segments_T = np.repeat(np.arange(len(lengths)), lengths)
    positions_T = np.arange(total + tail) - starts_S[segments_T]
    bounds = torch.from_numpy(np.concatenate([[0], ends_S]).astype(np.int32))
    tokens = {
        "input_ids": torch.from_numpy(ids_T)[None],
        "labels": torch.from_numpy(labels_T)[None],
        "position_ids": torch.from_numpy(positions_T.astype(np.int64))[None],
        "seq_idx": torch.from_numpy(segments_T.astype(np.int32))[None],
    }
    longest = max(lengths)
    return Batch(
        tokens,
        {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds.clone(),
            "max_length_q": longest,
            "max_length_k": longest,
        },
    )


def some_segments(batch: Batch, kept: Tensor) -> Batch | None:
    """The segments of a batch for which ``kept`` is true: bool ``[S]``; None in a run with media.

    There, a batch without media is not taken apart either, so that all processes make as many forward passes.
    The segments' order stays; columns and counts are those of the whole batch. Synchronises with the device.
    """
    if batch.of_media:
        return None
    extras = {name: value for name, value in batch.extras.items() if name != LABEL_POSITIONS}
    more = {"segment_of_example": batch.segment_of_example[kept], "examples": ()}
    if "seq_idx" not in batch.tokens and not extras:
        return replace(batch, tokens={name: value[kept] for name, value in batch.tokens.items()}, extras={}, **more)
    if set(extras) != _BOUNDS or set(batch.tokens) != _PACKED:
        return None
    bounds = batch.extras["cu_seq_lens_q"]
    assert isinstance(bounds, Tensor)
    kept = F.pad(kept, (0, len(bounds) - 1 - len(kept)))  # not the segment of padding
    owners = batch.tokens["seq_idx"][0].long()
    places = kept[owners].nonzero().squeeze(1)
    tokens = {name: value[:, places] for name, value in batch.tokens.items()}
    tokens["seq_idx"] = (kept.cumsum(0) - 1)[owners[places]].to(torch.int32)[None]
    bounds = F.pad(bounds.diff()[kept].cumsum(0), (1, 0)).to(torch.int32)
    return replace(batch, tokens=tokens, extras={**extras, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}, **more)


_BOUNDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_PACKED = {"input_ids", "labels", "position_ids", "seq_idx"}
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
        of_media: whether the run trains on media, also where this batch has none.
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
    of_media: bool = False

    @property
    def inputs(self) -> dict[str, Tensor | int]:
        """Keyword arguments of a transformers forward pass: all tokens and extras except labels and their positions."""
        both = {**self.tokens, **self.extras}
        return {name: value for name, value in both.items() if name not in ("labels", LABEL_POSITIONS)}

    def pinned(self) -> Batch:
        """A copy in pinned memory, for asynchronous copies to a GPU."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """A copy on ``device``; asynchronous from pinned memory, ordered by the current CUDA stream.

        The layers of a packed row ask the host for its boundaries, which therefore knows those of the copy too.
        """
        moved = self._each(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))
        if device.type == "cpu":
            return moved
        from halftune_kernels.arguments import remember

        for name in _BOUNDS & self.extras.keys():
            here, there = self.extras[name], moved.extras[name]
            if isinstance(here, Tensor) and isinstance(there, Tensor) and here.device.type == "cpu":
                remember(there, here.tolist())
        return moved

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


def without_labels(batch: Batch) -> Batch:
    """A batch of the same shape that teaches nothing and counts nothing: it keeps processes in step."""
    tokens = {**batch.tokens, "labels": torch.full_like(batch.tokens["labels"], NO_LABEL)}
    extras = {**batch.extras, LABEL_POSITIONS: torch.zeros(0, dtype=torch.int64)}
    columns = {**batch.columns, WEIGHT: torch.zeros_like(batch.columns[WEIGHT])}
    return Batch(tokens, extras, columns, batch.segment_of_example, of_media=batch.of_media)
