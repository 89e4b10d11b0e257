"""Random inputs for each operator, for the self-check, for warm-up and for tests on GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from halftune_kernels.arguments import ArgumentError, check_choice

BOUNDS = (0, 1, 64, 65, 65, 200)  # length 1, a whole chunk, empty, a ragged tail
Heads = tuple[int, int] | None
FAST = -4.0  # log decays below it are the fast ones of `_among_fast`
AT_FAST_STEPS = "d exp(g) at fast steps"


@dataclass(frozen=True)
class Case:
    """The inputs of a call.

    Attributes:
        operator: the operator.
        function: ``package.module:function`` of its public function.
        inputs: tensors that get a gradient, by argument name, fp64 on the CPU.
        wide: names that stay fp32 where the others are half: decays, states, parameters.
        options: other arguments.
        scalar_decay: name of a log decay [B, T, H] whose gradient at fast steps is looked at by itself; see `call`.
    """

    operator: str
    function: str
    inputs: dict[str, torch.Tensor]
    wide: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    scalar_decay: str = ""

    def bind(
        self, dtype: torch.dtype, device: torch.device, backend: str | None
    ) -> tuple[dict[str, torch.Tensor], Callable[[], list[torch.Tensor]]]:
        """Return the inputs on ``device`` by name, and a function that calls the operator on them."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        half = dtype in (torch.float16, torch.bfloat16)
        given = {
            key: value.detach().to(device, torch.float32 if half and key in self.wide else dtype, copy=True)
            for key, value in self.inputs.items()
        }
        for value in given.values():
            value.requires_grad_()
        options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}

        def run() -> list[torch.Tensor]:
            out = function(**given, **options, backend=backend)
            return [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]

        return given, run

    def call(self, dtype: torch.dtype, device: torch.device, backend: str | None) -> dict[str, torch.Tensor]:
        """Return outputs, and gradients of all inputs for a fixed random cotangent, by name.

        At the fast steps of ``scalar_decay`` g there is also the gradient of exp(g), which is that of g over exp(g).
        That of g is small there, beside terms that have no part in it: kernels that form it as a difference of sums
        give noise, which the norm over all steps hides, and these few numbers of one size show.
        """
        given, run = self.bind(dtype, device, backend)
        outputs = run()
        generator = torch.Generator().manual_seed(7)
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for x in outputs:
            cotangent = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)
            loss = loss + (x.double() * cotangent.to(device)).sum()
        loss.backward()
        results = {f"output {n}": x.detach() for n, x in enumerate(outputs)}
        for key, x in given.items():
            assert x.grad is not None, f"{self.operator}: {key} got no gradient"
            results[f"d {key}"] = x.grad
        if self.scalar_decay:
            decay, gradient = self.inputs[self.scalar_decay].to(device), results[f"d {self.scalar_decay}"]
            fast = decay < FAST
            results[AT_FAST_STEPS] = gradient[fast].double() / decay[fast].exp()
        return results


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """Return the case with inputs rounded to ``dtype``, in fp64, for the reference."""
    half = dtype in (torch.float16, torch.bfloat16)
    inputs = {
        key: value.to(torch.float32 if half and key in case.wide else dtype).double()
        for key, value in case.inputs.items()
    }
    return replace(case, inputs=inputs)


def case(
    operator: str,
    size: int = 128,
    bounds: tuple[int, ...] = BOUNDS,
    seed: int = 0,
    heads: tuple[int, int] | None = None,
) -> Case:
    """Return inputs of ``operator`` with head size ``size`` for a packed row with these boundaries.

    Args:
        operator: its name.
        size: of keys and values; without ``heads`` also the channels of the convolution.
        bounds: of the samples in the row.
        seed: of the random numbers.
        heads: of keys and of values; a few if None. The convolution is that of q, k and v together.

    Raises:
        ArgumentError: no such operator, a size below 1, or heads that it cannot have.
    """
    check_choice("cases", "operator", operator, tuple(_MAKERS))
    if size < 1:
        raise ArgumentError(operator, "head size", came=size, expected="1 or more")
    if heads is not None:
        keys, values = heads
        same = operator == "rwkv7"
        if keys < 1 or values < 1 or values % keys or (same and keys != values):
            expected = "as many of values as of keys" if same else "of values a multiple of those of keys"
            raise ArgumentError(operator, "heads", came=f"{keys} of keys, {values} of values", expected=expected)
    return _MAKERS[operator](size, bounds, torch.Generator().manual_seed(seed), heads)


