"""Activation memory of the scans in torch (`cpu.py`) in bytes, and their blocking; does not import torch."""

from __future__ import annotations

from typing import NamedTuple

KEPT_BYTES = 16 << 20  # saved for backward per call, besides inputs and states
_WIDE = 4  # computed in fp32


class Cut(NamedTuple):
    """The blocking of an operator in `chunk_scan`.

    Attributes:
        chunk: rows per chunk.
        units: value heads × samples per block.
        together: chunks per block: more means fewer small calls and more memory.
        workspace: memory of a block's backward pass as a multiple of its forward intermediates; measured.
    """

    chunk: int
    units: int
    together: int
    workspace: float

    def of_groups(self, each: int) -> tuple[int, int]:
        """Return key heads × samples and chunks per block if ``each`` value heads share a key head."""
        return max(1, self.units // each), max(1, self.units * self.together // max(each, self.units))


CUTS = {
    "gated_delta_rule": Cut(64, 16, 8, 3.4),
    "ssd": Cut(64, 16, 8, 5.0),
    "kda": Cut(64, 16, 1, 3.0),
    "rwkv7": Cut(64, 16, 1, 3.0),
}
# These recompute: they save only the states at the beginning of chunks.
_RECOMPUTED = ("kda", "rwkv7")


class Held(NamedTuple):
    """Bytes of a call besides its inputs, output and their gradients.

    Attributes:
        kept: saved for backward.
        workspace: allocated during backward.
    """

    kept: int
    workspace: int


def held_in_torch(operator: str, samples: int, length: int, *, heads: int, groups: int, keys: int, values: int) -> Held:
    """Return the memory of a scan over ``samples`` samples of ``length`` rows.

    Args:
        operator: ``gated_delta_rule``, ``kda``, ``rwkv7`` or ``ssd``.
        samples: rows of a batch, or samples of a packed row.
        length: rows per sample.
        heads: value heads.
        groups: key heads.
        keys: key size K.
        values: value size V.
    """
    cut = CUTS[operator]
    each = heads // groups if operator not in _RECOMPUTED else 1
    most, together = cut.of_groups(each)
    chunks, wide = -(-length // cut.chunk), min(heads // each, most)
    beside = min(samples, most // wide)
    blocks = -(-samples // beside) * -(-heads // (each * wide))
    units, pieces = beside * wide, -(-chunks // together)
    own, entered = _elements(operator, cut.chunk, keys, values, each)
    state = keys * values * each
    room, kept = KEPT_BYTES // blocks, (pieces - 1) * units * state * _WIDE
    for piece in range(pieces if operator not in _RECOMPUTED else 0):
        count = min(together, chunks - piece * together)
        size = units * (count * own + (count - (piece == 0)) * entered) * _WIDE
        if size <= room:
            room, kept = room - size, kept + size
    made = units * min(together, chunks) * (own + entered) * _WIDE
    return Held(blocks * kept, round(cut.workspace * made))


def _elements(operator: str, chunk: int, keys: int, values: int, each: int) -> tuple[int, int]:
    """Elements of intermediates per chunk and key head, and additional ones for chunks with an initial state."""
    square, rows = chunk * chunk, chunk * keys
    if operator == "gated_delta_rule":
        own = 2 * rows + 2 * chunk + 2 * square + each * (3 * square + 3 * chunk + 1 + chunk * values)
        return own, each * (2 * chunk * values + keys * values)
    if operator == "ssd":
        return 2 * rows + square + each * (square + 2 * chunk + 1 + chunk * values), each * keys * values
    # four operands, decayed to and from the state and at each halving of the chunk, and the chunk's matrices
    return (8 + chunk.bit_length()) * rows + 4 * square, keys * values
