"""What a reward function may return, and which of its numbers are equal but for rounding."""

from __future__ import annotations

import itertools
import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from halftune.config.sections.method import GrpoMethod
from halftune.core.errors import TrainingError
from halftune.methods.grpo import advantages, spread
from halftune.train.rewards import Rewards
from halftune.train.rewards.returned import read_rewards

NAN = math.nan
READ: dict[str, tuple[Any, list[float]]] = {
    "list": ([1, 0.5], [1.0, 0.5]),
    "tuple": ((1, 2), [1.0, 2.0]),
    "None": ([None, 2], [NAN, 2.0]),
    "all None": ([None, None], [NAN, NAN]),
    "bools": ([True, False], [1.0, 0.0]),
    "generator": ((x for x in (1, 2)), [1.0, 2.0]),
    "map": (map(float, "12"), [1.0, 2.0]),
    "deque": (deque([1, 2]), [1.0, 2.0]),
    "values of a dict": ({"a": 1, "b": 2}.values(), [1.0, 2.0]),
    "Decimal and Fraction": ([Decimal("0.5"), Fraction(1, 4)], [0.5, 0.25]),
    "array": (np.array([1.5, 2]), [1.5, 2.0]),
    "array of bools": (np.array([True, False]), [1.0, 0.0]),
    "array of int64": (np.array([2**60, 1]), [2.0**60, 1.0]),
    "array of objects": (np.array([None, 2], dtype=object), [NAN, 2.0]),
    "scalars of numpy": ([np.float32(0.1), np.int8(-3)], [float(np.float32(0.1)), -3.0]),
    "column of an array": (np.array([[1.0], [2.0]]), [1.0, 2.0]),
    "tensor": (torch.tensor([1.5, 2.0]), [1.5, 2.0]),
    "tensor with gradient": (torch.tensor([1.5, 2.0], requires_grad=True), [1.5, 2.0]),
    "tensor in bf16": (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), [1.5, 2.0]),
    "tensor of bools": (torch.tensor([True, False]), [1.0, 0.0]),
    "scalars of torch": ([torch.tensor(1.5), torch.tensor(2)], [1.5, 2.0]),
    "column of a data frame": (pd.DataFrame({"a": [1.5, 2.0]})["a"], [1.5, 2.0]),
    "column of a tensor": (torch.tensor([[1.5], [2.0]]), [1.5, 2.0]),
    "denormal": ([5e-324, -5e-324], [5e-324, -5e-324]),
}
REFUSED: dict[str, Any] = {
    "dict": {1.0: "a", 2.0: "b"},
    "keys of a dict": {1.0: "a", 2.0: "b"}.keys(),
    "set": {1.0, 2.0},
    "frozenset": frozenset({1.0, 2.0}),
    "text": "12",
    "bytes": b"12",
    "bytearray": bytearray(b"12"),
    "number": 1.0,
    "number of numpy": np.float64(1),
    "tensor of no dimension": torch.tensor(1.0),
    "None": None,
    "function": read_rewards,
    "too few": [1.0],
    "too many": [1.0, 2.0, 3.0],
    "no end": itertools.repeat(1.0),
    "numeric text": ["1", "2"],
    "bytes in it": [b"1", b"2"],
    "texts of numpy": np.array(["1", "2"]),
    "lists": [[1.0], [2.0]],
    "dicts": [{"score": 1.0}, {"score": 2.0}],
    "pairs": [(1.0, "why"), (2.0, "why")],
    "two columns": np.ones((2, 2)),
    "two columns of a tensor": torch.ones(2, 2),
    "matrix of one": np.ones((2, 1, 1)),
    "complex": [1 + 0j, 2 + 0j],
    "complex of numpy": np.array([1 + 0j, 2], dtype=np.complex64),
    "complex tensor": torch.tensor([1 + 0j, 2]),
    "dates": np.array(["2026-01-01"] * 2, dtype="datetime64[D]"),
    "NaN": [1.0, NAN],
    "NaN of numpy": np.array([1.0, NAN]),
    "NaN in Decimal": [Decimal("NaN"), 1],
    "infinite": [math.inf, 1.0],
    "minus infinite": torch.tensor([-math.inf, 1.0]),
    "infinite in fp32": [1e39, 1.0],
    "larger than fp64": [10**400, 1],
    "data frame": pd.DataFrame({1.0: ["a"], 2.0: ["b"]}),
    "data frame of one column": pd.DataFrame({1.0: [0.5, 0.7]}),
    "row": np.ones((1, 2)),
    "masked": np.ma.array([1.0, 2.0], mask=[False, True]),
    "an exception": [ValueError("x"), 1.0],
}


@pytest.mark.parametrize("given", READ.values(), ids=READ)
def test_numbers_are_read(given: tuple[Any, list[float]]) -> None:
    returned, expected = given
    assert read_rewards(returned, 2)[0] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Warning. converting a masked element")
