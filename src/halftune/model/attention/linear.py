"""Replaces the operators of transformers' linear-attention layers by ours; reversible.

transformers' mixers look up their functions in the modeling module at call time, so the module's globals are
rebound while a model runs. Other models of the family in the same process are not affected.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.model.attention.register import current_guard
from halftune.plan import Plan
from halftune.precision.patched import hold_while_running
from halftune.precision.rebind import Scope, unpatched
from halftune_kernels.arguments import ArgumentError
from halftune_kernels.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from halftune_kernels.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from halftune_kernels.ops.kda import kda, kda_step
from halftune_kernels.ops.rwkv7 import rwkv7, rwkv7_step
from halftune_kernels.ops.ssd.mamba2 import mamba2_chunk_scan, mamba2_selective_state_update

log = get_logger(__name__)

Function = Callable[..., Any]
_SILU = (None, "silu", "swish")
# Models whose forward drops unknown arguments, and their submodule that would pass them on.
_DROPS_KWARGS = {"Mamba2ForCausalLM": "backbone"}
_WITH_MIXERS = ("transformers.models.", "halftune.model.rwkv7.")
_FORWARDS_KWARGS = "halftune_forwards_kwargs"  # set on modules that already have our hooks
# Mamba-2 layers of zamba2 and nemotron_h limit the time step in training, but not when decoding single tokens.
_STEP_LIMITS = "halftune_step_limits"
_NO_LIMITS = (0.0, math.inf)


def boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Sample boundaries of a packed row from a layer's arguments; not all layers rename ``cu_seq_lens_q``."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            return {"cu_seqlens": kwargs[name]}
    return {} if kwargs.get("seq_idx") is None else {"seq_idx": kwargs["seq_idx"]}


def _chunked(operator: Function) -> Function:
    def chunked(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
        given = {name: kwargs[name] for name in options if name in kwargs}
        return operator(query, key, value, g, beta, **given, **boundaries(kwargs))

    return chunked


def _recurrent(operator: Function, step: Function) -> Function:
    whole = _chunked(operator)

    def recurrent(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        norm = use_qk_l2norm_in_kernel
        if initial_state is None or query.shape[1] != 1 or torch.is_grad_enabled():
            kwargs |= {"initial_state": initial_state, "output_final_state": output_final_state}
            return whole(query, key, value, g, beta, use_qk_l2norm_in_kernel=norm, **kwargs)
        state = initial_state.to(torch.float32, copy=True)
        one = [operand[:, 0] for operand in (query, key, value, g, beta)]
        out = step(*one, state, use_qk_l2norm_in_kernel=norm)[:, None]
        return out, state if output_final_state else None

    return recurrent


def _convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    known = activation in _SILU
    out = causal_conv1d_fn(hidden_states, weight, bias, activation=activation if known else None, **boundaries(kwargs))
    assert isinstance(out, torch.Tensor)
    return out if known else ACT2FN[str(activation)](out)


def _next_convolution(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    known = activation in _SILU
    out = causal_conv1d_update(hidden_states, conv_state, weight, bias, activation if known else None)
    return out if known else ACT2FN[str(activation)](out)


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    names = ("chunk_size", "D", "z", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states")
    given = {name: kwargs[name] for name in names if name in kwargs}
    return mamba2_chunk_scan(hidden_states, dt, A, B, C, *args, **given, **boundaries(kwargs))


def _next_state(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    given = {name: kwargs[name] for name in ("D", "z", "dt_bias", "dt_softplus") if name in kwargs}
    if (limits := kwargs.get(_STEP_LIMITS)) is not None:
        bias, softplus = given.pop("dt_bias", None), given.pop("dt_softplus", False)
        dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
        dt = dt if bias is None else dt + bias.to(dt.dtype)
        dt = (F.softplus(dt) if softplus else dt).clamp(*limits)
    return mamba2_selective_state_update(state, hidden_states, dt, A, B, C, *args, **given)


def _no_fused_mixer(*args: Any, **kwargs: Any) -> None:
    """Return None, so that a layer uses its separate steps: the fused one bypasses LoRA and quantisation."""


_CONVOLUTIONS: dict[str, Function] = {"causal_conv1d_fn": _convolution, "causal_conv1d_update": _next_convolution}
_DELTA: dict[str, Function] = {
    "torch_chunk_gated_delta_rule": _chunked(gated_delta_rule),
    "torch_recurrent_gated_delta_rule": _recurrent(gated_delta_rule, gated_delta_rule_step),
    "chunk_kimi_delta_attention": _chunked(kda),
    "recurrent_kimi_delta_attention": _recurrent(kda, kda_step),
}
_UPDATE = "mamba2_selective_state_update"
_MAMBA2: dict[str, Function] = {
    "mamba2_chunk_scan": _scan,
    _UPDATE: _next_state,
    "mamba2_split_conv1d_scan_combined": _no_fused_mixer,
}
# our own model: only the guard is added
_RWKV7: dict[str, Function] = {"rwkv7": rwkv7, "rwkv7_step": rwkv7_step}
_ALL: dict[str, Function] = {**_CONVOLUTIONS, **_DELTA, **_MAMBA2, **_RWKV7}
# Packages whose functions transformers prefers over torch if installed.
_PREFERRED = ("fla", "causal_conv1d", "mamba_ssm")

# Operands that must share one dtype; steps, decays and states keep theirs.
_OPERANDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_DELTA, ("query", "key", "value")),
    **dict.fromkeys(("mamba2_chunk_scan", _UPDATE), ("hidden_states", "B", "C")),
    **dict.fromkeys(_RWKV7, ("r", "k", "v", "a", "b")),
}


def _with_boundaries(original: Function) -> Function:
    """fla's function with ``cu_seqlens`` also from layers that do not rename the boundaries."""

    @functools.wraps(original)
    def with_cu_seqlens(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, **boundaries({**kwargs, "seq_idx": None})})

    return with_cu_seqlens


