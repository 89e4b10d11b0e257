"""Runs a model under a plan's autocast and records the dtypes of operands at attention and at the loss."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from halftune.precision import PrecisionPlan
from halftune.precision.dtypes import torch_dtype
from halftune.precision.guard import computing_dtype, returned
from halftune.precision.rebind import EntryPoint, Scope, fla_operators, installed
from halftune.precision.record.recorder import Recorder
from halftune.precision.record.remote_files import written_in
from halftune.precision.record.steps import HALF, Step, first_promotion, shown
from halftune.precision.trace.cuda_rules import cuda_autocast_rules
from halftune.precision.trace.flash_stubs import STUBS
from halftune.precision.trace.manual_attention import find_manual_attention

_WITH_LAYERS = (".modeling_", "halftune.model.rwkv7.")  # modules that call functions of linear attention by name


@dataclass(frozen=True)
class Operand:
    """An operand of a traced call: name, dtype, shape, the call that created it, and whether it has a gradient."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    step: Step | None
    leaf: str
    grad: bool = False


@dataclass(frozen=True)
class Arrival:
    """A traced call.

    Attributes:
        target: ``attention``, ``rotary``, ``linear attention`` or ``loss``.
        site: path of the module that calls.
        function: what is called.
        phase: ``train``, ``chat`` …
        operands: those that share a dtype.
        dtype: what the call computes in; None where two half dtypes contradict each other.
        guarded: whether halftune's guard stands in front of this call.
        settled: why an operand in another dtype breaks nothing; empty where it does.
    """

    target: str
    site: str
    function: str
    phase: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype | None
    guarded: bool = True
    settled: str = ""

    @property
    def strays(self) -> list[Operand]:
        """Operands with another dtype than the call's compute dtype."""
        return [operand for operand in self.operands if operand.dtype is not self.dtype]


