"""What the scans hold where they run in torch (`cpu.py`), in bytes, and how they cut their work; needs no torch."""

from __future__ import annotations

from typing import NamedTuple

KEPT_BYTES = 16 << 20  # of one call, beside inputs and states
_WIDE = 4  # computed in fp32


class Cut(NamedTuple):
    """How `chunk_scan` cuts an operator's work.

    Attributes:
        chunk: rows of a chunk.
        units: value heads × samples at once.
        together: chunks at once: more leave torch's threads fewer small calls, and take more memory.
        workspace: the backward pass of so many chunks and heads, in multiples of what its forward pass made; measured.
    """

    chunk: int
    units: int
    together: int
    workspace: float

    def of_groups(self, each: int) -> tuple[int, int]:
        """Key heads × samples at once, and chunks, where ``each`` value heads share a key head."""
        return max(1, self.units // each), max(1, self.units * self.together // max(each, self.units))


CUTS = {
    "gated_delta_rule": Cut(64, 16, 8, 3.4),
    "ssd": Cut(64, 16, 8, 5.0),
    "kda": Cut(64, 16, 1, 3.0),
    "rwkv7": Cut(64, 16, 1, 3.0),
}
# They compute everything again: of their forward passes only the states that enter a chunk are kept.
_FORGETFUL = ("kda", "rwkv7")


class Held(NamedTuple):
    """Bytes of one call beside its inputs, output and their gradients.

    Attributes:
        kept: from the forward pass to the backward pass.
        workspace: for the length of the backward pass.
    """

    kept: int
    workspace: int


def held_in_torch(operator: str, samples: int, length: int, *, heads: int, groups: int, keys: int, values: int) -> Held:
    """What a call of a scan with ``samples`` samples of ``length`` rows holds.

    Args:
        operator: ``gated_delta_rule``, ``kda``, ``rwkv7`` or ``ssd``.
        samples: of the call; rows of a batch, or samples of a packed row.
        length: of each.
        heads: value heads.
        groups: key heads.
        keys: K.
        values: V.
    """
    cut = CUTS[operator]
    each = heads // groups if operator not in _FORGETFUL else 1
    most, together = cut.of_groups(each)
    chunks, wide = -(-length // cut.chunk), min(heads // each, most)
    beside = min(samples, most // wide)
    blocks = -(-samples // beside) * -(-heads // (each * wide))
    units, pieces = beside * wide, -(-chunks // together)
    own, entered = _elements(operator, cut.chunk, keys, values, each)
    state = keys * values * each
    room, kept = KEPT_BYTES // blocks, (pieces - 1) * units * state * _WIDE
    for piece in range(pieces if operator not in _FORGETFUL else 0):
        count = min(together, chunks - piece * together)
        size = units * (count * own + (count - (piece == 0)) * entered) * _WIDE
        if size <= room:
            room, kept = room - size, kept + size
    made = units * min(together, chunks) * (own + entered) * _WIDE
    return Held(blocks * kept, round(cut.workspace * made))


def _elements(operator: str, chunk: int, keys: int, values: int, each: int) -> tuple[int, int]:
    """Numbers that the forward pass makes of a chunk and key head, and more of them where a state enters."""
    square, rows = chunk * chunk, chunk * keys
    if operator == "gated_delta_rule":
        own = 2 * rows + 2 * chunk + 2 * square + each * (3 * square + 3 * chunk + 1 + chunk * values)
        return own, each * (2 * chunk * values + keys * values)
    if operator == "ssd":
        return 2 * rows + square + each * (square + 2 * chunk + 1 + chunk * values), each * keys * values
    # four operands, decayed to and from the state and at each halving of the chunk, and the chunk's matrices
    return (8 + chunk.bit_length()) * rows + 4 * square, keys * values
