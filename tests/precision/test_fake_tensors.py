"""Tensors without data: whole numbers have values unless they were computed from floating ones."""

from __future__ import annotations

import pytest
import torch

from halftune.precision.trace.fake_tensors import NEEDS_VALUES, FakeTensors


def test_whole_numbers_made_from_floats_have_no_values() -> None:
    """As in a router that counts how many tokens each expert gets."""
    with FakeTensors():
        chosen = torch.randn(4, 8).topk(2, dim=1).indices
        counts = torch.zeros(4, 8).scatter(1, chosen, 1).long().sum(0)
        with pytest.raises(NEEDS_VALUES):
            counts.tolist()
        assert torch.zeros(3, dtype=torch.int64).add(torch.arange(3)).tolist() == [0, 1, 2]
