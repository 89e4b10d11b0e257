"""Puts our operators where transformers' linear-attention layers call theirs; nothing is forked, all can be undone.

Every mixer of transformers looks its functions up in its modeling module at call time, so the module's globals are
rebound, once, when a model is loaded. It concerns every model of that family in the process: the functions compute the
same, and they keep the samples of a packed row apart.
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
from halftune.model.patch import current_guard
from halftune.plan import Plan
from halftune_kernels.arguments import ArgumentError
from halftune_kernels.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from halftune_kernels.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from halftune_kernels.ops.kda import kda, kda_step
from halftune_kernels.ops.rwkv7 import rwkv7, rwkv7_step
from halftune_kernels.ops.ssd import mamba2_chunk_scan, mamba2_selective_state_update

log = get_logger(__name__)

Function = Callable[..., Any]
_SILU = (None, "silu", "swish")
# Models whose forward drops arguments that it does not name, and the part of them that would hand them on.
_FORGETFUL = {"Mamba2ForCausalLM": "backbone"}
_WITH_MIXERS = ("transformers.models.", "halftune.model.rwkv7.")
_HANDS_ON = "halftune_hands_on"  # on a module that has hooks of ours already
# Mamba-2 layers of zamba2 and nemotron_h bound the step over a whole row, and forget to over one token from the cache.
_STEP_LIMITS = "halftune_step_limits"
_NO_LIMITS = (0.0, math.inf)
_originals: dict[tuple[ModuleType, str], Function] = {}


def boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Where the samples of a packed row end, from what a layer hands on: not all of them rename ``cu_seq_lens_q``."""
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
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return operator(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **boundaries(kwargs),
        )

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
    """None sends a layer on to its separate steps: the fused one reads raw weights, past LoRA and quantisation."""


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
# of our own model: only the guard comes in between
_RWKV7: dict[str, Function] = {"rwkv7": rwkv7, "rwkv7_step": rwkv7_step}
_ALL: dict[str, Function] = {**_CONVOLUTIONS, **_DELTA, **_MAMBA2, **_RWKV7}
# Packages whose functions transformers' own call before torch, where they are installed.
_PREFERRED = ("fla", "causal_conv1d", "mamba_ssm")

# What must share one dtype; steps, decays and states keep their own.
_OPERANDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_DELTA, ("query", "key", "value")),
    **dict.fromkeys(("mamba2_chunk_scan", _UPDATE), ("hidden_states", "B", "C")),
    **dict.fromkeys(_RWKV7, ("r", "k", "v", "a", "b")),
}


def _with_boundaries(original: Function) -> Function:
    """fla's function, told where samples end also by layers that do not rename the boundaries."""

    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, **boundaries({**kwargs, "seq_idx": None})})

    return told


def _plain(original: Function) -> Function:
    """transformers' torch code, also where a package is installed that transformers would call in its place."""
    torch_code = inspect.unwrap(original)
    known = inspect.signature(torch_code).parameters

    @functools.wraps(torch_code)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if boundaries(kwargs):
            raise ModelError(
                f"{torch_code.__name__}: transformers' torch code takes a packed row for one sample",
                remedy="attention: {linear: halftune}, or data.packing: false",
            )
        return torch_code(*args, **{name: value for name, value in kwargs.items() if name in known})

    return plain


def route_linear_layers(model: nn.Module, plan: Plan) -> None:
    """Rebinds the functions that the model's linear-attention layers call, as ``plan.attention.linear`` says.

    ``torch`` and ``none`` leave, or put back, transformers' own; ``torch`` without the packages that transformers would
    call. Models of other families are not touched.
    """
    modules = _modeling_modules(model)
    restore_linear_layers(modules)
    backend = plan.attention.linear.value
    if backend == "torch" and any(map(importlib.util.find_spec, _PREFERRED)):
        for module in modules:
            for name in _ALL.keys() & vars(module).keys() - _RWKV7.keys():
                original = _originals[module, name] = getattr(module, name)
                setattr(module, name, _plain(original))
    if backend not in ("halftune", "fla"):
        return
    guard = current_guard()
    bound: list[str] = []
    for module in modules:
        for name, function in _ALL.items():
            if name not in vars(module):
                continue
            original = _originals[module, name] = getattr(module, name)
            routed = _with_boundaries(original) if backend == "fla" and name in _DELTA else function
            if name in _OPERANDS:
                routed = guard.operator(routed, _OPERANDS[name])
            setattr(module, name, _named(routed, original))
            bound.append(name)
    _hand_on_boundaries(model)
    _hand_on_step_limits(model)
    if bound:
        log.info("linear layers: %s computed by %s", ", ".join(sorted(set(bound))), backend)
    else:
        log.warning("linear layers: computed by the model's own code, which calls no function of %s", backend)


def restore_linear_layers(modules: list[ModuleType] | None = None) -> None:
    """Puts transformers' functions back, in some modeling modules or in all."""
    for module, name in [key for key in _originals if modules is None or key[0] in modules]:
        setattr(module, name, _originals.pop((module, name)))


@contextmanager
def routed_linear_layers(model: nn.Module, plan: Plan) -> Iterator[None]:
    """``route_linear_layers`` for the length of a block; afterwards every global is as it was before."""
    modules = _modeling_modules(model)
    before = [(module, name, value) for module in modules for name, value in vars(module).items() if callable(value)]
    originals = dict(_originals)
    try:
        route_linear_layers(model, plan)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        _originals.clear()
        _originals.update(originals)


def _hand_on_boundaries(model: nn.Module) -> None:
    """Hands boundaries on to the layers where the model's own forward drops what it does not know."""
    for part in model.modules():
        if type(part).__name__ not in _FORGETFUL or hasattr(part, _HANDS_ON):
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
        inner = part.get_submodule(_FORGETFUL[type(part).__name__])
        inner.register_forward_pre_hook(hand_on, with_kwargs=True)
        setattr(part, _HANDS_ON, True)


def _hand_on_step_limits(model: nn.Module) -> None:
    """Tells one token's update the bounds that its layer has for a row, so that decoding is what was trained."""

    def hand_on(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ours = (sys.modules[type(layer).__module__], _UPDATE) in _originals
        return args, kwargs | {_STEP_LIMITS: _step_limits(layer)} if ours else kwargs

    for part in model.modules():
        if _step_limits(part) not in (None, _NO_LIMITS) and not hasattr(part, _HANDS_ON):
            part.register_forward_pre_hook(hand_on, with_kwargs=True)
            setattr(part, _HANDS_ON, True)


def _step_limits(layer: nn.Module) -> tuple[float, float] | None:
    """Least and greatest step of a Mamba-2 layer; None for other modules."""
    limits = vars(layer).get("time_step_limit")
    return None if limits is None else (float(limits[0]), float(limits[1]))


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    return [sys.modules[name] for name in names if name.startswith(_WITH_MIXERS)]


def _named(routed: Function, original: Function) -> Function:
    """``routed`` with the name that messages know, and errors in its arguments as ours."""

    @functools.wraps(routed)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return routed(*args, **kwargs)
        except ArgumentError as error:
            raise ModelError(str(error), remedy="attention: {linear: torch}, and data.packing: false") from error

    called.__name__ = called.__qualname__ = getattr(original, "__name__", type(original).__name__)
    return called