def _plain(original: Function) -> Function:
    """transformers' torch code, even if a package is installed that transformers would prefer."""
    torch_code = inspect.unwrap(original)
    known = inspect.signature(torch_code).parameters

    @functools.wraps(torch_code)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if boundaries(kwargs):
            raise ModelError(
                f"{torch_code.__name__}: transformers' torch code does not support packed rows",
                remedy="attention: {linear: halftune}, or data.packing: false",
                code="attention.packing_unsupported",
            )
        return torch_code(*args, **{name: value for name, value in kwargs.items() if name in known})

    return plain


def route_linear_layers(model: nn.Module, plan: Plan) -> None:
    """Route the model's linear-attention layers to ``plan.attention.linear`` while the model runs.

    ``torch`` and ``none`` keep transformers' functions; ``torch`` without the packages that transformers would prefer.
    Other models are not affected, even of the same family. Compiled code keeps its functions, see
    :func:`~halftune.precision.patched.hold_while_running`.
    """
    hold_while_running(_scope(model, plan), model)


@contextmanager
def routed_linear_layers(model: nn.Module, plan: Plan) -> Iterator[None]:
    """The same inside a block, for everything that runs in it."""
    with _scope(model, plan):
        yield


def _routed(name: str, original: Function, backend: str) -> Function:
    """Our function in place of ``original``, behind the guard."""
    routed = _with_boundaries(original) if backend == "fla" and name in _DELTA else _ALL[name]
    if name in _OPERANDS:
        routed = current_guard().operator(routed, _OPERANDS[name])
    return _named(routed, original)


def _scope(model: nn.Module, plan: Plan) -> Scope:
    modules, backend = _modeling_modules(model), plan.attention.linear.value
    # the functions of linear attention that modeling modules hold, by name
    known = [(name, unpatched(vars(module)[name])) for module in modules for name in _ALL if name in vars(module)]
    if backend == "torch" and any(map(importlib.util.find_spec, _PREFERRED)):
        return Scope({original: _plain(original) for name, original in known if name not in _RWKV7}, modules)
    if backend not in ("halftune", "fla"):
        return Scope({})
    scope = Scope({original: _routed(name, original, backend) for name, original in known}, modules)
    _forward_boundaries(model)
    _forward_step_limits(model, scope)
    if names := sorted(dict(known)):
        log.info("linear attention: %s use backend %s", ", ".join(names), backend)
    else:
        log.warning("linear attention: the model's own code is used; it does not call backend %s", backend)
    return scope


def _forward_boundaries(model: nn.Module) -> None:
    """Pass boundaries to the layers of models whose forward drops unknown arguments."""
    for part in model.modules():
        if type(part).__name__ not in _DROPS_KWARGS or hasattr(part, _FORWARDS_KWARGS):
            continue
        given: dict[str, Any] = {}

        def keep(_: nn.Module, args: Any, kwargs: dict[str, Any], given: dict[str, Any] = given) -> None:
            given.update(boundaries(kwargs))

        def hand_on(
            _: nn.Module, args: Any, kwargs: dict[str, Any], given: dict[str, Any] = given
        ) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, **given}

        def forget(_: nn.Module, args: Any, output: Any, given: dict[str, Any] = given) -> None:
            given.clear()

        part.register_forward_pre_hook(keep, with_kwargs=True)
        part.register_forward_hook(forget, always_call=True)
        inner = part.get_submodule(_DROPS_KWARGS[type(part).__name__])
        inner.register_forward_pre_hook(hand_on, with_kwargs=True)
        setattr(part, _FORWARDS_KWARGS, True)


def _forward_step_limits(model: nn.Module, scope: Scope) -> None:
    """Apply a layer's time-step limits to single-token updates too, so that decoding matches training."""

    def hand_on(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ours = vars(layer)[_FORWARDS_KWARGS].is_open
        return args, kwargs | {_STEP_LIMITS: _step_limits(layer)} if ours else kwargs

    for part in model.modules():
        if _step_limits(part) not in (None, _NO_LIMITS):
            if not hasattr(part, _FORWARDS_KWARGS):
                part.register_forward_pre_hook(hand_on, with_kwargs=True)
            setattr(part, _FORWARDS_KWARGS, scope)


def _step_limits(layer: nn.Module) -> tuple[float, float] | None:
    """Minimum and maximum time step of a Mamba-2 layer; None for other modules."""
    limits = vars(layer).get("time_step_limit")
    return None if limits is None else (float(limits[0]), float(limits[1]))


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    return [sys.modules[name] for name in names if name.startswith(_WITH_MIXERS)]


def _named(routed: Function, original: Function) -> Function:
    """``routed`` under the original's name, with argument errors as ModelError."""

    @functools.wraps(routed)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return routed(*args, **kwargs)
        except ArgumentError as error:
            raise ModelError(
                str(error),
                remedy="attention: {linear: torch}, and data.packing: false",
                code="attention.packing_unsupported",
            ) from error

    called.__name__ = called.__qualname__ = getattr(original, "__name__", type(original).__name__)
    return called
