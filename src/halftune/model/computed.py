"""Tensors that a model's code computes when it is made, rotary tables above all: no checkpoint holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel, initialization

from halftune.config.sections.model import ModelSection
from halftune.core.log import get_logger
from halftune.model.broken_code import broken
from halftune.precision.trace.steps import HALF

log = get_logger(__name__)


def is_foreign(model: nn.Module) -> bool:
    """Whether a model's code came with its checkpoint, or is that of flash-linear-attention."""
    return type(model).__module__.partition(".")[0] in ("transformers_modules", "fla")


def tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating buffers of a model's own modules, by name; those of torch's layers (statistics) are no tables."""
    for path, module in model.named_modules(remove_duplicate=False):
        if not type(module).__module__.startswith("torch."):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    yield f"{path}.{name}" if path else name, buffer


def uncomputed(model: nn.Module) -> Iterator[str]:
    """Names of the tensors that no checkpoint holds: non-persistent buffers, and tensors that are attributes."""
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            yield from sorted(name for name in module._non_persistent_buffers_set if name in module._buffers)
            yield from _loose(module)


def compute_in_fp32(model: PreTrainedModel, section: ModelSection, *, stored: bool = False) -> None:
    """Gives a model the tensors that its code computes when it is made, as they are where fp32 is the default.

    transformers makes a model under its storage format as the default: ``torch.arange(n) / n`` is then rounded to it,
    and frequencies in bf16 turn positions by radians. And it makes it on the meta device: non-persistent buffers of
    code that it does not know get memory that nobody has written to, other tensors none at all. So such a model's
    modules are made once more, without weights, for these tensors alone.

    Args:
        model: changed in place; neither weights nor buffers that are read from files are, unless ``stored``.
        section: whose code it is, for errors.
        stored: whether tables that a checkpoint would hold are computed too, because none is read.

    Raises:
        ModelError: the model's code fails; names the line.
    """
    if not _wanting(model, stored):
        return
    again = dict(_made_again(model, section).named_modules(remove_duplicate=False))
    given = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path not in again or type(again[path]) is not type(module):
            continue  # a quantised layer
        fresh = again[path]
        for name, buffer in module._buffers.items():
            kept = name not in module._non_persistent_buffers_set
            new = fresh._buffers.get(name)
            if buffer is None or new is None or new.shape != buffer.shape or (kept and not stored):
                continue
            module._buffers[name] = new if buffer.is_meta else new.to(buffer.device)
            given.append(name)
        vars(module).update({name: vars(fresh)[name] for name in _loose(module) if name in vars(fresh)})
    if given:
        some = ", ".join(dict.fromkeys(given))
        log.info("%d buffers that the model computes are made in fp32: %s", len(given), some)


def _wanting(model: PreTrainedModel, stored: bool) -> bool:
    """Whether something is there that transformers left unwritten or rounded."""
    foreign = is_foreign(model)
    for module in model.modules():
        if foreign and (module._non_persistent_buffers_set or _loose(module)):
            return True
        for name, buffer in module._buffers.items():
            computed = name in module._non_persistent_buffers_set or (foreign and stored)
            if computed and buffer is not None and buffer.dtype in HALF:
                return True
    return False


def _loose(module: nn.Module) -> list[str]:
    """Names of attributes that hold tensors which are neither weights nor buffers, alone or in containers."""
    found = []
    for name, value in vars(module).items():
        if name in _OF_TORCH or not isinstance(value, (torch.Tensor, list, tuple, dict)):
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            found.append(name)
    return found


_OF_TORCH = frozenset(vars(nn.Module()))


def _made_again(model: PreTrainedModel, section: ModelSection) -> nn.Module:
    config: Any = copy.deepcopy(model.config)
    for part in (config, *(vars(config).get(name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = torch.float32
    before = torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(initialization.no_init_weights())
            stack.enter_context(initialization.no_tie_weights())
            stack.enter_context(without_weights())
            torch.set_default_dtype(torch.float32)
            return type(model)(config)
    except Exception as error:  # the model's own code may raise anything
        raise broken(error, section, None) from error
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside, a weight loses its numbers when it is given to a module."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register
