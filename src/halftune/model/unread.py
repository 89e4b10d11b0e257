"""A model whose weights are still in its files: where each is, so that a process reads the rows that it holds.

transformers makes the model and checks the checkpoint as always, on torch's meta device, where tensors have a shape and
a format and no numbers. What it would have read for each weight is written down meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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

_LEANT_ON = {
    "core_model_loading.WeightTransform.add_tensor": "self target_key source_key source_pattern future",
    "core_model_loading.WeightConverter.convert": "self layer_name model config hf_quantizer loading_info",
    "PreTrainedModel._move_missing_keys_from_meta_to_device": "self missing_keys device_map device_mesh hf_quantizer",
    "PreTrainedModel.initialize_weights": "self",
}
"""What transformers does not promise: functions with their parameters, the same from 5.6 to 5.23."""


def why_not() -> str:
    """Why this transformers version cannot leave weights in their files, as a sentence; empty where it can."""
    for path, parameters in _LEANT_ON.items():
        try:
            found = inspect.signature(attrgetter(path)(transformers)).parameters
        except AttributeError:
            return f"transformers {transformers.__version__} has no {path}"
        if " ".join(found) != parameters:
            return f"transformers {transformers.__version__} calls {path} in another way"
    return ""


@dataclass(frozen=True)
class _Made:
    """A weight that transformers puts together from several tensors (experts), or cuts out of one.

    Attributes:
        by: what does so.
        first: the name by which it knows the result.
        parts: (pattern that matched, tensor's name in the files).
    """

    by: core_model_loading.WeightConverter
    first: str
    parts: tuple[tuple[str, str], ...]

    def of_rows(self, rows: slice, count: int) -> tuple[tuple[str, str], ...] | None:
        """The parts that some rows of ``count`` are made of; None where a row is not made of tensors of its own."""
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
        return tuple(part for parts in stacks.values() for part in parts[rows])


@dataclass
class Unread:
    """Where a model's weights are; empty until :func:`halftune.model.load.load_model` has filled it.

    Attributes:
        folder: of the checkpoint.
        model: as it was made, before any adapter.
        check: asked for every weight that is read, by its name, before it is cast.
    """

    folder: Path = Path()
    model: PreTrainedModel | None = None
    check: Callable[[str, torch.Tensor], None] = lambda name, tensor: None
    _places: dict[str, str | _Made] = field(default_factory=dict)
    _files: dict[str, Any] = field(default_factory=dict)
    _found: frozenset[str] = frozenset()
    _loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    _newest: tuple[tuple[tuple[str, str], ...], dict[str, torch.Tensor]] | None = None

    @contextmanager
    def recording(self, folder: Path) -> Iterator[None]:
        """Inside, what ``from_pretrained`` reads for each weight is written down."""
        self.folder = folder
        parts: dict[int, list[tuple[str, str]]] = {}
        transform: Any = core_model_loading.WeightTransform
        converter: Any = core_model_loading.WeightConverter
        add, convert = transform.add_tensor, converter.convert

        def adding(mapping: Any, target: str, source: str, pattern: str, tensor: Any) -> None:
            if isinstance(mapping, converter):
                parts.setdefault(id(mapping), []).append((pattern, source))
            else:
                self._places.setdefault(target, source)  # where files hold two of a name, transformers takes the first
            add(mapping, target, source, pattern, tensor)

        def converting(mapping: Any, first: str, *rest: Any, **options: Any) -> dict[str, Any]:
            made = convert(mapping, first, *rest, **options)
            if id(mapping) in parts:
                self._places |= dict.fromkeys(made, _Made(mapping, first, tuple(parts[id(mapping)])))
            return made

        transform.add_tensor, converter.convert = adding, converting
        try:
            yield
        finally:
            transform.add_tensor, converter.convert = add, convert

    def give_buffers(self, model: PreTrainedModel) -> None:
        """Gives buffers their numbers: they are small, and none is shared. Computed ones (rotary tables) as always.

        A module may compute what another one holds, so all are asked to begin anew; weights stay where they are.
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
        """Names in the files of all tensors that some weights come from."""
        places = [self._places[name] for name in names if name in self._places]
        return {one for place in places for one in ([place] if isinstance(place, str) else dict(place.parts).values())}

    def lacks(self, model: nn.Module) -> str:
        """Name of a tensor without numbers that the files do not hold under its name either; empty where none is."""
        known = {id(one) for name, one in model.named_parameters(remove_duplicate=False) if self.knows(name)}
        tensors = (*model.named_parameters(), *model.named_buffers())
        return next((name for name, one in tensors if one.is_meta and id(one) not in known), "")

    def knows(self, name: str) -> bool:
        """Whether a weight, under its own name or as peft calls it, is in the files."""
        place = self._places.get(plain_name(name))
        sources = [place] if isinstance(place, str) else [source for _, source in place.parts] if place else []
        return bool(sources) and self._found.issuperset(sources)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, :meth:`read` may be called.

        Raises:
            ModelError: a file cannot be read any more.
        """
        try:
            with ExitStack() as stack:
                for path in weight_files(self.folder):
                    file = stack.enter_context(safe_open(path, "pt"))
                    self._files |= dict.fromkeys(file.keys(), file)
                yield
        except (OSError, ValueError, LookupError, SafetensorError) as error:
            raise ModelError(f"the weights cannot be read: {error}", where=str(self.folder)) from error
        finally:
            self._files.clear()
            self._newest = None

    def read(self, name: str, into: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Reads a weight, or its rows from ``first`` on, into a tensor of that shape and returns it.

        Nothing else is read: of experts that lie apart, those in these rows. Only what is put together in another way
        is read whole and let go.

        Raises:
            ValueError: it has another shape than when the model was made.
        """
        plain = plain_name(name)
        place, loaded = self._places[plain], self._loaded.get(plain, into)
        rows = slice(None) if first is None else slice(first, first + into.shape[0])
        if not into.numel():
            return into
        if isinstance(place, _Made):
            found = self._made(place, plain, loaded, rows)
        else:
            found = self._files[place].get_slice(place)
            found = found[rows] if found.get_shape() else self._files[place].get_tensor(place)
        if found.shape != into.shape:  # somebody has written the files anew
            raise ValueError(f"{name} is {tuple(found.shape)} now, and was {tuple(into.shape)}")
        self.check(plain, found)
        # A copy that is trained in fp32 begins with what the model computes with.
        return into.copy_(found if into.dtype == loaded.dtype else found.to(loaded.dtype))

    def _made(self, place: _Made, name: str, loaded: torch.Tensor, rows: slice) -> torch.Tensor:
        """Rows of what comes of putting together; all that does is kept until something else is asked for."""
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
