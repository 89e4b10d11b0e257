"""Registered operators of softmax models: Triton in the interpreter against fp64, torch's own checks, graphs, GPUs that
are not here."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compile_check import compile_case
from interpreter import interpreting
from operator_checks import CPU, assert_matches

from halftune_kernels.cases import Case, case, rounded
from halftune_kernels.gate import DENSE
from halftune_kernels.library import everywhere
from halftune_kernels.ops.adapted_activation import operators as adapted
from halftune_kernels.ops.gated_activation import cpu as gated_cpu
from halftune_kernels.ops.gated_activation import operators as gated
from halftune_kernels.ops.gated_rms_norm import operators as gated_norm
from halftune_kernels.ops.linear_cross_entropy import cpu as cross_entropy_cpu
from halftune_kernels.ops.linear_cross_entropy import linear_cross_entropy_sum
from halftune_kernels.ops.linear_cross_entropy import operators as cross_entropy
from halftune_kernels.ops.lora_linear import AdaptedWeight
from halftune_kernels.ops.lora_mlp import lora_mlp
from halftune_kernels.ops.rms_norm import operators as rms_norm
from halftune_kernels.ops.rope import operators as rope
from halftune_kernels.selfcheck import bound, relative_error

HALF = (torch.bfloat16, torch.float16)
# operator → variants: head size or width, options
VARIANTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "rms_norm": [(96, {}), (33, {"offset": 0.0, "rounds": True})],
    "gated_rms_norm": [(96, {"group_size": 32, "norm_before_gate": False}), (33, {"activation": "sigmoid"})],
    "gated_activation": [(33, {}), (1500, {"activation": "gelu_tanh"}), (20, {"activation": "gelu"})],
    "adapted_activation": [(33, {}), (150, {"activation": "gelu_tanh"}), (20, {"activation": "gelu"})],
    "rope": [(96, {}), (20, {"form": "pairs"}), (20, {"form": "pairs of half tables"}), (33, {})],
    # with factors of the columns: half numbers over a half maximum hit ties of float8, both sides of which are right
    "float8_rows": [(33, {}), (5000, {})],
    "linear_cross_entropy": [(33, {}), (20, {"label_smoothing": 0.0})],
}
EACH = [(name, *variant) for name, variants in VARIANTS.items() for variant in variants]


def made(operator: str, size: int, options: dict[str, Any]) -> Case:
    plain = case(operator, size, (0, 7 if operator == "rope" else 30))  # a program for each token
    return dataclasses.replace(plain, options={**plain.options, **options})


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("operator", "size", "options"), EACH, ids=str)
def test_kernels_are_the_formula(
    operator: str, size: int, options: dict[str, Any], dtype: torch.dtype, poisoned: None
) -> None:
    """In half within three times the error of rounding the truth once: some norms are rounded twice."""
    plain = rounded(made(operator, size, options), dtype)
    truth = plain.call(torch.float64, CPU, "reference")
    with interpreting():
        found = plain.call(dtype, CPU, "triton")
    assert found.keys() == truth.keys()
    for name, value in found.items():
        allowed = bound(name, dtype) if dtype not in HALF else 3 * relative_error(truth[name].to(dtype), truth[name])
        assert relative_error(value, truth[name]) <= max(allowed, 1e-6), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("operator", DENSE)
def test_the_torch_code_is_the_formula(operator: str, dtype: torch.dtype, poisoned: None) -> None:
    assert_matches(case(operator, 96), "cpu", dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_target_beyond_the_vocabulary_is_seen(smoothing: float) -> None:
    """The memory behind the row holds a number that must not be read."""
    logits, targets = torch.full((4, 20), 9.0), torch.tensor([3, 16, 99, -100])
    inside = logits[:3, :16].contiguous()
    with interpreting():
        losses = cross_entropy.LOSSES(view := logits[:, :16], targets, 1.0, smoothing, True, "triton")
    assert losses.isnan().tolist() == [False, True, True, False]
    assert view.isnan().any(1).tolist() == [False, True, True, False]
    with pytest.raises(RuntimeError):
        cross_entropy.LOSSES(inside, targets[:3], 1.0, smoothing, True, "cpu")


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


ROTATED = rows(2, 4, 5, 8), rows(2, 2, 5, 8).detach().transpose(0, 1).reshape(2, 2, 5, 8).requires_grad_()
TABLES = torch.randn(1, 5, 6), torch.randn(1, 5, 6)
SIDES = rows(6, 5), rows(8, 2), rows(8, 3), rows(4, 8)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (rms_norm.NORM, (rows(6, 8), rows(8), 1e-6, 0.0, True, torch.float32, None)),
    (rms_norm.NORM, (rows(6, 8, dtype=torch.bfloat16), rows(8), 1e-6, 1.0, False, torch.bfloat16, None)),
    (gated_norm.NORM, (rows(6, 8), rows(8), rows(6, 8), 1e-6, True, True, 4, torch.float32, None)),
    (
        gated_norm.NORM,
        (rows(6, 8), rows(8).detach(), rows(6, 8, dtype=torch.bfloat16), 0.0, False, False, 8, torch.bfloat16, None),
    ),
    (gated_norm.NORM, (rows(6, 8), rows(8), None, 1e-6, False, True, 8, torch.float32, None)),
    (gated.ACT, (rows(6, 8), rows(6, 8), "silu", None)),
    (gated.SLOPES, (rows(6, 8).detach(), rows(6, 8).detach(), rows(6, 8).detach(), "gelu", None)),
    (gated.SLOPES_IN_PLACE, (rows(6, 8).detach(), rows(6, 8).detach(), rows(6, 8).detach(), "silu", None)),
    (adapted.ACT, (rows(6, 8), rows(6, 8), *SIDES, 0.5, 2.0, "silu", None)),
    (
        adapted.SLOPES,
        (*(rows(6, n).detach() for n in (8, 4, 8, 8)), *map(torch.detach, SIDES), 0.5, 2.0, "gelu", None),
    ),
    (
        adapted.SLOPES_IN_PLACE,
        (*(rows(6, n).detach() for n in (8, 4, 8, 8)), *map(torch.detach, SIDES), 0.5, 2.0, "silu", None),
    ),
    (cross_entropy.LOSSES, (rows(6, 8).detach(), torch.tensor([1, 2, -100, 3, 0, 7]), 0.5, 0.1, True, None)),
    (rope.ROPE, (*ROTATED, *TABLES, "halves", False, torch.float32, None)),
]


@pytest.mark.parametrize(("operator", "args"), CALLS, ids=lambda x: str(x) if not isinstance(x, tuple) else "")
def test_torch_accepts_the_registration(operator: Any, args: tuple[Any, ...]) -> None:
    """Schema, aliasing, fake results and autograd, also in a compiled graph of changing shapes."""
    torch.library.opcheck(operator, args)


def test_a_second_backward_pass_over_overwritten_rows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's writes are counted, which torch does not see."""

    def unseen(grad: Any, gate: Any, up: Any, _: str, into: Any) -> None:
        for place in into:
            place.numpy()[:] = 1.0

    monkeypatch.setattr(gated_cpu, "backward", unseen)
    x = torch.randn(3, 4, requires_grad=True)
    first, last = (AdaptedWeight(torch.randn(shape)) for shape in ((6, 4), (4, 6)))
    with everywhere():
        loss = lora_mlp(x, first, first, last).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.parametrize("operator", DENSE)