def test_all_else_is_refused_by_the_functions_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = rewards_of(tmp_path, "def r0(**_):\n    pass\n", 1)
    monkeypatch.setattr(rewards, "_functions", [lambda **_: REFUSED[name]])
    with pytest.raises(TrainingError) as error:
        rewards(["p"] * 2, ["a"] * 2, [[1]] * 2, [{}] * 2, "rows 1 to 2")
    assert error.value.code == "train.reward_failed"
    assert error.value.where == "rows 1 to 2"
    assert "r0" in error.value.what


def rewards_of(folder: Path, code: str, functions: int, weights: tuple[float, ...] = ()) -> Rewards:
    (folder / "mine.py").write_text(code)
    weights = weights or (1.0,) * functions
    listed = [{"function": f"r{i}", "file": str(folder / "mine.py"), "weight": weights[i]} for i in range(functions)]
    return Rewards(GrpoMethod.model_validate({"type": "grpo", "rewards": listed}))


def totals(folder: Path, *returned: str, weights: tuple[float, ...] = ()) -> torch.Tensor:
    """The weighted sums ``[1, G]`` of functions that return these expressions."""
    code = "import numpy as np, torch\n" + "".join(
        f"def r{i}(**_):\n    return {one}\n" for i, one in enumerate(returned)
    )
    count = len(eval(returned[0], {"np": np, "torch": torch}))
    rewards = rewards_of(folder, code, len(returned), weights)
    found = rewards(["p"] * count, ["a"] * count, [[1]] * count, [{}] * count, "rows")
    return rewards.total(found, count)[None]


EQUAL: dict[str, tuple[str, ...]] = {
    **{f"{value} of {group}": (f"[{value}] * {group}",) for value in (0.1, 0.7, 1000.7, 1e6 + 0.1, 1e-30, 3e38, -0.3)
       for group in (2, 7, 8, 64)},
    "another order of a sum": ("[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]",),
    "a sum of a hundred": ("[sum([0.1] * 100), 10.0, sum([0.01] * 1000), 10.0]",),
    "functions that make up for each other": ("[0.1, 0.3, 0.2, 0.1]", "[0.2, 0, 0.1, 0.2]"),
    "a difference that cancels": ("[1e6 + 0.1, 1e6 + 0.3]", "[-1e6 + 0.3, -1e6 + 0.1]"),
    "not judged besides": ("[None, 0.1 + 0.2, 0.3, None]",),
    "fp32 in another order": ("torch.tensor([1.0, 1.0 + 2**-22, 1.0 - 2**-23])",),
    "fp32 scalars": ("[np.float32(7.3), np.nextafter(np.float32(7.3), np.float32(8))]",),
    "bf16, one bit": ("torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)",),
    "floats beyond 2^53": ("[2.0**60, 2.0**60 + 256]",),
    "integers beyond 2^53": ("[2**60, 2**60 + 1]",),
    "all zero": ("[0.0, -0.0]",),
    "fp32 as a list": ("torch.tensor([0.1] * 7 + [0.10000001]).tolist()",),
    "fp32 by item": ("[np.float32(7.3).item(), np.nextafter(np.float32(7.3), np.float32(8)).item()]",),
    "fp32 in fp64": ("torch.tensor([0.1, 0.10000001]).double()",),
    "fp32 beyond 2^24": ("torch.tensor([1e8, 1e8 + 8])",),
    "bf16 beyond 2^8": ("torch.tensor([1000.0, 1004.0], dtype=torch.bfloat16)",),
    "bf16 beside a constant": ("torch.tensor([24, 24.125, 24, 24], dtype=torch.bfloat16)", "[1, 1, 1, 1]"),
    **{f"{name}, one bit": (f"torch.tensor([1.25, {1.25 + bit}]).to(torch.{name})",)
       for name, bit in {"float16": 2**-10, "float8_e4m3fn": 0.125, "float8_e4m3fnuz": 0.125,
                         "float8_e5m2": 0.25}.items()},
    "mixed magnitudes": ("[1e9] * 3", "[0.1 + 0.2, 0.3, 0.3]"),
}  # fmt: skip
APART: dict[str, tuple[tuple[str, ...], list[float]]] = {
    "1e-3 beside 1": (("[1.0, 1.001]",), [-5e-4, 5e-4]),
    "1 beside 1e6": (("[1e6, 1e6 + 1]",), [-0.5, 0.5]),
    "1 beside 1e6 in fp32": (("np.array([1e6, 1e6 + 1], dtype=np.float32)",), [-0.5, 0.5]),
    "1e-5 beside 1 in fp32": (("torch.tensor([1.0, 1.0 + 2**-17])",), [-(2.0**-18), 2.0**-18]),
    "1e-12 beside 1": (("[1.0, 1 + 2**-40]",), [-(2.0**-41), 2.0**-41]),
    "1 beside 1e12": (("[10**12, 10**12 + 1]",), [-0.5, 0.5]),
    "integers of 52 bits": (("[2**52, 2**52 + 4]",), [-2.0, 2.0]),
    "tiny": (("[1e-30, 2e-30]",), [-5e-31, 5e-31]),
    "beside a constant in fp32": (("torch.tensor([1000.7, 1000.7])", "[0.0, 2**-10]"), [-(2.0**-11), 2.0**-11]),
    "beside a constant in bf16": (("torch.ones(2, dtype=torch.bfloat16)", "[0.0, 2**-10]"), [-(2.0**-11), 2.0**-11]),
    "two of bf16": (("torch.tensor([1.0, 1.03125], dtype=torch.bfloat16)",), [-(2.0**-6), 2.0**-6]),
    "one judged less": (("[1.0, None, 2.0]",), [-0.5, 0.0, 0.5]),
    "integers beside rounding": (("torch.tensor([24, 24.125], dtype=torch.bfloat16)", "[1, 0]"), [0.5, -0.5]),
    "integers beside one that judges less": (
        ("[None, 24.0, 24.0]", "torch.tensor([24, 24.125, 24], dtype=torch.bfloat16)", "[1, 0, 1]"),
        [-15.6666667, 7.3333333, 8.3333333],
    ),
    "integers in bf16": (("torch.tensor([130, 131, 130, 130], dtype=torch.bfloat16)",), [-0.25, 0.75, -0.25, -0.25]),
    "integers in fp16": (("torch.tensor([1500, 1501], dtype=torch.float16)",), [-0.5, 0.5]),
    "integers in fp32": (("torch.tensor([1100000.0, 1100001.0])",), [-0.5, 0.5]),
    "integers in fp8": (("torch.tensor([14.0, 15.0]).to(torch.float8_e4m3fn)",), [-0.5, 0.5]),
    "integers as floats": (("[2.0**52, 2.0**52 + 4]",), [-2.0, 2.0]),
    "1e-5 beside 1 in fp32 as a list": (("torch.tensor([1.0, 1.0 + 2**-17]).tolist()",), [-(2.0**-18), 2.0**-18]),
    "1e-11 beside 0.1": (("[0.1, 0.1 + 1e-11]",), [-5e-12, 5e-12]),
}


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("name", EQUAL)
def test_rewards_that_are_equal_but_for_rounding_train_nothing(
    name: str, scale: bool, leave_one_out: bool, tmp_path: Path
) -> None:
    found = totals(tmp_path, *EQUAL[name])
    assert advantages(found, scale=scale, leave_one_out=leave_one_out).abs().max() == 0
    assert spread(found)[2].tolist() == [0.0]
    assert len(set(found[~found.isnan()].tolist())) == 1, "equal_rewards and dynamic_sampling compare them"


