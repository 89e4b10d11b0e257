"""Random combinations of what the operators promise to be right for, on the CPU path.

    python tests/kernels/bounds.py --count 300 --seed 0     # as many random combinations
    python tests/kernels/bounds.py --all                    # every operator x dtype x K x V x T, once each

Prints what is out of bounds; leaves with 1 if something is.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
from collections.abc import Iterator

import pytest
import torch
from operator_checks import CPU, poison_empty

from halftune_kernels.cases import Case, case, rounded
from halftune_kernels.dispatch import OPERATORS
from halftune_kernels.selfcheck import relative_error

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (16, 64, 96, 128, 256)
LENGTHS = (1, 2, 63, 64, 65, 100, 500, 2000)
DECAYS = ("learned", "none", "strong", "side by side")
_GATES = {"ssd": "g", "gated_delta_rule": "g", "kda": "g", "rwkv7": "w"}
_BY_TOKEN = 4_000_000  # states x tokens up to which the truth is the token recurrence: autograd keeps every state


@dataclasses.dataclass(frozen=True)
class Combination:
    """One call; segments, inputs and decay follow from the seed."""

    operator: str
    dtype: torch.dtype
    keys: int
    values: int
    length: int
    seed: int

    @property
    def bounds(self) -> tuple[int, ...]:
        """Random segments; where the row has room, one of length 1 and an empty one among them."""
        draw = random.Random(self.seed)
        cuts = {draw.randrange(self.length + 1) for _ in range(draw.randrange(4))}
        cuts |= {cut + 1 for cut in list(cuts)[:1] if cut < self.length}
        inside = sorted(cuts - {0, self.length})
        return (0, *inside, *inside[-1:], self.length)

    @property
    def decay(self) -> str:
        """Which decays."""
        return random.Random(self.seed + 1).choice(DECAYS)

    def case(self) -> Case:
        """The inputs, fp64."""
        plain = case(self.operator, self.keys, self.bounds, self.seed)
        inputs, generator = dict(plain.inputs), torch.Generator().manual_seed(self.seed)
        if self.operator not in _GATES:
            return plain
        v, state = inputs["v"], inputs["initial_state"]
        inputs["v"] = torch.randn(*v.shape[:3], self.values, generator=generator, dtype=v.dtype)
        inputs["initial_state"] = torch.randn(*state.shape[:3], self.values, generator=generator, dtype=v.dtype)
        name = _GATES[self.operator]
        kinds = torch.randint(3, inputs[name].shape, generator=generator)
        inputs[name] = {
            "learned": inputs[name],
            "none": torch.zeros_like(inputs[name]),
            "strong": torch.full_like(inputs[name], -30.0),
            "side by side": torch.where(kinds == 0, -20.0, torch.where(kinds == 1, 0.0, inputs[name])),
        }[self.decay]
        if "b" in inputs:  # without decay, erasing more than is there lets the state grow
            inputs["b"] = inputs["b"] * 0.5
        return dataclasses.replace(plain, inputs=inputs, scalar_decay="")  # exp(g) may be 0 to its dtype


def every(seed: int) -> Iterator[Combination]:
    """The product; operators without values' sizes of their own once for each size."""
    for n, (operator, dtype, keys, values, length) in enumerate(
        itertools.product(OPERATORS, DTYPES, SIZES, SIZES, LENGTHS)
    ):
        if operator in _GATES or keys == values:
            yield Combination(operator, dtype, keys, values, length, seed + n)


def failures(one: Combination) -> list[str]:
    """What of the outputs and gradients is out of bounds, uninitialised memory poisoned.

    In half, twice the error of rounding the truth once, and what rounded results carry into sums of them. Where states
    times tokens are too many for the recurrence, the truth is the chunked path in fp64, which
    `test_cpu_is_the_recurrence` compares with it.
    """
    made = rounded(one.case(), one.dtype)
    by_token = one.keys * one.values * one.length <= _BY_TOKEN
    truth = made.call(torch.float64, CPU, "reference" if by_token else "cpu")
    with pytest.MonkeyPatch.context() as patch:
        poison_empty(patch)
        found = made.call(one.dtype, CPU, "cpu")
    carried = _carried(made, truth, one.dtype) if one.operator == "adapted_activation" else {}
    out = []
    for name, value in found.items():
        once = relative_error(truth[name].to(one.dtype), truth[name]) + carried.get(name, 0.0)
        bound = 1e-5 if one.dtype == torch.float32 else max(2 * once, 1e-5)
        error = relative_error(value, truth[name])
        if not error <= bound:
            out.append(f"{one} {one.bounds} {one.decay}: {name} {error:.2e} > {bound:.2e}")
    return out


def _carried(made: Case, truth: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Expected relative error of sums over rounded results: independent errors add up by their squares, while the terms
    of the sum may cancel. ``y A_dᵀ`` is a sum over the y that is returned, the gradients of ``low`` and of both B are
    sums over those of gate and up.
    """

    def spread(name: str, factor: torch.Tensor, by_column: bool = False) -> torch.Tensor:
        value = truth[name]
        return ((value.t() if by_column else value).square() @ factor.square()).sqrt() * relative_error(
            value.to(dtype), value
        )

    names, factors, scales = ("d gate", "d up"), ("b_gate", "b_up"), made.options["scales"]
    lows = made.inputs["low"].split([made.inputs[b].shape[1] for b in factors], 1)
    sums = {"output 1": spread("output 0", made.inputs["a_down"].t())}
    sides = list(zip(names, factors, scales, lows, strict=True))
    sums["d low"] = torch.cat([spread(name, made.inputs[b] * scale) for name, b, scale, _ in sides], 1)
    sums |= {f"d {b}": spread(name, low * scale, by_column=True) for name, b, scale, low in sides}
    return {name: float(error.norm() / truth[name].norm()) for name, error in sums.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="the whole product, in random order")
    asked = parser.parse_args()
    combinations = list(every(asked.seed))
    random.Random(asked.seed).shuffle(combinations)
    wrong = 0
    for n, one in enumerate(combinations if asked.all else combinations[: asked.count], 1):
        for line in failures(one):
            wrong += 1
            print(line, flush=True)
        if n % 50 == 0:
            print(f"{n} combinations, {wrong} out of bounds", flush=True)
    print(f"done: {wrong} out of bounds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
