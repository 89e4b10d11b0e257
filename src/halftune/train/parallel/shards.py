"""Sharded tensors in safetensors files; any number of processes can read them.

torch's own writer for such checkpoints keeps a pickled index, or (for safetensors) neither moments nor checksums. Here
every file says in its header which rows of which whole tensor it holds, and a whole tensor is one whose first row is 0:
so a plain file reads the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, Replicate, Shard

from halftune.core.processes import heartbeat
from halftune.train.run_folder.checkpoints import part_name, parts

_ROWS = "rows"  # key of the header: JSON of tensor's name → [first row, length of each dimension of the whole tensor]


def own_rows(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return ``(first row, row count)`` of this process's shard; None if the tensor is not sharded."""
    if not isinstance(tensor, DTensor) or all(isinstance(place, Replicate) for place in tensor.placements):
        return None
    assert tensor.placements == (Shard(0),), f"fully_shard cuts along rows, not {tensor.placements}"
    mesh = tensor.device_mesh
    each = -(-tensor.shape[0] // mesh.size())  # as torch.chunk cuts
    first = min(mesh.get_local_rank() * each, tensor.shape[0])
    count = min(each, tensor.shape[0] - first)
    assert tensor.to_local().shape[0] == count, "fully_shard cuts as torch.chunk does"
    return first, count


def write_shares(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], rank: int, processes: int) -> Path:
    """Writes what this process holds: of tensors in shards its rows; others are rank 0's to write.

    Args:
        folder: where.
        name: of the file as it would be with one process, e.g. ``trainable.safetensors``.
        tensors: plain tensors and DTensors.
        rank, processes: which part of how many this is.

    Returns:
        the file.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    local: dict[str, torch.Tensor] = {}
    rows: dict[str, list[int]] = {}
    for key, tensor in tensors.items():
        held = own_rows(tensor)
        if held is None and rank:
            continue
        local[key] = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
        if held is not None:
            rows[key] = [held[0], *tensor.shape]
    path = folder / part_name(name, rank, processes)
    heartbeat.beat(sum(tensor.nbytes for tensor in local.values()))
    save_file(local, path, metadata={_ROWS: json.dumps(rows, sort_keys=True)})
    return path


@dataclass(frozen=True)
class _Piece:
    """Rows of a tensor in one open file."""

    file: Any
    key: str
    first: int
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the whole tensor, all of which are in here."""
        if not self.shape:
            return self.file.get_tensor(self.key)
        return self.file.get_slice(self.key)[start - self.first : stop - self.first]


class Stored:
    """Tensors of a checkpoint, sharded or not; they are read on request.

    Attributes:
        shapes: name → shape of the whole tensor.
    """

    def __init__(self, files: list[Any]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for file in files:
            rows = json.loads((file.metadata() or {}).get(_ROWS, "{}"))
            for key in file.keys():  # noqa: SIM118, not a mapping
                shape = tuple(file.get_slice(key).get_shape())
                first, *whole = rows.get(key, [0, *shape])
                self.shapes[key] = tuple(whole)
                self._pieces.setdefault(key, []).append(_Piece(file, key, first, shape))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.first)

    def read(self, key: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor, or ``(first, count)`` of its rows; nothing else is read.

        Raises:
            ValueError: some of these rows are in no file.
        """
        shape = self.shapes[key]
        first, count = rows or (0, shape[0] if shape else 0)
        found, reached = [], first
        for piece in self._pieces[key]:
            stop = min(first + count, piece.first + (piece.shape[0] if piece.shape else 0))
            if piece.first <= reached < stop or not piece.shape:
                found.append(piece.rows(reached, stop))
                reached = stop
        if reached != first + count:
            raise ValueError(f"rows from {reached} on of {key} are in no file")
        if not found:
            return self._pieces[key][0].rows(first, first).new_empty((0, *shape[1:]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def share(self, key: str, like: torch.Tensor | None) -> torch.Tensor:
        """What this process holds of a tensor that is shared as ``like`` is, where they have one shape; else all of it.

        Raises:
            ValueError: some of these rows are in no file.
        """
        if not isinstance(like, DTensor) or tuple(like.shape) != self.shapes[key] or (held := own_rows(like)) is None:
            return self.read(key).clone()  # a file's own pages go with the file
        rows = self.read(key, held)
        share: Any = torch.empty_like(like, dtype=rows.dtype, requires_grad=False)
        share.to_local().copy_(rows)
        return share


@contextmanager
def stored(checkpoint: Path, name: str) -> Iterator[Stored]:
    """Opens the files that hold what one process would have written as ``name``.

    Raises:
        OSError, ValueError, SafetensorError: they cannot be read.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(checkpoint / part, "pt")) for part in parts(checkpoint, name)]
        yield Stored(files)
