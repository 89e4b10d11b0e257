"""Compares layers without the values of their weights, and arguments without their identity."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, Enum)
_ITS_OWN = "its own index"
_NO_MODELS = ("builtins", "torch", "typing", "abc")
_FEW = 1024  # maximum elements of a real tensor to compare
# Methods of a cache that take a layer's index.
_CACHE = {"update", "get_seq_length", "get_max_cache_shape", "get_usable_length", "get_mask_sizes"}
_CACHE |= {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
_CACHE |= {"is_recording_past", "has_previous_state"}


class LayerSignatures:
    """Numbers the kinds of layers."""

    def __init__(self) -> None:
        self._kinds: dict[Any, int] = {}
        self._kept: list[Any] = []  # objects compared by identity, kept alive
        self._configs: dict[int, Any] = {}

    def kind(self, layer: nn.Module, index: int) -> int:
        """Return a number that is the same for layers that differ only in weight values and index."""
        self._kept.append(layer)
        try:
            signature = self._signature(layer, index)
        except (RecursionError, TypeError, ValueError, RuntimeError):  # contains objects that cannot be compared
            signature = id(layer)
        return self._kinds.setdefault(signature, len(self._kinds))

    def _signature(self, layer: nn.Module, index: int) -> Any:
        within = {id(module): name for name, module in layer.named_modules(remove_duplicate=False)}
        look = functools.partial(self._look, within=within)
        parts: list[Any] = []
        for name, module in layer.named_modules(remove_duplicate=False):
            harmless = _names_of_indices(type(module))
            parts.append((name, type(module)))
            for key, value in sorted(vars(module).items()):
                if key == "_modules" or (key == "kwargs" and type(module).__module__.startswith("peft.")):
                    continue  # the latter is what an adapter was made with, its layer's name among it
                if "_hooks" in key and isinstance(value, dict):  # kept by a running number
                    value = tuple(value.values())
                own = type(value) is int and value == index and key in harmless
                parts.append((key, _ITS_OWN if own else plain_parts(value, _weight, look)))
        return tuple(parts)

    def _look(self, value: Any, within: dict[int, str]) -> Any:
        """The key of other objects than plain values and containers."""
        look = functools.partial(self._look, within=within)
        parts = functools.partial(plain_parts, tensor=_weight, other=look)
        if isinstance(value, nn.Module):
            return within.get(id(value), id(value))
        if isinstance(value, functools.partial):
            return "partial", look(value.func), parts(value.args), parts(value.keywords)
        if isinstance(value, MethodType):
            return "method", look(value.__func__), look(value.__self__)
        if isinstance(value, FunctionType) and value.__closure__:
            cells = [cell.cell_contents for cell in value.__closure__ if cell.cell_contents is not value]
            return id(value.__code__), parts(value.__defaults__), parts(cells)
        if isinstance(value, PretrainedConfig):
            if id(value) not in self._configs:
                self._configs[id(value)] = type(value), parts(value.to_dict())
            return self._configs[id(value)]
        self._kept.append(value)
        return id(value)


def plain_parts(value: Any, tensor: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = id) -> Any:
    """Convert a value to a hashable key.

    Args:
        value: containers are looked into.
        tensor: what counts of a tensor.
        other: what counts of an object that is neither plain nor a container; by default which one it is.
    """
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, _ATOMS):
        return type(value), value
    if isinstance(value, dict):
        return dict, tuple((key, plain_parts(entry, tensor, other)) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(plain_parts(entry, tensor, other) for entry in value)
    if isinstance(value, (set, frozenset)):
        return set, frozenset(plain_parts(entry, tensor, other) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        named = ((each.name, vars(value).get(each.name)) for each in fields(value))
        return type(value), tuple((name, plain_parts(entry, tensor, other)) for name, entry in named)
    return other(value)


def _weight(tensor: torch.Tensor) -> Any:
    looks = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return looks
    return (*looks, tuple(tensor.flatten().tolist()) if tensor.numel() <= _FEW else id(tensor))


def _names_of_indices(kind: type) -> frozenset[str]:
    """Attributes that a class's code only passes to a cache; empty if its source is unavailable."""
    foreign = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _NO_MODELS]
    try:
        found = [_handed_to_a_cache(file) for file in {inspect.getfile(base) for base in foreign}]
    except (OSError, TypeError):
        return frozenset()
    harmful = frozenset[str]().union(*(harmful for _, harmful in found))
    return frozenset[str]().union(*(harmless for harmless, _ in found)) - harmful


@functools.cache
def _handed_to_a_cache(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names of attributes that a file uses as an argument of a cache's methods alone or not at all; those of others.

    An attribute that ``getattr(self, "name")`` or ``vars(self)["name"]`` may read counts as used otherwise.
    """
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset(), frozenset()
    nodes = list(ast.walk(tree))
    handed = set(map(id, _arguments_of_caches(nodes)))
    written: set[str] = set()
    otherwise = {word for node in nodes for word in _looked_up(node)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            stored = isinstance(node.ctx, ast.Store)
            (written if stored or id(node) in handed else otherwise).add(node.attr)
    return frozenset(written - otherwise), frozenset(otherwise)


def _looked_up(node: ast.AST) -> Iterator[str]:
    """Strings that a call or a subscript may name an attribute by."""
    given = node.args if isinstance(node, ast.Call) else [node.slice] if isinstance(node, ast.Subscript) else []
    for word in given:
        if isinstance(word, ast.Constant) and isinstance(word.value, str):
            yield word.value


def _arguments_of_caches(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """The arguments of calls of a cache's methods."""
    for node in nodes:
        if isinstance(node, ast.Call) and _asks_a_cache(node.func):
            yield from node.args
            yield from (word.value for word in node.keywords)


def _asks_a_cache(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr not in _CACHE:
        return False
    return not (isinstance(function.value, ast.Name) and function.value.id == "self")
