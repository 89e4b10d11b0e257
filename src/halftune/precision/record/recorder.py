"""Records every torch call in a model's source: inputs, output, module and line.

It stands above autocast: one record per call as the author wrote it, ``F.normalize`` and not the five operations that
it is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._functorch import vmap
from torch.overrides import TorchFunctionMode

from halftune.precision.dtypes import plain_name
from halftune.precision.record.steps import Place, Source, Step, spelled

_STEP = "halftune_step"  # attribute of a tensor: the call that created it
_TORCH = str(Path(torch.__file__).parent)
_OURS = Path(__file__).parents[1]
_OUTSIDE = (_TORCH, str(_OURS / "record"), str(_OURS / "trace"), "<")
# torch's attention functions; the second and third include projections.
_ATTENTION = (
    nn.functional.scaled_dot_product_attention,
    nn.functional.multi_head_attention_forward,
    vars(torch)["_native_multi_head_attention"],
)


class Recorder(TorchFunctionMode):
    """A mode, entered around the model's run.

    Args:
        model: names its parameters, buffers and modules.
        on_attention: called with function and arguments of every call of torch's own attention before it runs.
        on_step: called with every record of a call with a single result.
    """

    def __init__(
        self,
        model: nn.Module,
        on_attention: Callable[[Any, Any, Mapping[str, Any]], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.on_attention, self.on_step = model, on_attention, on_step
        self.count = 0
        self.refused: tuple[Source, ...] = ()  # operands of the last call that raised
        self._leaves: dict[int, str] = {}
        self._stack: list[str] = []
        self._hooks = ExitStack()
        self._autocast = False  # whether autocast is enabled around the model

    def __enter__(self) -> Recorder:
        first = next(self.model.parameters(), None)
        kind = "cpu" if first is None else first.device.type
        self._autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        for kind, named in (("parameter", self.model.named_parameters), ("buffer", self.model.named_buffers)):
            for name, tensor in named(remove_duplicate=False):
                self._leaves.setdefault(id(tensor), f"{kind} {plain_name(name)}")
        for name, module in self.model.named_modules():
            self._hooks.callback(module.register_forward_pre_hook(self._enter_module(name), prepend=True).remove)
            self._hooks.callback(module.register_forward_hook(self._leave_module(), always_call=True).remove)
        self._hooks.enter_context(_records_through_vmap())
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()
        self._leaves.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on_attention is not None and func in _ATTENTION:
            self.on_attention(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            self.refused = tuple(self._source(tensor) for tensor in _floating((args, kwargs)))
            raise
        made = list(_floating(args[0] if _name(func) == "__setitem__" else result))
        if made:
            self._record(func, made, args, kwargs)
        return result

    @property
    def module(self) -> str:
        """Path of the running module; empty outside."""
        return self._stack[-1] if self._stack else ""

    def step_of(self, tensor: torch.Tensor) -> Step | None:
        """Return the call that created a tensor, or None."""
        return step_made_by(tensor)

    def leaf_of(self, tensor: torch.Tensor) -> str:
        """Return ``parameter …`` or ``buffer …`` with its name, or an empty string."""
        return self._leaves.get(id(tensor), "")

    def _source(self, tensor: torch.Tensor) -> Source:
        return Source(tensor.dtype, tensor.ndim == 0, self.step_of(tensor), self.leaf_of(tensor))

    def _record(self, func: Any, made: list[torch.Tensor], args: Any, kwargs: Mapping[str, Any]) -> None:
        # Operands still have their records: in-place operations update the record of their result below.
        sources = tuple(self._source(tensor) for tensor in _floating((args, kwargs)))
        name = _name(func)
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "attribute")
        place, kind = calling_line(sys._getframe(2)), made[0].device.type
        autocast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
        asked = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        for tensor in made:
            step = Step(
                self.count,
                spelled(name),
                sources,
                tensor.dtype,
                place,
                self.module,
                asked and bool(sources),
                autocast,
                self._autocast and autocast is None,
            )
            setattr(tensor, _STEP, step)
            if self.on_step is not None and len(made) == 1:
                self.on_step(step)
        self.count += 1

    def _enter_module(self, name: str) -> Any:
        return lambda _module, _args: self._stack.append(name)

    def _leave_module(self) -> Any:
        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if self._stack:
                self._stack.pop()

        return leave


def only_records(hook: Callable[..., Any]) -> bool:
    """Whether a module's hook is a recorder's."""
    return hook.__module__ == __name__


def recorded(module: nn.Module) -> bool:
    """Whether a recorder is attached to a module."""
    return any(map(only_records, module._forward_hooks.values()))


def step_made_by(tensor: torch.Tensor) -> Step | None:
    """Return the call that created a tensor; None if it was not recorded."""
    return vars(tensor).get(_STEP) if hasattr(tensor, "__dict__") else None


def copy_record(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Copy the record of ``like``, computed by the model's own code, to ``tensor``."""
    set_record(tensor, step_made_by(like))


def set_record(tensor: torch.Tensor, step: Step | None) -> None:
    """Set the call that created a tensor."""
    if step is not None:
        setattr(tensor, _STEP, step)


@contextmanager
def _records_through_vmap() -> Iterator[None]:
    """Inside, inputs and outputs of ``torch.vmap`` keep their records, which the mode does not see."""

    def copying(convert: Callable[..., Any], at: int) -> Callable[..., Any]:
        def converted(*args: Any) -> Any:
            result = convert(*args)
            if isinstance(result, torch.Tensor) and isinstance(args[at], torch.Tensor):
                copy_record(result, args[at])
            return result

        return converted

    before = {name: vars(vmap)[name] for name in ("_add_batch_dim", "_maybe_remove_batch_dim")}
    for at, (name, convert) in enumerate(before.items()):  # the tensor is the first argument, and the second
        setattr(vmap, name, copying(convert, at))
    try:
        yield
    finally:
        for name, convert in before.items():
            setattr(vmap, name, convert)


def calling_line(frame: FrameType | None) -> Place:
    """The innermost line outside torch and the trace, from ``frame`` outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_OUTSIDE):
        frame = frame.f_back
    if frame is None:
        return Place("?", 0, "")
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _floating(value: Any) -> Iterator[torch.Tensor]:
    """Whether a tensor is floating or complex (rotary embeddings of some models)."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _floating(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _floating(entry)
