"""Lazy loading of weights: records where each is stored, so that a process reads only its shards.

transformers builds the model on the meta device and checks the checkpoint as usual. Meanwhile, the source tensors of
each weight are recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading

from halftune.config.facts.safetensors_headers import weight_files
from halftune.core.errors import ModelError
from halftune.precision.dtypes import plain_name

META = torch.device("meta")
CPU = torch.device("cpu")

_REQUIRED_API = {
    "core_model_loading.WeightTransform.add_tensor": "self target_key source_key source_pattern future",
    "core_model_loading.WeightConverter.convert": "self layer_name model config hf_quantizer loading_info",
    "PreTrainedModel._move_missing_keys_from_meta_to_device": "self missing_keys device_map device_mesh hf_quantizer",
    "PreTrainedModel.initialize_weights": "self",
}
"""Private functions of transformers and their parameters; unchanged from 5.6 to 5.23."""


def why_not() -> str:
    """Why lazy loading does not work with this transformers version; empty if it does."""
    for path, parameters in _REQUIRED_API.items():
        try:
            found = inspect.signature(attrgetter(path)(transformers)).parameters
        except AttributeError:
            return f"transformers {transformers.__version__} has no {path}"
        if " ".join(found) != parameters:
            return f"transformers {transformers.__version__} changed the signature of {path}"
    return ""


@dataclass(frozen=True)
class _Converted:
    """A weight that transformers merges from several tensors (experts), or slices from one.

    Attributes:
        by: the converter.
        first: the converter's name of the result.
        parts: (matching pattern, tensor name in the files).
    """

    by: core_model_loading.WeightConverter
    first: str
    parts: tuple[tuple[str, str], ...]

    def of_rows(self, rows: slice, count: int) -> tuple[tuple[str, str], ...] | None:
        """The parts of some rows out of ``count``; None if rows are not separate tensors."""
        stack, *rest = self.by.operations
        if not isinstance(stack, core_model_loading.MergeModulelist) or stack.dim != 0:
            return None
        if not all(isinstance(one, core_model_loading.Concatenate) and one.dim > 0 for one in rest):
            return None
        stacks: dict[str, list[tuple[str, str]]] = {}
        for part in self.parts:
            stacks.setdefault(part[0], []).append(part)
        if any(len(parts) != count for parts in stacks.values()):
            return None
        return tuple(chain.from_iterable(parts[rows] for parts in stacks.values()))


@dataclass
class LazyWeights:
    """The sources of a model's weights; filled by :func:`halftune.model.load.load.load_model`.

    Attributes:
        folder: folder of the checkpoint.
        model: the model before any adapter.
        check: called with the name and value of every weight that is read, before it is cast.
    """

    folder: Path = Path()
    model: PreTrainedModel | None = None
    check: Callable[[str, torch.Tensor], None] = lambda name, tensor: None
    _places: dict[str, str | _Converted] = field(default_factory=dict)
    _files: dict[str, Any] = field(default_factory=dict)
    _found: frozenset[str] = frozenset()
    _loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    _newest: tuple[tuple[tuple[str, str], ...], dict[str, torch.Tensor]] | None = None

    @contextmanager
    def recording(self, folder: Path) -> Iterator[None]:
        """Inside, records what ``from_pretrained`` reads for each weight."""
        self.folder = folder
        parts: dict[int, list[tuple[str, str]]] = {}
        transform: Any = core_model_loading.WeightTransform
        converter: Any = core_model_loading.WeightConverter
        add, convert = transform.add_tensor, converter.convert

        def adding(mapping: Any, target: str, source: str, pattern: str, tensor: Any) -> None:
            if isinstance(mapping, converter):
                parts.setdefault(id(mapping), []).append((pattern, source))
            else:
                self._places.setdefault(target, source)  # of duplicate names transformers uses the first
            add(mapping, target, source, pattern, tensor)

        def converting(mapping: Any, first: str, *rest: Any, **options: Any) -> dict[str, Any]:
            made = convert(mapping, first, *rest, **options)
            if id(mapping) in parts:
                self._places |= dict.fromkeys(made, _Converted(mapping, first, tuple(parts[id(mapping)])))
            return made

        transform.add_tensor, converter.convert = adding, converting
        try:
            yield
        finally:
            transform.add_tensor, converter.convert = add, convert

    def materialise_buffers(self, model: PreTrainedModel) -> None:
        """Load or compute all buffers; they are small and not sharded.

        A module may compute buffers of another, so all modules are reinitialised; weights are not touched.
        """
        self.model = model
        self._loaded = {name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)}
        model._move_missing_keys_from_meta_to_device(set(), None, None, None)  # pyright: ignore[reportArgumentType]
        for module in model.modules():
            module._is_hf_initialized = False  # pyright: ignore[reportArgumentType]
        model.initialize_weights()
        with self.opened():
            self._found = frozenset(self._files)
            for name, buffer in list(model.named_buffers()):
                if buffer.is_meta and self.knows(name):
                    parent, _, leaf = name.rpartition(".")
                    setattr(model.get_submodule(parent), leaf, self.read(name, torch.empty_like(buffer, device=CPU)))

    def sources(self, names: Iterable[str]) -> set[str]:
        """Names in the files of the source tensors of some weights."""
        places = [self._places[name] for name in names if name in self._places]
        return {one for place in places for one in ([place] if isinstance(place, str) else dict(place.parts).values())}

    def lacks(self, model: nn.Module) -> str:
        """Name of the first meta tensor that is not in the files either; empty if there is none."""
        known = {id(one) for name, one in model.named_parameters(remove_duplicate=False) if self.knows(name)}
        tensors = (*model.named_parameters(), *model.named_buffers())
        return next((name for name, one in tensors if one.is_meta and id(one) not in known), "")

    def knows(self, name: str) -> bool:
        """Whether a weight is in the files, by its own name or peft's."""
        place = self._places.get(plain_name(name))
        sources = [place] if isinstance(place, str) else [source for _, source in place.parts] if place else []
        return bool(sources) and self._found.issuperset(sources)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the files for :meth:`read`.

        Raises:
            ModelError: a file cannot be read.
        """
        try:
            with ExitStack() as stack:
                for path in weight_files(self.folder):
                    file = stack.enter_context(safe_open(path, "pt"))
                    self._files |= dict.fromkeys(file.keys(), file)
                yield
        except (OSError, ValueError, LookupError, SafetensorError) as error:
            what = f"cannot read the weights: {error}"
            raise ModelError(what, where=str(self.folder), code="core.file_damaged") from error
        finally:
            self._files.clear()
            self._newest = None

    def read(self, name: str, into: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Read a weight, or rows from ``first`` on, into ``into`` and return it.

        Reads only these rows; of experts in separate tensors, only their experts. Other converted weights are read
        completely.

        Raises:
            ValueError: the shape changed since the model was built.
        """
        plain = plain_name(name)
        place, loaded = self._places[plain], self._loaded.get(plain, into)
        rows = slice(None) if first is None else slice(first, first + into.shape[0])
        if not into.numel():
            return into
        if isinstance(place, _Converted):
            found = self._made(place, plain, loaded, rows)
        else:
            found = self._files[place].get_slice(place)
            found = found[rows] if found.get_shape() else self._files[place].get_tensor(place)
        if found.shape != into.shape:  # the files were rewritten
            raise ValueError(f"shape of {name} changed from {tuple(into.shape)} to {tuple(found.shape)}")
        self.check(plain, found)
        # An fp32 copy for training starts from the values in the model's dtype.
        return into.copy_(found if into.dtype == loaded.dtype else found.to(loaded.dtype))

    def _made(self, place: _Converted, name: str, loaded: torch.Tensor, rows: slice) -> torch.Tensor:
        """Rows of a converted weight; the result of the last conversion is cached."""
        parts = place.of_rows(rows, loaded.shape[0])
        if parts is None:
            parts, wanted = place.parts, rows
        else:
            wanted = slice(None)
        if self._newest is None or self._newest[0] != parts:
            self._newest = None  # the one before goes first
            for pattern, source in parts:
                tensor = self._files[source].get_tensor(source).to(loaded.dtype)
                place.by.add_tensor(place.first, source, pattern, tensor)  # pyright: ignore[reportArgumentType]
            made = place.by.convert(place.first, model=self.model, config=getattr(self.model, "config", None))
            flat = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
            self._newest = parts, flat
        return self._newest[1][name][wanted]
