"""Makes a batch of rows of samples: padded, or packed into one row with its segments marked.

Shapes: B rows, T tokens of the longest row (or of all rows together), S segments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halftune.data.order import round_up
from halftune.data.sample import NO_LABEL, Sample


def collate(rows: Sequence[Sequence[Sample]], pad_token_id: int, *, packed: bool) -> dict[str, Tensor | int]:
    """Makes the inputs of one forward pass.

    Args:
        rows: each one sample, or several with ``packed``.
        pad_token_id: id of padding.
        packed: no padding between samples and no attention across them.

    Returns:
        Without packing: ``input_ids``, ``attention_mask``, ``labels``, int64[B, T], padded on the right to a multiple
        of 8 (mask 0, label -100). Packed: one row ``input_ids``, ``labels``, ``position_ids`` int64[1, T] (positions
        restart at each segment, whose first token has no label), ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32[S + 1],
        ``max_length_q`` and ``max_length_k`` (int), ``seq_idx`` int32[1, T]; what fills it up to a multiple of 8 is a
        segment of its own.
    """
    return _packed([sample for row in rows for sample in row], pad_token_id) if packed else _padded(rows, pad_token_id)


def _padded(rows: Sequence[Sequence[Sample]], pad_token_id: int) -> dict[str, Tensor | int]:
    samples = [sample for (sample,) in rows]
    shape = (len(samples), round_up(max(len(sample.input_ids) for sample in samples)))
    ids_BT = np.full(shape, pad_token_id, dtype=np.int64)
    labels_BT = np.full(shape, NO_LABEL, dtype=np.int64)
    mask_BT = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        ids_BT[row, :length], labels_BT[row, :length], mask_BT[row, :length] = sample.input_ids, sample.labels, 1
    return {
        "input_ids": torch.from_numpy(ids_BT),
        "attention_mask": torch.from_numpy(mask_BT),
        "labels": torch.from_numpy(labels_BT),
    }


def _packed(samples: Sequence[Sample], pad_token_id: int) -> dict[str, Tensor | int]:
    lengths = [len(sample.input_ids) for sample in samples]
    total = sum(lengths)
    if tail := round_up(total) - total:
        lengths.append(tail)
    ends_S = np.cumsum(lengths, dtype=np.int64)
    starts_S = ends_S - np.asarray(lengths, dtype=np.int64)
    ids_T = np.full(total + tail, pad_token_id, dtype=np.int64)
    labels_T = np.full(total + tail, NO_LABEL, dtype=np.int64)
    ids_T[:total] = np.concatenate([sample.input_ids for sample in samples])
    labels_T[:total] = np.concatenate([sample.labels for sample in samples])
    labels_T[starts_S] = NO_LABEL
    segments_T = np.repeat(np.arange(len(lengths)), lengths)
    positions_T = np.arange(total + tail) - starts_S[segments_T]
    bounds = torch.from_numpy(np.concatenate([[0], ends_S]).astype(np.int32))
    return {
        "input_ids": torch.from_numpy(ids_T)[None],
        "labels": torch.from_numpy(labels_T)[None],
        "position_ids": torch.from_numpy(positions_T.astype(np.int64))[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds.clone(),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.from_numpy(segments_T.astype(np.int32))[None],
    }
