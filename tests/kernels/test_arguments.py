"""What is no tensor is refused by name, what has no rows is computed, and shapes can be had without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from halftune_kernels import (
    causal_conv1d_fn,
    causal_conv1d_update,
    gated_delta_rule,
    gated_delta_rule_step,
    gated_rms_norm,
    kda,
    kda_step,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
    rwkv7,
    rwkv7_step,
    simple_decay,
)
from halftune_kernels.arguments import ArgumentError, find_segments, on_host, remember
from halftune_kernels.ops.ssd import simple_decay_step

X = torch.ones(1, 6, 2, 4)
GATE = torch.zeros(1, 6, 2)
X0 = X[:, 0]
TAPS = torch.ones(2, 4)
SCANS: dict[str, Callable[..., Any]] = {
    "gated_delta_rule": lambda **more: gated_delta_rule(X, X, X, GATE, GATE, **more),
    "kda": lambda **more: kda(X, X, X, X, GATE, **more),
    "simple_decay": lambda **more: simple_decay(X, X, X, GATE, **more),
    "rwkv7": lambda **more: rwkv7(X, X, X, X, X, X, **more),
    "causal_conv1d_fn": lambda **more: causal_conv1d_fn(GATE.transpose(1, 2), TAPS, **more),
}


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


@pytest.mark.parametrize("operator", SCANS)
def test_boundaries_said_twice(operator: str) -> None:
    both = {"cu_seqlens": torch.tensor([0, 2, 6]), "seq_idx": torch.zeros(1, 6, dtype=torch.int32)}
    with pytest.raises(ArgumentError, match=f"{operator}: seq_idx is given with cu_seqlens"):
        SCANS[operator](**both)


@pytest.mark.parametrize("scale", ["1", float("nan"), float("inf"), 0, True, torch.tensor(1.0)])
@pytest.mark.parametrize("operator", [name for name in SCANS if name != "causal_conv1d_fn"])
def test_a_scale_that_is_none(operator: str, scale: object) -> None:
    with pytest.raises(ArgumentError, match=f"{operator}: scale is .*, expected a finite number other than 0"):
        SCANS[operator](scale=scale)


@pytest.mark.parametrize("state", ["zeros", torch.zeros(1, 2, 4, 4, dtype=torch.int32)])
def test_a_state_of_no_numbers(state: Any) -> None:
    for operator, call in SCANS.items():
        name = "initial_states" if operator == "causal_conv1d_fn" else "initial_state"
        with pytest.raises(ArgumentError, match=f"{operator}: {name} is .*, expected a (tensor|floating-point dtype)"):
            call(**{name: state})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: gated_rms_norm(X, X[0, 0, 0], "silu"), "gate is a str"),  # type: ignore[arg-type]
        (lambda: gated_rms_norm(X, X[0, 0, 0], X.int()), "gate is torch.int32"),
        (lambda: gated_rms_norm(X, None), "weight is None"),  # type: ignore[arg-type]
        (lambda: gated_rms_norm(None, X), "x is None"),  # type: ignore[arg-type]
        (lambda: gated_rms_norm(X, X[0, 0, 0], eps="1e-6"), "eps is '1e-6'"),  # type: ignore[arg-type]
        (lambda: gated_rms_norm(X, X[0, 0, 0], eps=-1.0), "eps is -1.0, expected a number from 0 on"),
        (lambda: gated_rms_norm(X, X[0, 0, 0], group_size=2.0), "group_size is 2.0"),  # type: ignore[arg-type]
        (lambda: causal_conv1d_fn(X[0], TAPS[:, :0]), "weight is of no taps"),
        (lambda: causal_conv1d_update(X[0, 0], torch.zeros(2, 4, 4).int(), X[0, 0, 0].expand(4, 4)), "conv_state is"),
        (lambda: rwkv7_step(X0, X0, X0, X0.half(), X0, X0, torch.zeros(1, 2, 4, 4)), "v is torch.float16"),
        (lambda: mamba2_chunk_scan(X, GATE, GATE[0, 0], X, X, dt_limit=0.1), "dt_limit is 0.1"),  # type: ignore[arg-type]
        (lambda: mamba2_chunk_scan(X, GATE, GATE[0, 0], X, X, D=1.0), "D is a float"),  # type: ignore[arg-type]
    ],
)
def test_refused_by_name(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decay_that_forgets_everything(dtype: torch.dtype) -> None:
    """-inf is a fresh start (but in RWKV-7, whose a reads the state before), and the caller's decay stays as it was."""
    x, beta = torch.randn(1, 6, 2, 4, dtype=dtype), torch.rand(1, 6, 2, dtype=dtype)
    scalar, each = torch.zeros(1, 6, 2, dtype=dtype), torch.zeros(1, 6, 2, 4, dtype=dtype)
    scalar[:, 3], each[:, 3] = -torch.inf, -torch.inf
    kept = scalar.clone()
    for call in (
        lambda at: gated_delta_rule(x[:, at], x[:, at], x[:, at], scalar[:, at], beta[:, at]),
        lambda at: kda(x[:, at], x[:, at], x[:, at], each[:, at], beta[:, at]),
        lambda at: simple_decay(x[:, at], x[:, at], x[:, at], scalar[:, at]),
    ):
        torch.testing.assert_close(call(slice(None))[0][:, 3:], call(slice(3, None))[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(scalar, kept)


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_boundaries_that_numpy_changes_are_read_again(name: str) -> None:
    """torch counts no version of what is written past it."""
    numbers = np.array([0, 2, 6], dtype=np.int32) if name == "cu_seqlens" else np.array([[0, 0, 1, 1, 1, 1]])
    shared = torch.from_numpy(numbers)
    SCANS["simple_decay"](**{name: shared})
    numbers[...] = [0, 4, 6] if name == "cu_seqlens" else [[0, 0, 0, 0, 1, 1]]
    o = SCANS["simple_decay"](**{name: shared})[0]
    assert torch.equal(o, simple_decay(X, X, X, GATE, cu_seqlens=torch.tensor([0, 4, 6]))[0])


def test_the_host_knows_what_it_was_told_until_the_tensor_changes() -> None:
    there = torch.zeros(3, dtype=torch.int32, device="meta")  # as on a GPU, but any read fails
    remember(there, [0, 2, 6])
    assert on_host(there) == (0, 2, 6)
    assert find_segments("any", 1, 6, there).lengths == (2, 4)
    there.add_(1)
    with pytest.raises(NotImplementedError):
        on_host(there)


def test_rows_without_tokens_have_their_states() -> None:
    none = torch.zeros(3, 0, dtype=torch.int32)
    x, g = X[:, :0].expand(3, 0, 2, 4), GATE[:, :0].expand(3, 0, 2)
    _, states = simple_decay(x, x, x, g, seq_idx=none, output_final_state=True)
    assert states is not None
    assert states.shape == (3, 2, 4, 4)


STATE = torch.zeros(1, 2, 4, 4)
STEPS: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
    "gated_delta_rule_step": (
        gated_delta_rule_step,
        {"q": X0, "k": X0, "v": X0, "g": GATE[:, 0], "beta": GATE[:, 0], "state": STATE},
    ),
    "kda_step": (kda_step, {"q": X0, "k": X0, "v": X0, "g": X0, "beta": GATE[:, 0], "state": STATE}),
    "rwkv7_step": (rwkv7_step, {**dict.fromkeys(("r", "w", "k", "v", "a", "b"), X0), "state": STATE}),
    "simple_decay_step": (simple_decay_step, {"q": X0, "k": X0, "v": X0, "g": GATE[:, 0], "state": STATE}),
    "mamba2_selective_state_update": (
        mamba2_selective_state_update,
        {"state": STATE, "hidden_states": X0, "dt": GATE[:, 0], "A": GATE[0, 0], "B": X0, "C": X0},
    ),
    "causal_conv1d_update": (
        causal_conv1d_update,
        {"x": GATE[:, 0], "conv_state": torch.zeros(1, 2, 4), "weight": TAPS},
    ),
    "mamba2_chunk_scan": (mamba2_chunk_scan, {"hidden_states": X, "dt": GATE, "A": GATE[0, 0], "B": X, "C": X}),
}


@pytest.mark.parametrize(("step", "name"), [(step, name) for step, (_, given) in STEPS.items() for name in given])
def test_every_argument_of_a_step_is_refused_by_its_name(step: str, name: str) -> None:
    """In whole numbers a state or an output would be rounded to nothing, in silence."""
    function, given = STEPS[step]
    fine = {key: x.clone() for key, x in given.items()}
    function(**fine)
    wrong = (None, 0.5, fine[name].long(), fine[name].to(torch.float8_e4m3fn), fine[name].to_sparse())
    for value in (*wrong, fine[name][..., :0], fine[name][None, None]):
        with pytest.raises(ArgumentError):
            function(**fine | {name: value})
    with pytest.raises(ArgumentError, match=r"on (cpu|meta), expected (cpu|meta)"):
        function(**fine | {name: fine[name].to("meta")})


def test_what_a_scan_of_mamba2_names() -> None:
    scan = dict(STEPS["mamba2_chunk_scan"][1])
    with pytest.raises(ArgumentError, match=r"mamba2_chunk_scan: initial_states is of shape \[1, 2, 4, 5\]"):
        mamba2_chunk_scan(**scan, initial_states=torch.zeros(1, 2, 4, 5))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dt_limit is \\('a', 'b'\\)"):
        mamba2_chunk_scan(**scan, dt_limit=("a", "b"))  # type: ignore[arg-type]
