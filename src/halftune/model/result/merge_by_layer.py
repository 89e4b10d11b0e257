"""Merges an adapter into its base one layer at a time, for models larger than the main memory.

Base weights stay in their files. Each is read in fp32, merged, compared with the unmerged layer, rounded and written.
In memory are the adapter, the largest layer in fp32, and the part of the result that becomes the next file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from halftune.config.sections.model import ModelSection
from halftune.core.choice import Choice, Format
from halftune.core.errors import ModelError
from halftune.model.adapters import load_adapter
from halftune.model.files.locate import locate
from halftune.model.load.lazy_weights import CPU, LazyWeights, why_not
from halftune.model.load.load import load_model
from halftune.model.load.parts import adapted_towers, release
from halftune.model.load.quantised.formats import quantisation
from halftune.model.load.weight_range import largest
from halftune.model.load.zero_weights import insert_zero_weights
from halftune.model.result.merge import (
    ROWS,
    TOKENS,
    Merge,
    Progress,
    Update,
    beyond_range,
    check_forward,
    forward_bound,
    fp32_plan,
    lacks_memory,
    no_progress,
    rounded,
)
from halftune.model.result.save import FILE_BYTES, write_model
from halftune.plan import Plan
from halftune.precision.dtypes import kept_names, plain_name, torch_dtype

Named = Iterator[tuple[str, torch.Tensor]]


def merge_by_layer(
    model: ModelSection,
    adapter: Path | None,
    plan: Plan,
    stored: Format,
    folder: Path,
    progress: Progress = no_progress,
    limit: int = FILE_BYTES,
) -> Merge:
    """Merge base and adapter and write the model in ``stored``; its weights are never all in memory.

    Args:
        model: the base model.
        adapter: folder of the adapter; None to round a full model.
        plan: the run's plan; its ``keep_fp32`` applies.
        stored: the format to save.
        folder: an existing folder for weights and config.
        progress: called with the progress.
        limit: bytes of a file of the result, which is held until it is written.

    Returns:
        the merge; its model is on the meta device.

    Raises:
        ModelError: the model can only be merged as a whole, or a merged layer differs from the unmerged one.
        OSError, SafetensorError: a file cannot be written.
    """
    exact = fp32_plan(plan, stored)
    as_stored = replace(exact, precision=replace(exact.precision, storage=Choice(stored, "to be exported")))
    result, plain = _unread(model, as_stored, plan)
    adapted, lazy = result, plain
    if adapter is not None:
        base, lazy = _unread(model, exact, plan)
        insert_zero_weights(base)
        adapted = load_adapter(base, adapter, exact)
        changed = adapted_towers(adapted)
        release(result, lambda name: name.startswith(changed))
    merging = _Merging(result, adapted, (plain, lazy), plan, stored, progress)
    if shared := merging.untied():
        raise _whole_only(plan, f"{shared} shares its weight with a layer that the adapter changes")
    with plain.opened(), lazy.opened(), torch.no_grad():
        write_model(result, stored, plan.precision.keep_fp32.value, folder, merging.tensors(), limit)
    update, bound = merging.update, forward_bound(stored, 0)
    return Merge(result, stored, merging.error, bound, update.size, update.error, by_layer=True)


def _unread(model: ModelSection, exact: Plan, plan: Plan) -> tuple[PreTrainedModel, LazyWeights]:
    """The model on the meta device.

    Raises:
        ModelError: its weights cannot be read one by one.
    """
    why = why_not()
    if plan.weights.origin == "on_load" or quantisation(locate(model)) is not None:
        why = "the base is quantised"
    elif model.tokens.add:
        why = "the run adds tokens"
    if why:
        raise _whole_only(plan, why)
    lazy = LazyWeights()
    loaded = load_model(model, exact, for_training=False, lazy=lazy)
    lazy.check = lambda _name, _tensor: None  # the range is that of the result
    if lacking := lazy.lacks(loaded):
        raise _whole_only(plan, f"{lacking} is not in the files under a name by which it could be read alone")
    return loaded, lazy


def _whole_only(plan: Plan, why: str) -> ModelError:
    what = f"{lacks_memory(plan)}; it cannot be merged layer by layer: {why}"
    return ModelError(what, remedy="export on a machine with more memory", code="export.not_enough_memory")


class _Merging:
    """The tensors of a merged model, one after the other.

    Attributes:
        update: size of the update so far.
        error: largest relative error of a merged and rounded layer's output so far.
    """

    def __init__(
        self,
        result: PreTrainedModel,
        adapted: Any,
        files: tuple[LazyWeights, LazyWeights],
        plan: Plan,
        stored: Format,
        progress: Progress,
    ) -> None:
        self._result, (self._plain, self._lazy), self._progress = result, files, progress
        self._stored: Format = stored
        self._kept = kept_names(result, plan.precision.keep_fp32.value)
        base = adapted.get_base_model() if isinstance(adapted, PeftModel) else adapted
        self._layers: dict[str, Any] = {}
        self._copies: dict[str, nn.Module] = {}
        self._others: list[str] = []
        for name, module in base.named_modules():
            if isinstance(module, BaseTunerLayer):
                self._layers.setdefault(plain_name(name), module)  # of nested ones the outer comes first
            elif isinstance(module, ModulesToSaveWrapper):
                self._copies[plain_name(name)] = module.modules_to_save["default"]  # pyright: ignore[reportArgumentType]
            elif isinstance(module, AuxiliaryTrainingWrapper):
                self._others.append(name)
        named = (*base.named_parameters(remove_duplicate=False), *base.named_buffers())
        self._own = {plain_name(name): one for name, one in named if ".modules_to_save." not in name}
        self._generator = torch.Generator().manual_seed(0)
        self.update, self.error = Update(), 0.0

    def untied(self) -> str:
        """The first tensor that cannot be written alone: one that shares its weight with a changed one, for example."""
        groups: dict[int, list[str]] = {}
        for name, one in self._result.named_parameters(remove_duplicate=False):
            groups.setdefault(id(one), []).append(name)
        for names in groups.values():
            changed = any(name.rpartition(".")[0] in self._layers for name in names)
            if len(names) > 1 and (changed or len({id(self._source(name)) for name in names}) > 1):
                return names[-1]
        return next(iter(self._others), "")

    def tensors(self) -> Named:
        """Merge, check and yield all tensors of the result with their names in its ``state_dict``; tied ones once.

        Raises:
            ModelError: a merged layer differs from the unmerged one, or a weight exceeds the range of the format.
        """
        ready: dict[str, torch.Tensor] = {}
        done, merged = set[int](), 0
        for name, tensor in self._result.state_dict(keep_vars=True).items():
            if id(tensor) in done:
                continue
            done.add(id(tensor))
            path = name.rpartition(".")[0]
            if path in self._layers and name not in ready:
                self._progress("merging", merged, len(self._layers))
                ready, merged = self._merge(path), merged + 1
            value = ready.pop(name) if name in ready else self._value(name, tensor)
            self._check_range(name, value)
            yield name, value

    def _source(self, name: str) -> torch.Tensor | None:
        """The tensor of the adapted model that becomes this one of the result."""
        for path, copy in self._copies.items():
            if name.startswith(f"{path}."):
                return copy.state_dict(keep_vars=True)[name.removeprefix(f"{path}.")]
        return self._own.get(name)

    def _value(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if any(name.startswith(f"{path}.") for path in self._copies):
            source = self._source(name)
            assert source is not None
            return source.detach()
        return _read(self._plain, name, tensor) if tensor.is_meta else tensor.detach()

    def _merge(self, path: str) -> dict[str, torch.Tensor]:
        """Read, merge and check the weights of an adapted layer; returns them by their names."""
        layer = self._layers[path]
        inner = layer.get_base_layer()
        absent = {leaf: weight for leaf, weight in inner._parameters.items() if weight is not None}
        names = {leaf: f"{path}.{leaf}" for leaf in absent}
        for leaf, weight in absent.items():
            inner._parameters[leaf] = nn.Parameter(_read(self._lazy, names[leaf], weight), requires_grad=False)
        before = {leaf: inner._parameters[leaf].detach().clone() for leaf in absent}
        inputs = self._inputs(inner)
        expected = None if inputs is None else layer(inputs)
        parts = list(_nested(layer))
        for part in parts:
            leaf = getattr(part, "parameter_name", "weight")  # of LoRA on experts
            wanted = before[leaf].double() + part.get_delta_weight("default") if expected is None else None
            part.merge(safe_merge=True)  # peft raises for NaN in the result
            if wanted is not None:
                self._compare(inner._parameters[leaf], wanted, path, "fp32")
        if expected is not None:
            self._compare(inner(inputs), expected, path, "fp32")
        merged = {names[leaf]: inner._parameters[leaf].detach() for leaf in absent}
        for leaf, start in before.items():
            stored: Format = "fp32" if names[leaf] in self._kept else self._stored
            if any(getattr(part, "parameter_name", "weight") == leaf for part in parts):
                self.update.add(start, merged[names[leaf]], stored)
            inner._parameters[leaf].data = rounded(merged[names[leaf]], stored)
        if expected is not None:
            self.error = max(self.error, self._compare(inner(inputs), expected, path, self._stored))
        inner._parameters.update(absent)
        return merged

    def _inputs(self, inner: nn.Module) -> torch.Tensor | None:
        """Random inputs of a layer with one argument; None for another one."""
        if isinstance(inner, nn.Embedding):
            return torch.randint(inner.num_embeddings, (ROWS, TOKENS), generator=self._generator)
        if isinstance(inner, nn.Linear):
            return torch.randn(ROWS, TOKENS, inner.in_features, generator=self._generator)
        return None

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor, path: str, stored: Format) -> float:
        bound = forward_bound(stored, 0)
        return check_forward(actual.double(), expected.double(), stored, bound, f"output of {path}:")

    def _check_range(self, name: str, value: torch.Tensor) -> None:
        if name not in self._kept and value.is_floating_point() and value.numel():
            size = largest(value)
            if size > torch.finfo(torch_dtype(self._stored)).max:
                raise beyond_range(self._stored, {name: size})


def _read(lazy: LazyWeights, name: str, like: torch.Tensor) -> torch.Tensor:
    return lazy.read(name, torch.empty_like(like, device=CPU, memory_format=torch.contiguous_format))


def _nested(layer: Any) -> Iterator[Any]:
    """An adapted layer, and the adapters inside it: of experts each parameter has its own."""
    yield layer
    if isinstance(layer.base_layer, BaseTunerLayer):
        yield from _nested(layer.base_layer)