def test_without_values(operator: str) -> None:
    """Forward and backward on a device without memory: shapes and dtypes of a real call."""
    plain = made(operator, 96, {})
    real = plain.call(torch.bfloat16, CPU, "cpu")
    given, run = plain.bind(torch.bfloat16, torch.device("meta"), None)
    outputs = run()
    torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
    found = {f"output {n}": x for n, x in enumerate(outputs)} | {f"d {name}": x.grad for name, x in given.items()}
    assert {name: (x.shape, x.dtype) for name, x in found.items() if x is not None} == {
        name: (x.shape, x.dtype) for name, x in real.items()
    }
    assert {x.device.type for x in found.values() if x is not None} == {"meta"}


@pytest.mark.parametrize("operator", DENSE)
def test_a_graph_holds_the_whole_operator(operator: str) -> None:
    torch._dynamo.reset()
    given, run = made(operator, 96, {}).bind(torch.float32, CPU, None)
    outputs = torch.compile(run, backend="aot_eager", fullgraph=True)()
    torch.stack([x.square().sum() for x in outputs]).sum().backward()
    found = [x.grad for x in given.values()]
    given, run = made(operator, 96, {}).bind(torch.float32, CPU, None)
    torch.stack([x.square().sum() for x in run()]).sum().backward()
    for gradient, x in zip(found, given.values(), strict=True):
        torch.testing.assert_close(gradient, x.grad)


@pytest.mark.parametrize("operator", DENSE)
def test_kernels_compile_without_spills(operator: str) -> None:
    size, rows = (1024, 8192) if operator == "adapted_activation" else (128, 80)  # loops that read ahead
    found = compile_case(case(operator, size, (0, rows)), torch.bfloat16, 90)
    assert len(found) == (1 if operator in ("linear_cross_entropy", "float8_rows") else 2)
    assert all(kernel.fits and not kernel.spills for kernel in found)


def test_the_logits_of_one_chunk_are_gone_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def linear(*given: Any) -> torch.Tensor:
        assert not any(one() is not None for one in alive)
        made = own(*given)
        alive.append(weakref.ref(made))
        return made

    own = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(cross_entropy_cpu, "rows_at_a_time", lambda *_, **__: 3)
    hidden, weight = rows(8, 5), rows(20, 5)
    with everywhere():
        linear_cross_entropy_sum(hidden, weight, torch.arange(8)).backward()
    assert len(alive) == 3