_Maker = Callable[[int, tuple[int, ...], torch.Generator, Heads], Case]


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _among_fast(decay: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The log decay, one in 16 of them between exp(-5) and exp(-20)."""
    fast = -5 - 15 * torch.rand(decay.shape, generator=generator, dtype=torch.float64)
    return torch.where(torch.rand(decay.shape, generator=generator) < 1 / 16, fast, decay)


def _packed(bounds: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), **more}


def _conv(size: int, bounds: tuple[int, ...], generator: torch.Generator, heads: Heads) -> Case:
    channels = size if heads is None else size * (2 * heads[0] + heads[1])
    inputs = {
        "x": _normal(generator, 1, bounds[-1], channels).transpose(1, 2),
        "weight": _normal(generator, channels, 4),
        "bias": _normal(generator, channels),
        "initial_states": _normal(generator, len(bounds) - 1, channels, 3),
    }
    options = _packed(bounds, activation="silu")
    return Case(
        "causal_conv1d", "halftune_kernels.ops.causal_conv1d:causal_conv1d_fn", inputs, ("weight", "bias"), options
    )


def _norm(size: int, bounds: tuple[int, ...], generator: torch.Generator, heads: Heads) -> Case:
    shape = (1, bounds[-1], heads[1] if heads else 2, size)
    inputs = {"x": _normal(generator, *shape), "weight": _normal(generator, size), "gate": _normal(generator, *shape)}
    return Case("gated_rms_norm", "halftune_kernels.ops.gated_rms_norm:gated_rms_norm", inputs, ("weight",))


def _ssd(size: int, bounds: tuple[int, ...], generator: torch.Generator, chosen: Heads) -> Case:
    length, (groups, heads) = bounds[-1], chosen or (2, 4)
    inputs = {
        "q": _normal(generator, 1, length, groups, size),
        "k": _normal(generator, 1, length, groups, size) * size**-0.5,
        "v": _normal(generator, 1, length, heads, size),
        "g": -F.softplus(_normal(generator, 1, length, heads)) * 0.3,
        "w": F.softplus(_normal(generator, 1, length, heads)),
        "initial_state": _normal(generator, len(bounds) - 1, heads, size, size),
    }
    inputs["g"] = _among_fast(inputs["g"], generator)
    options = _packed(bounds, output_final_state=True)
    return Case("ssd", "halftune_kernels.ops.ssd:simple_decay", inputs, ("g", "w", "initial_state"), options, "g")


def _delta(operator: str, function: str) -> _Maker:
    def make(size: int, bounds: tuple[int, ...], generator: torch.Generator, chosen: Heads) -> Case:
        length, scalar = bounds[-1], operator == "gated_delta_rule"
        groups, heads = chosen or (2, 4 if scalar else 2)
        gate = (1, length, heads) if scalar else (1, length, heads, size)
        inputs = {
            "q": _normal(generator, 1, length, groups, size),
            "k": _normal(generator, 1, length, groups, size),
            "v": _normal(generator, 1, length, heads, size),
            "g": -F.softplus(_normal(generator, *gate)) * 0.3,
            "beta": torch.sigmoid(_normal(generator, 1, length, heads)),
            "initial_state": _normal(generator, len(bounds) - 1, heads, size, size),
        }
        inputs["g"] = _among_fast(inputs["g"], generator)
        options = _packed(bounds, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return Case(operator, function, inputs, ("g", "initial_state"), options, "g" if scalar else "")

    return make


def _rwkv7(size: int, bounds: tuple[int, ...], generator: torch.Generator, chosen: Heads) -> Case:
    heads = chosen[0] if chosen else 2
    shape = (1, bounds[-1], heads, size)
    unit = F.normalize(_normal(generator, *shape), dim=-1)
    inputs = {
        "r": _normal(generator, *shape),
        "w": -0.6065 * torch.sigmoid(_normal(generator, *shape)),
        "k": _normal(generator, *shape) * size**-0.5,
        "v": _normal(generator, *shape),
        "a": -unit,
        "b": unit * torch.sigmoid(_normal(generator, *shape)),
        "initial_state": _normal(generator, len(bounds) - 1, heads, size, size),
    }
    inputs["w"] = _among_fast(inputs["w"], generator)
    options = _packed(bounds, output_final_state=True)
    return Case("rwkv7", "halftune_kernels.ops.rwkv7:rwkv7", inputs, ("w", "initial_state"), options)


def _rms_norm(size: int, bounds: tuple[int, ...], generator: torch.Generator, heads: Heads) -> Case:
    shape = (1, bounds[-1], heads[1] if heads else 2, size)
    inputs = {"x": _normal(generator, *shape), "weight": _normal(generator, size)}
    function = "halftune_kernels.ops.rms_norm:rms_norm"
    return Case("rms_norm", function, inputs, ("weight",), {"eps": 1e-6, "offset": 1.0})


def _gated_activation(size: int, bounds: tuple[int, ...], generator: torch.Generator, heads: Heads) -> Case:
    inputs = {name: 2 * _normal(generator, 1, bounds[-1], size) for name in ("gate", "up")}
    return Case("gated_activation", "halftune_kernels.ops.gated_activation:gated_activation", inputs)


def _adapted_activation(size: int, bounds: tuple[int, ...], generator: torch.Generator, heads: Heads) -> Case:
    rows, ranks = bounds[-1], (5, 3, 7) if heads is None else (*heads, heads[1])
    inputs = {name: 2 * _normal(generator, rows, size) for name in ("gate", "up")}
    inputs["low"] = _normal(generator, rows, ranks[0] + ranks[1])
    shapes = {"b_gate": (size, ranks[0]), "b_up": (size, ranks[1]), "a_down": (ranks[2], size)}
    factors = {name: _normal(generator, *shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    inputs |= {name: value.bfloat16().to(value.dtype) for name, value in factors.items()}  # casting them rounds nothing
    function = "halftune_kernels.ops.adapted_activation:adapted_activation"
    return Case("adapted_activation", function, inputs, tuple(shapes), {"scales": (0.5, 1.7)})


def _rope(size: int, bounds: tuple[int, ...], generator: torch.Generator, chosen: Heads) -> Case:
    length, (keys, queries) = bounds[-1], chosen or (2, 6)
    inputs = {"q": _normal(generator, 1, queries, length, size), "k": _normal(generator, 1, length, keys, size)}
    inputs["k"] = inputs["k"].transpose(1, 2)  # as projections come
    angles = 3 * _normal(generator, 1, length, size - size % 2)
    return Case("rope", "halftune_kernels.ops.rope:rope", inputs, (), {"cos": angles.cos(), "sin": angles.sin()})


def _linear_cross_entropy(size: int, bounds: tuple[int, ...], generator: torch.Generator, heads: Heads) -> Case:
    words = 5 * size + 3
    inputs = {"hidden": _normal(generator, bounds[-1], size), "weight": _normal(generator, words, size) * size**-0.5}
    targets = torch.randint(words, (bounds[-1],), generator=generator)
    targets[::5] = -100
    options = {"targets": targets, "scale": 0.25, "label_smoothing": 0.1}
    function = "halftune_kernels.ops.linear_cross_entropy:linear_cross_entropy_sum"
    return Case("linear_cross_entropy", function, inputs, (), options)


def _float8_rows(size: int, bounds: tuple[int, ...], generator: torch.Generator, heads: Heads) -> Case:
    options = {"columns": torch.rand(size, generator=generator) + 0.5}
    inputs = {"x": _normal(generator, bounds[-1], size)}
    return Case("float8_rows", "halftune_kernels.ops.float8_rows:rounded_rows", inputs, (), options)


_MAKERS: dict[str, _Maker] = {
    "causal_conv1d": _conv,
    "gated_rms_norm": _norm,
    "ssd": _ssd,
    "gated_delta_rule": _delta("gated_delta_rule", "halftune_kernels.ops.gated_delta_rule:gated_delta_rule"),
    "kda": _delta("kda", "halftune_kernels.ops.kda:kda"),
    "rwkv7": _rwkv7,
    "rms_norm": _rms_norm,
    "gated_activation": _gated_activation,
    "adapted_activation": _adapted_activation,
    "rope": _rope,
    "linear_cross_entropy": _linear_cross_entropy,
    "float8_rows": _float8_rows,
}
