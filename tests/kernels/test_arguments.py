"""What is no tensor is refused by name, what has no rows is computed, and shapes can be had without numbers."""

from __future__ import annotations

import pytest
import torch

from halftune_kernels import causal_conv1d_fn, gated_delta_rule, mamba2_chunk_scan, rwkv7, simple_decay
from halftune_kernels.arguments import ArgumentError

X = torch.ones(1, 6, 2, 4)
GATE = torch.zeros(1, 6, 2)


def test_no_tensor() -> None:
    with pytest.raises(ArgumentError, match=r"k is None, expected a tensor of shape \[B, T, H, K\]"):
        gated_delta_rule(X, None, X, GATE, GATE)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="w is a float"):
        rwkv7(X, 0.5, X, X, X, X)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="g is a float"):
        simple_decay(X, X, X, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dt is None"):
        mamba2_chunk_scan(X, None, GATE[0, 0], X, X)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cu_seqlens is a list, expected a tensor of integers"):
        gated_delta_rule(X, X, X, GATE, GATE, cu_seqlens=[0, 6])  # type: ignore[arg-type]


def test_keys_without_channels() -> None:
    with pytest.raises(ArgumentError, match="k is of head size 0"):
        simple_decay(X[..., :0], X[..., :0], X, GATE)


def test_a_batch_of_nothing() -> None:
    y = causal_conv1d_fn(torch.ones(0, 3, 5), torch.ones(3, 4))
    assert isinstance(y, torch.Tensor)
    assert y.shape == (0, 3, 5)


def test_shapes_alone() -> None:
    x, gate = X.to("meta"), GATE.to("meta")
    assert gated_delta_rule(x, x, x, gate, gate)[0].shape == X.shape
    assert simple_decay(x, x, x, gate)[0].shape == X.shape