@dataclass
class Tracer:
    """Traces runs of one model.

    Args:
        precision: the plan's compute dtype and autocast.
        cuda_rules: CUDA's casting rules; False keeps the CPU's own.
        functions: functions of flash_attn that models call directly; of its rotary helper; of linear layers.
    """

    precision: PrecisionPlan
    cuda_rules: bool = True
    functions: Sequence[EntryPoint] = ()
    rotary: Sequence[EntryPoint] = ()
    linear: Sequence[EntryPoint] = ()
    arrivals: list[Arrival] = field(default_factory=list)
    _phase: str = ""
    _recorder: Recorder | None = None
    _inside: bool = False  # inside a traced call, nested calls are ignored
    _backward: bool = False  # recomputation in backward is ignored

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention function for transformers' interface: records operands, casts like the guard, ignores masks."""
        named = {"query": query, "key": key, "value": value}
        dtype = self._arrive("attention", "attention interface", named)
        with self._inside_site():
            out = _attend(*(operand.to(dtype) for operand in named.values()))
            return returned((out, None), list(named.values()), dtype)

    def importing(self) -> Scope:
        """Inside, remote code is imported, so that its references to attention functions can be traced."""
        entries = (*self.functions, *self.rotary)
        return Scope({function: function for function in map(installed, entries) if function is not None})

    @contextmanager
    def phase(self, name: str, model: nn.Module, *, grad: bool) -> Iterator[Recorder]:
        """Inside, calls are traced as phase ``name``, under the plan's autocast."""
        with ExitStack() as stack:
            if self.cuda_rules:
                stack.enter_context(cuda_autocast_rules())
            stack.enter_context(Scope(dict((*self._imported(), *self._linear()))))
            stack.enter_context(torch.set_grad_enabled(grad))
            half = self.precision.autocast.value
            dtype = torch_dtype(self.precision.compute.value)
            stack.enter_context(torch.autocast("cpu", enabled=half, dtype=dtype if half else None, cache_enabled=False))
            self._phase, self._backward = name, False
            self._recorder = Recorder(model, self._on_torch_attention, self._on_step)
            yield stack.enter_context(self._recorder)

    def refusal(self, folder: str) -> str:
        """Describe the mixed dtypes of the call that raised, with the promoting lines.

        Args:
            folder: the model as the recipe names it.
        """
        refused = self._recorder.refused if self._recorder is not None else ()
        if len({source.dtype for source in refused}) < 2:
            return ""
        firsts = [first_promotion(each.step) for each in refused if each.dtype not in HALF and each.step is not None]
        said = (
            f"{shown(each.dtype)} since {written_in(each.place.file, folder)}:{each.place.line}: {each.formula()}, "
            f"{each.cause()}"
            for each in firsts
        )
        return "; ".join(dict.fromkeys(said))

    def loss(self, logits: torch.Tensor) -> None:
        """Record the dtype of the logits at the loss, which sums in fp32; backward follows."""
        assert self._recorder is not None, "inside a phase"
        operand = self._operand("logits", logits)
        self.arrivals.append(Arrival("loss", "", "cross-entropy", self._phase, (operand,), logits.dtype))
        self._backward = True

    def _arrive(self, target: str, function: str, operands: Mapping[str, torch.Tensor]) -> torch.dtype:
        """Record a call; returns its compute dtype (the first operand's if two half dtypes conflict)."""
        assert self._recorder is not None, "inside a phase"
        named = [self._operand(name, tensor) for name, tensor in operands.items()]
        tensors = list(operands.values())
        planned = torch_dtype(self.precision.compute.value)
        plain = target == "linear attention" and not any(tensor.dtype in HALF for tensor in tensors)
        if plain and not torch.is_autocast_enabled("cpu"):
            planned = torch.float32  # these may be all fp32
        dtype = _rotary_dtype(tensors) if target == "rotary" else computing_dtype(tensors, planned)
        self._note(Arrival(target, self._recorder.module, function, self._phase, tuple(named), dtype))
        return dtype or tensors[0].dtype

    def _on_torch_attention(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Record a model's own call of torch's attention."""
        if self._inside:
            return
        named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        operands = {name: self._operand(name, named[name]) for name in ("query", "key", "value")}
        if function is nn.functional.scaled_dot_product_attention:
            dtypes = {operand.dtype for operand in operands.values()}
            self._note_unguarded(function.__name__, operands, contradict=len(dtypes) > 1)
        else:  # its projections cast their inputs
            (first, *_), phase = operands.values(), self._phase
            every = tuple(replace(operand, dtype=first.dtype) for operand in operands.values())
            site = self._recorder.module if self._recorder is not None else ""
            self._note(Arrival("attention", site, "multi-head attention", phase, every, first.dtype, False))

    def _on_step(self, step: Step) -> None:
        """Record a call that ends attention written in the model's own code."""
        found = find_manual_attention(step) if not self._inside else None
        if found is not None:
            sources = found.operands.items()
            operands = {name: Operand(name, each.dtype, (), each.step, each.leaf) for name, each in sources}
            elements = found.by_elements
            self._note_unguarded("softmax of a product", operands, contradict=found.contradict, as_written=elements)

    def _note_unguarded(
        self, function: str, operands: Mapping[str, Operand], *, contradict: bool, as_written: bool = False
    ) -> None:
        """Record attention outside the guard, which needs one dtype unless autocast casts it."""
        assert self._recorder is not None, "inside a phase"
        on = torch.is_autocast_enabled("cpu") and not as_written
        dtype = torch.get_autocast_dtype("cpu") if on else torch_dtype(self.precision.compute.value)
        settled = (
            "autocast casts it at this call" if on else "" if contradict else "the call computes in it, as written"
        )
        every = tuple(operands.values())
        self._note(Arrival("attention", self._recorder.module, function, self._phase, every, dtype, False, settled))

    def _note(self, arrival: Arrival) -> None:
        if not self._backward:
            self.arrivals.append(arrival)

    def _operand(self, name: str, tensor: torch.Tensor) -> Operand:
        assert self._recorder is not None, "inside a phase"
        step, leaf = self._recorder.step_of(tensor), self._recorder.leaf_of(tensor)
        return Operand(name, tensor.dtype, tuple(tensor.shape), step, leaf, tensor.requires_grad)

    @contextmanager
    def _inside_site(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _imported(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        for entries, target in ((self.functions, "attention"), (self.rotary, "rotary")):
            for entry in entries:
                function = installed(entry)
                if function is not None:
                    yield function, self._sink(target, entry, STUBS[entry.name])

    def _linear(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        for function, entry in _everywhere(self.linear):
            yield function, self._sink("linear attention", entry, function)
        for function, operands in fla_operators() if self.linear else ():
            entry = _Operator(function.__module__, function.__name__, operands)
            yield function, self._sink("linear attention", entry, function)

    def _sink(self, target: str, entry: EntryPoint, then: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(then)

        @functools.wraps(then)
        def sink(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return then(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            found = {name: bound.arguments.get(name) for name in entry.operands}
            operands = {name: operand for name, operand in found.items() if isinstance(operand, torch.Tensor)}
            dtype = self._arrive(target, entry.name, operands)
            with self._inside_site():
                bound.arguments.update({name: operand.to(dtype) for name, operand in operands.items()})
                return then(*bound.args, **bound.kwargs)

        return sink


@dataclass(frozen=True)
class _Operator:
    """An ``EntryPoint`` found in a loaded module."""

    module: str
    name: str
    operands: tuple[str, ...]


def _rotary_dtype(operands: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of x and the tables, or the half dtype among them.

    The function requires that they share one. The guard casts the tables to that of x; the cause of a difference is the
    promotion of the wider operand.
    """
    x = operands[0].dtype
    alike = len({operand.dtype for operand in operands}) == 1
    return x if alike else next((operand.dtype for operand in operands if operand.dtype in HALF), x)


def _everywhere(entries: Iterable[EntryPoint]) -> Iterator[tuple[Callable[..., Any], EntryPoint]]:
    """Yield each distinct function of an entry's name in loaded modeling modules."""
    by_name = {entry.name: entry for entry in entries}
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or not any(part in module.__name__ for part in _WITH_LAYERS):
            continue
        for name in by_name.keys() & vars(module).keys():
            function = vars(module)[name]
            if inspect.isfunction(function) and id(function) not in seen:
                seen.add(id(function))
                if set(by_name[name].operands) <= set(inspect.signature(function).parameters):
                    yield function, by_name[name]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[B, H, T, D]``, ``[B, G, S, D]``, ``[B, G, S, E]`` → ``[B, T, H, E]``."""
    out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()
