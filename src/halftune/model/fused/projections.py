"""Fused linear layers, plain or with LoRA. Layers that share an input (such as query, key and value) are computed
together.

Gated feed-forward layers, ``down(silu(gate(x)) · up(x))``, are recognised by comparing outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import permutations
from typing import Any, TypeGuard

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from halftune.model.load.float8 import Float8Linear
from halftune.precision.record.recorder import only_records
from halftune_kernels.library import opaque
from halftune_kernels.ops.float8_linear import Float8Weight
from halftune_kernels.ops.gated_activation import ACTIVATIONS, gated_activation
from halftune_kernels.ops.gated_activation.reference import act
from halftune_kernels.ops.lora_linear import AdaptedWeight, Packed, lora_linear
from halftune_kernels.ops.lora_mlp import lora_mlp


def outside_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Disable autocast for the device of ``x``; the meta device has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


Weights = tuple[AdaptedWeight, AdaptedWeight, AdaptedWeight]


class FusedMlp:
    """The replacement of a layer's forward: the operator, or the layer's own code if unsupported.

    Args:
        module: the layer.
        names: of its children gate, up and down, or of gate_up and down. Children are looked up at every call, since
            adapters replace them.
        activation: of the gate; on CPUs only ``silu`` is supported.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], activation: str = "silu") -> None:
        self.module, self.names, self.activation = module, tuple(names), activation

    def parts(self) -> list[AdaptedWeight] | None:
        """The children in their current state; None if one is unsupported."""
        layers = [adapted_weight(self.module.get_submodule(name)) for name in self.names]
        known = [layer for layer in layers if layer is not None]
        halves = len(layers) == 2 and any(isinstance(layer.weight, Packed) for layer in known[:1])
        return None if halves or len(known) < len(layers) else known

    def read(self) -> Weights | None:
        """Gate, up and down in their current state; None if one is unsupported."""
        if (parts := self.parts()) is None:
            return None
        *first, down = parts
        if len(first) == 1:
            half = first[0].weight.shape[0] // 2
            first = [_rows(first[0], cut) for cut in (slice(0, half), slice(half, None))]
        return first[0], first[1], down

    def first_weight(self) -> torch.Tensor:
        """The base weight of the gate (or gate_up), ``[M, H]``."""
        layer: Any = self.module.get_submodule(self.names[0])
        layer = getattr(layer, "base_layer", layer)
        weight = frozen_weight(layer)
        return weight.make() if isinstance(weight, Packed) else layer.weight

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward returns."""
        module = self.module
        if args or kwargs:
            return type(module).forward(module, x, *args, **kwargs)
        weights = self.read()
        dtype = None if weights is None else common_dtype(x, weights)
        if weights is None or dtype is None:
            return self._activation_only(x) if opaque(x) else type(module).forward(module, x)
        with outside_autocast(x):
            return lora_mlp(x.to(dtype), *weights, self.activation)

    def _activation_only(self, x: torch.Tensor) -> torch.Tensor:
        """Run the children's own code, with the activation in one launch."""
        *first, down = (self.module.get_submodule(name) for name in self.names)
        gate, up = (part(x) for part in first) if len(first) == 2 else first[0](x).chunk(2, dim=-1)
        return down(gated_activation(gate, up, self.activation))


def mlp_candidates(module: nn.Module, everything: bool = False) -> Iterator[FusedMlp]:
    """Candidate assignments of gate, up and down of a module, to be verified by comparison; none for most modules.

    A candidate has three linear children, two of them with equal sizes, or two, where the first computes gate and up.
    """
    sizes: dict[str, tuple[int, int]] = {
        name: (child.in_features, child.out_features)  # type: ignore[misc]
        for name, child in module.named_children()
        if hasattr(child, "in_features") and hasattr(child, "out_features")
    }
    activation = _activation(module) if everything and len(sizes) in (2, 3) else "silu"
    for order in permutations(sizes) if len(sizes) in (2, 3) else ():
        if _fits([sizes[name] for name in order]):
            yield FusedMlp(module, order, activation)