@pytest.mark.parametrize("name", APART)
def test_small_differences_train(name: str, tmp_path: Path) -> None:
    returned, expected = APART[name]
    found = advantages(totals(tmp_path, *returned), scale=False, leave_one_out=False)
    assert found[0].tolist() == pytest.approx(expected, rel=1e-3)


def test_a_weighted_sum_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    for returned in (("[3e38, 1.0]", "[3e38, 1.0]"), ("[3e38, 1.0]", "[-3e38, 1.0]")):
        with pytest.raises(TrainingError) as error:
            totals(tmp_path, *returned, weights=(1e300, 1e300))
        assert error.value.code == "train.reward_failed"


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_those_of_the_formula_in_exact_numbers(seed: int, tmp_path: Path) -> None:
    """The mean, the deviation and the sum by fractions, of random rewards of three magnitudes."""
    drawn = np.random.default_rng(seed)
    each = [(drawn.standard_normal(8) * size).tolist() for size in (1e6, 1.0, 1e-6)]
    weights = tuple(drawn.uniform(-2, 2, 3).tolist())
    sums = [sum(Fraction(w) * Fraction(r[i]) for w, r in zip(weights, each, strict=True)) for i in range(8)]
    mean = sum(sums) / 8
    deviation = math.sqrt(sum((one - mean) ** 2 for one in sums) / 7)
    found = totals(tmp_path, *map(repr, each), weights=weights)
    for scale, leave_one_out in itertools.product((False, True), repeat=2):
        wanted = [float(one - mean) * (8 / 7 if leave_one_out else 1) for one in sums]
        wanted = [one / (deviation + 1e-4) for one in wanted] if scale else wanted
        ours = advantages(found, scale=scale, leave_one_out=leave_one_out)[0].tolist()
        assert ours == pytest.approx(wanted, rel=1e-10)
