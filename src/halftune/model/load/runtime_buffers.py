"""Recomputes tensors that a model's constructor computes and no checkpoint contains, such as rotary tables."""

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
from halftune.model.load.remote_code import remote_code_error
from halftune.precision.record.steps import HALF

log = get_logger(__name__)


def is_foreign(model: nn.Module) -> bool:
    """Whether a model's code is remote code or flash-linear-attention's."""
    return type(model).__module__.partition(".")[0] in ("transformers_modules", "fla")


def tables(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating buffers of a model's own modules, by name, without those of torch's layers (statistics)."""
    for path, module in model.named_modules(remove_duplicate=False):
        if not type(module).__module__.startswith("torch."):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    yield f"{path}.{name}" if path else name, buffer


def unsaved_tensors(model: nn.Module) -> Iterator[str]:
    """Names of tensors that no checkpoint contains: non-persistent buffers and tensor attributes."""
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            yield from sorted(name for name in module._non_persistent_buffers_set if name in module._buffers)
            yield from _tensor_attributes(module)


def compute_in_fp32(model: PreTrainedModel, section: ModelSection, *, stored: bool = False) -> None:
    """Recompute the tensors that a model's constructor computes, with fp32 as the default dtype.

    transformers constructs a model with its storage dtype as the default: ``torch.arange(n) / n`` is then rounded, and
    bf16 frequencies shift rotary positions by radians. It also constructs on the meta device: non-persistent buffers of
    remote code become uninitialised memory, other tensors have no values. So the model is constructed again, without
    weights, for these tensors.

    Args:
        model: changed in place; weights are not changed, nor buffers read from files unless ``stored``.
        section: the model's config, for errors.
        stored: also compute buffers that a checkpoint would contain, if none is read.

    Raises:
        ModelError: the model's code fails; names the line.
    """
    if not _needs_recompute(model, stored):
        return
    again = dict(_rebuilt(model, section).named_modules(remove_duplicate=False))
    given = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path not in again or type(again[path]) is not type(module):
            continue  # a quantised layer
        fresh = again[path]
        given += _replace_buffers(module, fresh, stored=stored)
        vars(module).update({name: vars(fresh)[name] for name in _tensor_attributes(module) if name in vars(fresh)})
    if given:
        some = ", ".join(dict.fromkeys(given))
        log.info("computed %d runtime buffers in fp32: %s", len(given), some)


_FACTORS = ("mup_vector",)  # of activations, which the code does not cast: fp32 would promote them


def _replace_buffers(module: nn.Module, fresh: nn.Module, *, stored: bool) -> list[str]:
    """Take non-persistent buffers, or all if ``stored``, from a module of the same type; returns their names."""
    given = []
    for name, buffer in module._buffers.items():
        new = fresh._buffers.get(name) if stored or name in module._non_persistent_buffers_set else None
        if buffer is not None and new is not None and new.shape == buffer.shape:
            placed = new if buffer.is_meta else new.to(buffer.device)
            module._buffers[name] = placed.to(buffer.dtype) if name in _FACTORS else placed
            given.append(name)
    return given


def _has_computed(module: nn.Module) -> bool:
    """Whether a module has tensors that its constructor computes and that no checkpoint contains."""
    return bool(module._non_persistent_buffers_set or _tensor_attributes(module))


def _needs_recompute(model: PreTrainedModel, stored: bool) -> bool:
    """Whether transformers left tensors uninitialised or rounded."""
    modules = list(model.modules())
    if is_foreign(model):
        return any(map(_has_computed, modules)) or (stored and any(buffer.dtype in HALF for buffer in model.buffers()))
    computed = [module._buffers[name] for module in modules for name in module._non_persistent_buffers_set]
    return any(buffer.dtype in HALF for buffer in computed if buffer is not None)


def _tensor_attributes(module: nn.Module) -> list[str]:
    """Names of attributes with tensors that are neither parameters nor buffers, directly or in containers."""
    found = []
    for name, value in vars(module).items():
        if name in _OF_TORCH or not isinstance(value, (torch.Tensor, list, tuple, dict)):
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if tensors and not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            found.append(name)
    return found


_OF_TORCH = frozenset(vars(nn.Module()))


def _rebuilt(model: PreTrainedModel, section: ModelSection) -> nn.Module:
    config: Any = copy.deepcopy(model.config)
    for part in (config, *(vars(config).get(name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = torch.float32
            if part not in (config, config.get_text_config(decoder=True)):
                part._attn_implementation = "eager"  # of a tower; not every one has the implementation it was given
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
        raise remote_code_error(error, section, None) from error
    finally:
        torch.set_default_dtype(before)


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside, registered parameters are moved to the meta device."""
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
