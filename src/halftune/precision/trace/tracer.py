"""Runs a model under a plan's autocast and notes in which dtypes tensors arrive at attention and at the loss."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from halftune.precision.dtypes import torch_dtype
from halftune.precision.guard import computing_dtype, returned
from halftune.precision.plan import PrecisionPlan
from halftune.precision.rebind import EntryPoint, gated, installed, rebound
from halftune.precision.trace.cuda_rules import cuda_autocast_rules
from halftune.precision.trace.flash_sinks import SINKS
from halftune.precision.trace.recorder import Recorder
from halftune.precision.trace.steps import HALF, Step

_WITH_LAYERS = (".modeling_", "halftune.model.rwkv7.")  # modules that call functions of linear attention by name


@dataclass(frozen=True)
class Operand:
    """A tensor as it arrives at a site: its name there, dtype, shape, and what made it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    step: Step | None
    leaf: str


@dataclass(frozen=True)
class Arrival:
    """One call of a site.

    Attributes:
        target: ``attention``, ``rotary``, ``linear attention`` or ``loss``.
        site: path of the module that calls.
        function: what is called.
        phase: ``train``, ``chat`` …
        operands: those that share a dtype.
        dtype: what the call computes in; None where two half dtypes contradict each other.
        guarded: whether halftune's guard stands in front of this call.
    """

    target: str
    site: str
    function: str
    phase: str
    operands: tuple[Operand, ...]
    dtype: torch.dtype | None
    guarded: bool = True

    @property
    def strays(self) -> list[Operand]:
        """Operands in another dtype than the call computes in."""
        return [operand for operand in self.operands if operand.dtype is not self.dtype]


@dataclass
class Tracer:
    """Traces runs of one model.

    Args:
        precision: the plan's compute dtype and autocast.
        cuda_rules: CUDA's casting rules; False keeps the CPU's own.
        functions: functions of flash_attn that models call by hand; of its rotary helper; of linear layers.
    """

    precision: PrecisionPlan
    cuda_rules: bool = True
    functions: Sequence[EntryPoint] = ()
    rotary: Sequence[EntryPoint] = ()
    linear: Sequence[EntryPoint] = ()
    arrivals: list[Arrival] = field(default_factory=list)
    _phase: str = ""
    _recorder: Recorder | None = None
    _inside: bool = False  # a site's own work is no news

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """For transformers' attention interface: notes what arrives, casts as the guard does, attends without mask."""
        named = {"query": query, "key": key, "value": value}
        dtype = self._arrive("attention", "attention interface", named)
        with self._at_work():
            out = _attend(*(operand.to(dtype) for operand in named.values()))
            return returned((out, None), list(named.values()), dtype)

    @contextmanager
    def importing(self) -> Iterator[None]:
        """A model whose code is imported inside is seen wherever it keeps a function that it calls by hand."""
        entries = (*self.functions, *self.rotary)
        with gated({function: function for function in map(installed, entries) if function is not None}):
            yield

    @contextmanager
    def phase(self, name: str, model: nn.Module, *, grad: bool) -> Iterator[Recorder]:
        """What runs inside is traced as ``name``, under the plan's autocast."""
        with ExitStack() as stack:
            if self.cuda_rules:
                stack.enter_context(cuda_autocast_rules())
            stack.enter_context(gated(dict(self._by_hand())))
            stack.enter_context(rebound(dict(self._linear())))
            stack.enter_context(torch.set_grad_enabled(grad))
            half = self.precision.autocast.value
            dtype = torch_dtype(self.precision.compute.value)
            stack.enter_context(torch.autocast("cpu", enabled=half, dtype=dtype if half else None, cache_enabled=False))
            self._phase, self._recorder = name, Recorder(model, self._direct)
            yield stack.enter_context(self._recorder)

    def loss(self, logits: torch.Tensor) -> None:
        """Notes in which dtype logits arrive at the loss, which sums in fp32 whatever they are."""
        assert self._recorder is not None, "inside a phase"
        operand = Operand(
            "logits", logits.dtype, tuple(logits.shape), self._recorder.step_of(logits), self._recorder.leaf_of(logits)
        )
        self.arrivals.append(Arrival("loss", "", "cross-entropy", self._phase, (operand,), logits.dtype))

    def _arrive(
        self, target: str, function: str, operands: Mapping[str, torch.Tensor], *, guarded: bool = True
    ) -> torch.dtype:
        """Notes a call; returns what it computes in, the first operand's where two half dtypes contradict."""
        assert self._recorder is not None, "inside a phase"
        step_of, leaf_of = self._recorder.step_of, self._recorder.leaf_of
        named = [
            Operand(name, tensor.dtype, tuple(tensor.shape), step_of(tensor), leaf_of(tensor))
            for name, tensor in operands.items()
        ]
        tensors = list(operands.values())
        planned = torch_dtype(self.precision.compute.value)
        plain = target == "linear attention" and not any(tensor.dtype in HALF for tensor in tensors)
        if plain and not torch.is_autocast_enabled("cpu"):
            planned = torch.float32  # these are legal in fp32 throughout
        dtype = computing_dtype(tensors, planned)
        if target == "rotary":
            # The helper takes any dtype that x and the tables share. The guard gives the tables that of x; but where
            # they differ, it is the wide operand whose promotion tells why.
            alike = len({tensor.dtype for tensor in tensors}) == 1
            dtype = tensors[0].dtype if alike else next((t.dtype for t in tensors if t.dtype in HALF), tensors[0].dtype)
        self.arrivals.append(
            Arrival(target, self._recorder.module, function, self._phase, tuple(named), dtype, guarded)
        )
        return dtype or tensors[0].dtype

    def _direct(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A model's own call of scaled_dot_product_attention, which autocast brings into one dtype by itself."""
        if not self._inside and not torch.is_autocast_enabled("cpu"):
            named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
            operands = {name: named[name] for name in ("query", "key", "value")}
            self._arrive("attention", "scaled_dot_product_attention", operands, guarded=False)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _by_hand(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        for entries, target in ((self.functions, "attention"), (self.rotary, "rotary")):
            for entry in entries:
                function = installed(entry)
                if function is not None:
                    yield function, self._sink(target, entry, SINKS[entry.name])

    def _linear(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        for function, entry in _everywhere(self.linear):
            yield function, self._sink("linear attention", entry, function)

    def _sink(self, target: str, entry: EntryPoint, then: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(then)

        @functools.wraps(then)
        def sink(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            found = {name: bound.arguments.get(name) for name in entry.operands}
            operands = {name: operand for name, operand in found.items() if isinstance(operand, torch.Tensor)}
            dtype = self._arrive(target, entry.name, operands)
            with self._at_work():
                bound.arguments.update({name: operand.to(dtype) for name, operand in operands.items()})
                return then(*bound.args, **bound.kwargs)

        return sink


def _everywhere(entries: Iterable[EntryPoint]) -> Iterator[tuple[Callable[..., Any], EntryPoint]]:
    """Each distinct function that a loaded modeling module knows by an entry's name."""
    by_name = {entry.name: entry for entry in entries}
    seen: set[int] = set()
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        if not any(part in module.__name__ for part in _WITH_LAYERS):
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
