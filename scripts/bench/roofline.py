"""The least time that each linear-attention operator can take on a GPU, from its bytes and products.

    python scripts/bench/roofline.py           # prints the table
    python scripts/bench/roofline.py --write   # puts it into docs/kernels.md

Counted per token and value head, as the kernels cut the work (chunks of C rows, what is kept for the backward pass):
every tensor that crosses between kernels is written once and read once, products are counted in full tiles. The floor
is the larger of the two times; what a GPU reaches of it is for `kernels_gpu.py` to say.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- roofline: scripts/bench/roofline.py -->", "<!-- end of the roofline -->"
C = 64
HALF, FULL = 2, 4  # bytes of a number
TOKENS, HEADS = 8192, 32


@dataclass(frozen=True)
class Gpu:
    """Bytes and half-precision operations a second: what programs reach on an H200, the data sheet's for the T4."""

    name: str
    bandwidth: float
    products: float


GPUS = (Gpu("H200", 4.3e12, 790e12), Gpu("T4", 0.3e12, 65e12))


@dataclass(frozen=True)
class Work:
    """Of one token and value head: multiply-adds and bytes."""

    macs: float
    moved: float

    @property
    def flops(self) -> float:
        return 2 * self.macs

    def floor(self, gpu: Gpu, tokens: int = TOKENS, heads: int = HEADS) -> float:
        """Milliseconds."""
        return 1e3 * tokens * heads * max(self.moved / gpu.bandwidth, self.flops / gpu.products)


def operators() -> dict[str, tuple[Work, Work]]:
    """Forward and backward of each at the head sizes models have."""
    return {
        "gated delta rule, K = V = 128, 2 value heads to a key head": gated_delta_rule(128, 128, 2),
        "Kimi delta attention, K = V = 128": kda(128, 128),
        "simple decay / Mamba-2, K = 128, V = 64, one group of 32 heads": simple_decay(128, 64, 32),
        "RWKV-7, K = V = 64": rwkv7(64, 64),
        "causal convolution, 4 taps, 128 channels": elementwise(128, 1, 4),
        "gated RMSNorm, 128 channels": elementwise(128, 2, 2),
    }


def gated_delta_rule(k: int, v: int, group: int) -> tuple[Work, Work]:
    """`solve`, `scan_forward`; `scan_backward`, `chunk_backward`, `reduce_heads`."""
    keys, values, square, state, gates = 2 * k * HALF / group, v * HALF, 2 * C * HALF, k * v * HALF / C, 3 * FULL
    solve = 2 * C * k + 40 * 16**3 / C  # K Kᵀ, Q Kᵀ; forty products of 16 rows
    forward = Work(solve + 3 * k * v + 2 * C * v, 2 * keys + 2 * gates + 2 * square + 3 * values + state)
    scan = Work(3 * k * v + 2 * C * v, keys + gates + square + 3 * values + state)
    chunk = Work(3 * k * v + 4 * C * v + 5 * C * k, keys + gates + 4 * values + 2 * state + 2 * k * HALF + 2 * FULL)
    heads = Work(0, 2 * k * HALF + 2 * keys)
    return forward, _sum(scan, chunk, heads)


def kda(k: int, v: int) -> tuple[Work, Work]:
    """`products`, `solve`, `scan_forward`; both again, `scan_backward`, `square_gradients`, `chunk_backward`."""
    keys, values, decay, state, square = 2 * k * HALF, v * HALF, k * FULL, k * v * HALF / C, C * HALF
    products = Work(2 * C * k, keys + decay + 3 * k * HALF + square + C * FULL)
    solve = Work(C * (k + v) / 2 + C * C, C * FULL + k * HALF + values + square + k * HALF + values)
    forward = Work(3 * k * v + C * v, 3 * k * HALF + square + 3 * values + state)
    scan = Work(3 * k * v + C * v, 3 * k * HALF + square + 2 * values + state)
    squares = Work(3 * C * v, 2 * square + 6 * values)
    chunk = Work(3 * k * v + 4 * C * k, keys + decay + 2 * square + 4 * values + 2 * state + keys + decay)
    return _sum(products, solve, forward), _sum(products, solve, scan, squares, chunk)


def rwkv7(k: int, v: int) -> tuple[Work, Work]:
    """As `kda`, with a second pair of keys."""
    one, two = kda(k, v)
    more = Work(2 * C * k + C * v + k * v + C * v, 2 * 2 * k * HALF + 2 * C * HALF + v * HALF)
    back = Work(2 * more.macs + C * v, 3 * more.moved)
    return _sum(one, more), _sum(two, back)


def simple_decay(k: int, v: int, group: int) -> tuple[Work, Work]:
    """Two launches forward, two backward and the sum over the heads of a group."""
    keys, values, state, gates = 2 * k * HALF / group, v * HALF, k * v * HALF / C, 2 * FULL
    forward = Work(C * k + C * v + 2 * k * v, keys + 2 * values + gates + state)
    scan = Work(k * v, keys + values + gates + state)
    chunk = Work(4 * C * k + 2 * C * v + 3 * k * v, keys + 3 * values + 2 * gates + 2 * state + 2 * k * HALF)
    return forward, _sum(scan, chunk, Work(0, 2 * k * HALF + keys))


def elementwise(channels: int, inputs: int, macs: int) -> tuple[Work, Work]:
    """Read the inputs, write one output; backward reads the inputs and a gradient and writes the inputs' gradients."""
    size = channels * HALF
    return Work(channels * macs, (inputs + 1) * size), Work(2 * channels * macs, (2 * inputs + 1) * size)


def _sum(*works: Work) -> Work:
    return Work(sum(work.macs for work in works), sum(work.moved for work in works))


def table() -> str:
    """Markdown: kB and kFLOP per token and value head, floors in ms for 8,192 tokens and 32 heads."""
    columns = " | ".join(f"{gpu.name}: bytes, products, floor, ms" for gpu in GPUS)
    lines = [f"| operator, bf16 (T4: fp16) | pass | kB | kFLOP | FLOP/B | {columns} | reached |"]
    lines += ["|---|---|---:|---:|---:|" + "---:|" * len(GPUS) + "---|"]
    for name, passes in operators().items():
        for which, work in zip(("forward", "backward"), passes, strict=True):
            cells = []
            for gpu in GPUS:
                moved = Work(0, work.moved).floor(gpu)
                cells.append(f"{moved:.2f}, {Work(work.macs, 0).floor(gpu):.2f}, **{work.floor(gpu):.2f}**")
            cost = f"{work.moved / 1e3:.2f} | {work.flops / 1e3:.0f} | {work.flops / work.moved:.0f}"
            lines.append(f"| {name} | {which} | {cost} | {' | '.join(cells)} | not run on a GPU |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    if parser.parse_args().write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
    else:
        print(table())


if __name__ == "__main__":
    main()