def _activation(module: nn.Module) -> str:
    """The activation of a module, found by comparing outputs; ``silu`` if no part matches (verified later)."""
    x = torch.linspace(-4, 4, 99)
    parts = [*filter(callable, vars(module).values()), *module.children()]
    for part in parts:
        if isinstance(part, nn.Module) and next(part.parameters(), None) is not None:
            continue
        try:
            y = part(x)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
            continue
        if isinstance(y, torch.Tensor) and y.shape == x.shape:
            for name in ACTIVATIONS:
                if torch.allclose(y, act(x, name), atol=1e-6):  # GELU and its tanh form differ by 5e-4
                    return name
    return "silu"


def _fits(sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether (inputs, outputs) of layers are those of gate, up and down, or of gate and up in one layer and down."""
    if len(sizes) == 3:
        return sizes[0] == sizes[1] == sizes[2][::-1]
    return sizes[0] == (sizes[1][1], 2 * sizes[1][0])


def _rows(layer: AdaptedWeight, cut: slice) -> AdaptedWeight:
    assert not isinstance(layer.weight, Packed), "packed weights have no rows"
    weight = layer.weight.rows(cut) if isinstance(layer.weight, Float8Weight) else layer.weight[cut]
    bias = None if layer.bias is None else layer.bias[cut]
    return layer._replace(weight=weight, bias=bias, b=None if layer.b is None else layer.b[cut])


def adapted_weight(module: nn.Module) -> AdaptedWeight | None:
    """The frozen weight and low-rank update of a linear layer, in their current state.

    None for unsupported layers: trained weights, DoRA and other variants, dropout, several adapters, a merged or
    disabled adapter, quantised layers except 4-bit ones on GPUs, otherwise replaced layers, hooks.
    """
    if is_lora_linear(module):
        return _lora_weight(module)
    weight = frozen_weight(module)
    return None if weight is None else AdaptedWeight(weight, _frozen(module.bias))  # type: ignore[arg-type]


def is_lora_linear(module: nn.Module) -> bool:
    """Whether the module is peft's LoRA layer around a linear layer, plain or 4-bit."""
    kind = type(module)
    return kind is LoraLinear or (kind.__name__ == "Linear4bit" and kind.__module__ == "peft.tuners.lora.bnb")


def frozen_weight(module: nn.Module) -> torch.Tensor | Packed | Float8Weight | None:
    """The weight of an unmodified linear layer that is not trained; None for other layers."""
    if _is_frozen_linear(module):
        return module.weight
    if isinstance(module, Float8Linear):  # on CPUs, which have no such products, the layer emulates them
        return module.float8 if opaque(module.float8.values) and _has_no_hooks(module) else None
    kind, weight = type(module), getattr(module, "weight", None)
    if kind.__name__ != "Linear4bit" or kind.__module__ != "bitsandbytes.nn.modules" or not _has_no_hooks(module):
        return None
    state = getattr(weight, "quant_state", None)
    if state is None or weight is None or weight.device.type == "cpu" or torch.compiler.is_compiling():
        return None
    return Packed(partial(_unpacked, weight, state), (int(module.out_features), int(module.in_features)))  # type: ignore[arg-type]


def _unpacked(weight: torch.Tensor, state: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit  # few runs have 4-bit weights

    return dequantize_4bit(weight.detach(), state)


def _lora_weight(layer: Any) -> AdaptedWeight | None:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or not _is_low_rank_only(layer, active[0]):
        return None
    base, down, up = layer.base_layer, layer.lora_A[active[0]], layer.lora_B[active[0]]
    weight = frozen_weight(base)
    if weight is None or not all(_is_plain_linear(part) and part.bias is None for part in (down, up)):
        return None
    return AdaptedWeight(weight, _frozen(base.bias), down.weight, up.weight, float(layer.scaling[active[0]]))


def _is_low_rank_only(layer: Any, name: str) -> bool:
    """Whether a LoRA layer only adds its low-rank product: not merged or disabled, no variant, dropout or hooks."""
    if layer.merged or layer.disable_adapters or layer.fan_in_fan_out or name in layer.lora_variant:
        return False
    return _has_no_hooks(layer) and (type(layer.lora_dropout[name]) is nn.Identity or not layer.training)


def _is_frozen_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is an unmodified ``nn.Linear`` that is not trained."""
    frozen = _is_plain_linear(module) and not module.weight.requires_grad
    return frozen and (module.bias is None or not module.bias.requires_grad)


def common_dtype(x: torch.Tensor, layers: Sequence[AdaptedWeight]) -> torch.dtype | None:
    """The dtype in which the layers' own code would compute on ``x``; None if dtypes would mix."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if x.dtype != torch.float64 else None
    given = [tensor for layer in layers for tensor in (layer.weight, layer.bias, layer.a, layer.b)]
    tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    return x.dtype if all(tensor.dtype == x.dtype for tensor in tensors) else None


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is an unmodified ``nn.Linear`` with a plain weight."""
    plain = type(module) is nn.Linear and type(module.weight) in (nn.Parameter, torch.Tensor, FakeTensor)
    return plain and "forward" not in vars(module) and _has_no_hooks(module)


def _has_no_hooks(module: nn.Module) -> bool:
    """Whether a module has no hooks, except those of the dtype trace, which must not change a step."""
    if module._forward_pre_hooks or module._forward_hooks:
        looking = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if not all(map(only_records, looking)):
            return False
    return not (module._backward_hooks or module._backward_pre_hooks)


def _frozen(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()


# Names of layers with one input, in the order of their calls: of attention, of Qwen3.5's and Qwen3-Next's delta rule.
SHARING = (
    ("q_proj", "k_proj", "v_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)


class Projections:
    """Computes all layers of a group when the first is called, and caches the results for the others.

    Cached results are valid only while the parent runs, and only for the same input tensor. A layer that is called with
    another input computes its own result.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = list(layers)
        self._open = False
        self._waiting: tuple[torch.Tensor, int, dict[int, torch.Tensor]] | None = None

    def watch(self, parent: nn.Module) -> list[RemovableHandle]:
        """Enable caching while ``parent`` runs; unused results are dropped, also after an exception."""
        return [
            parent.register_forward_pre_hook(self._begin),
            parent.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._open = True

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._open, self._waiting = False, None

    def compute(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The result of the layer at ``index``; None if it is unsupported."""
        if torch.compiler.is_compiling():  # a graph removes duplicate computations itself
            return _first(_compute(x, self.layers[index : index + 1]))
        if index and (output := self._take(index, x)) is not None:
            return output
        # Inference tensors have no version counter: in-place changes would go unnoticed.
        together = index == 0 and self._open and not x.is_inference()
        outputs = _compute(x, self.layers if together else self.layers[index : index + 1])
        if outputs is not None and len(outputs) > 1:
            self._waiting = x, x._version, dict(enumerate(outputs[1:], 1))
        return _first(outputs)

    def _take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The cached result of a layer for this very input."""
        waiting = self._waiting  # read once: another thread may use the same model
        if waiting is not None and waiting[0] is x and waiting[1] == x._version:
            return waiting[2].pop(index, None)
        return None


class FusedProjection:
    """The replacement of the forward of the layer at ``index`` of a group."""

    def __init__(self, group: Projections, index: int) -> None:
        self.group, self.index = group, index

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the layer's own forward returns."""
        layer = self.group.layers[self.index]
        output = None if args or kwargs else self.group.compute(self.index, x)
        return type(layer).forward(layer, x, *args, **kwargs) if output is None else output


def _first(outputs: tuple[torch.Tensor, ...] | None) -> torch.Tensor | None:
    return outputs[0] if outputs else None


def _compute(x: torch.Tensor, layers: Sequence[nn.Module]) -> tuple[torch.Tensor, ...] | None:
    weights: list[AdaptedWeight] = []
    for layer in layers:
        weight = adapted_weight(layer)
        if weight is None:
            return None
        weights.append(weight)
    dtype = common_dtype(x, weights)
    if dtype is None:
        return None
    with outside_autocast(x):
        return lora_linear(x.to(dtype), weights)
