"""Known problems of GPUs with Triton versions, as data: kernels are refused, or need a self-check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Shared memory per block in bytes, by compute capability (CUDA programming guide, table of compute capabilities: the
# opt-in maximum per block).
SHARED_MEMORY: dict[int, int] = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
OLDEST_TRITON = (3, 6, 0)


@dataclass(frozen=True)
class Row:
    """A known problem of a range of GPUs and Triton versions.

    Attributes:
        capabilities: from, to (exclusive), compute capability as 10 * major + minor.
        versions: from, to (exclusive).
        operators: affected operators; empty for all.
        verdict: ``refuse`` disables the kernels; ``prove`` runs the self-check before the first use.
        reason: the problem, as printed in the plan.
    """

    capabilities: tuple[int, int]
    versions: tuple[tuple[int, ...], tuple[int, ...]]
    operators: tuple[str, ...]
    verdict: Literal["refuse", "prove"]
    reason: str


_ALL = ((0, 0, 0), (999,))
DELTA = ("gated_delta_rule", "kda", "rwkv7")
SCANS = ("ssd", *DELTA)
DENSE = (
    *("rms_norm", "gated_rms_norm", "gated_activation", "adapted_activation", "rope"),
    *("linear_cross_entropy", "float8_rows"),
)
ROWS: tuple[Row, ...] = (
    Row((0, 70), _ALL, (), "refuse", "Triton supports no GPU older than sm_70"),
    Row(
        (70, 80),
        _ALL,
        ("adapted_activation", *SCANS),
        "refuse",
        "Triton 3.6 to 3.9 emit no tensor-core instructions for sm_70 and sm_75; torch's matmuls use them",
    ),
    Row((70, 89), _ALL, ("float8_rows",), "refuse", "Triton rounds to float8 from sm_89 on"),
    Row(
        (90, 100),
        ((3, 4, 0), (3, 7, 1)),
        SCANS,
        "prove",
        "on Hopper, Triton 3.4.0 to 3.7.0 gave wrong results of linear attention for some tile shapes",
    ),
    Row(
        (90, 100),
        ((3, 7, 1), (999,)),
        DELTA,
        "prove",
        "on Hopper, delta-rule backward kernels gave wrong gradients for some warp counts in every Triton so far",
    ),
    Row(
        (100, 130),
        ((0, 0, 0), (3, 8, 0)),
        SCANS,
        "prove",
        "on Blackwell, chains of dots raced before Triton 3.8 and gave NaN or changing gradients",
    ),
    # last: where a known problem has no row, this machine's results still decide
    Row((80, 999), _ALL, (), "prove", "a kernel is used where its results are right on this machine"),
)


def rows_for(operator: str, capability: int, version: tuple[int, ...]) -> list[Row]:
    """Return the rows of an operator on a GPU with a Triton version; refusals first."""
    found = [
        row
        for row in ROWS
        if row.capabilities[0] <= capability < row.capabilities[1]
        and row.versions[0] <= version < row.versions[1]
        and (not row.operators or operator in row.operators)
    ]
    return sorted(found, key=lambda row: row.verdict != "refuse")
