"""Random combinations of operator, dtype, head sizes, length, segments and decay: outputs and every gradient."""

from __future__ import annotations

import random

import pytest
from bounds import Combination, every, failures

from halftune_kernels.dispatch import OPERATORS


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_sampled_combinations(operator: str) -> None:
    """The whole product takes hours: ``python tests/kernels/bounds.py --all``."""
    cheap = [one for one in every(0) if one.operator == operator and one.length * one.keys * one.values <= 500_000]
    wrong = [line for one in random.Random(1).sample(cheap, 12) for line in failures(one)]
    assert not wrong, "\n".join(wrong)


def test_segments_of_length_one_and_none_are_among_them() -> None:
    lengths = [b - a for one in every(0) if one.length > 2 for a, b in zip(one.bounds, one.bounds[1:], strict=False)]
    assert {0, 1} <= set(lengths)


def test_bounds_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that is off by a thousandth is found."""
    import bounds
    import torch

    one = Combination("gated_rms_norm", torch.float32, 16, 16, 2, 0)
    assert not failures(one)
    right = bounds.relative_error
    monkeypatch.setattr(bounds, "relative_error", lambda a, b: right(a * 1.001, b))
    assert failures(one)
