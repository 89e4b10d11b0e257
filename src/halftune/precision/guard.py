"""Enforces the plan's number format at every attention call: other operands are cast and counted, or refused."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from halftune.core.choice import Format
from halftune.core.errors import DtypeContractError
from halftune.core.log import get_logger
from halftune.precision.dtypes import plain_name, torch_dtype
from halftune.precision.in_graph import OF_A_GRAPH, note, number_of
from halftune.precision.record.recorder import Recorder, copy_record
from halftune.precision.record.remote_files import written_in
from halftune.precision.record.steps import first_promotion, shown

log = get_logger(__name__)

Mode = Literal["cast", "strict", "off"]
F = TypeVar("F", bound=Callable[..., Any])
_LAYER = re.compile(r"\.\d+(?=\.)")
_HALF = (torch.bfloat16, torch.float16)
_OPERANDS = (("query", "q"), ("key", "k"), ("value", "v"))


@dataclass
class Site:
    """A call site whose operands had another dtype than the compute dtype.

    Attributes:
        casts: calls in which at least one operand was cast; in compiled code, graphs. Recomputation under gradient
            checkpointing counts again.
        arrived: the operands of the first call, e.g. ``query fp32, key fp32, value bf16``.
        cast_to: the dtype they were cast to.
        promoted: the source line and call that first left the compute dtype, per operand if they differ; empty if
            unknown.
    """

    casts: int
    arrived: str
    cast_to: str
    promoted: str = ""


class Guard:
    """Wraps attention functions.

    The compute dtype of a call is the autocast dtype if autocast is enabled, else the one half dtype among the
    operands, else the plan's compute dtype. Operands with this dtype are not changed.

    Args:
        mode: ``cast`` casts and logs the first cast at each site; ``strict`` raises instead; ``off`` does nothing.
        compute: the plan's compute format.
    """

    def __init__(self, mode: Mode, compute: Format) -> None:
        self.mode, self.compute = mode, compute
        self._dtype = torch_dtype(compute)
        self._sites: dict[str, Site] = {}
        self._logged: set[tuple[str, str, str]] = set()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._recorder: Recorder | None = None
        self._watched: Callable[[], nn.Module | None] | None = None  # until a recording is requested
        self._pending = False  # the watched model's next forward pass will be recorded
        self._unreported: dict[str, str] = {}  # site → kind of call, for sites that wait for the recording
        self._probing = False
        self._folder = ""  # name_or_path of the model, for source locations
        self._refused: DtypeContractError | None = None
        self._number = number_of(self)

    def watch(self, model: nn.Module) -> None:
        """Use a model's module paths as names of sites, and record a forward pass if there are casts.

        After the first cast, the model's next forward pass is recorded to find the line that promoted the operand. In
        ``strict`` mode, which has no next pass, the first one is recorded.
        """
        self._paths.update({module: plain_name(name) for name, module in model.named_modules() if name})
        named = (vars(module)["name_or_path"] for module in model.modules() if "name_or_path" in vars(module))
        self._folder = next(named, "")
        if self.mode != "off":
            self._watched = weakref.ref(model)
        if self.mode == "strict":
            self._record_next()

    @contextmanager
    def probe_pass(self) -> Iterator[None]:
        """Inside, operands are cast without being counted or refused, for a pass that only inspects a model."""
        self._probing = True
        try:
            yield
        finally:
            self._probing = False

    def _record_next(self) -> bool:
        """Record the next forward pass, once; return whether a recording is pending."""
        model = self._watched() if self._watched is not None else None
        self._watched = None
        if model is not None and model._compiled_call_impl is None:  # a compiled graph would be recompiled
            self._record_once(model)
        return self._pending

    def _record_once(self, model: nn.Module) -> None:
        """Record the next call of ``model.forward``."""
        forward: Callable[..., Any] = model.forward
        before = {name: value for name, value in vars(model).items() if name == "forward"}
        self._pending = True

        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if vars(model).get("forward") is recorded:
                del model.forward  # the class's, or what the instance had
                model.__dict__.update(before)
            if self._recorder is not None or torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            try:
                self._pending = False
                with _run_eagerly(), Recorder(model) as self._recorder:
                    return forward(*args, **kwargs)
            finally:
                self._recorder = None

        model.forward = recorded

    def attention(self, fn: F, operands: Sequence[str] | None = None) -> F:
        """Wrap ``fn`` with the guard; the signature does not change.

        ``fn`` takes query, key and value (or q, k and v), or the parameters in ``operands`` (``q, kv``), by position or
        by name, and returns the output, or a tuple that begins with it. A first parameter ``module`` names the site.

        The output keeps the compute dtype. Only without autocast, and if no operand had the compute dtype, is it cast
        to the query's dtype, since then the surrounding layers do not use the compute dtype either.

        Raises, when called:
            DtypeContractError: two half dtypes among the operands without autocast; in ``strict`` mode, any cast.
        """
        spellings = _OPERANDS if operands is None else tuple((name,) for name in operands)
        return self._wrap(fn, spellings, "attention", lambda operands: computing_dtype(operands, self._dtype))

    def operator(self, fn: F, operands: Sequence[str] = ("q", "k", "v")) -> F:
        """Wrap a linear-attention function: the named operands must share one half dtype.

        Decays and states keep their dtypes. All fp32 without autocast is allowed. An operand may combine several
        (``qkv``).

        Raises, when called:
            DtypeContractError: as ``attention``.
        """
        spellings = tuple((name,) for name in operands)
        return self._wrap(fn, spellings, "linear attention", lambda found: computing_dtype(found, torch.float32))

    def rotary(self, fn: F) -> F:
        """Wrap ``fn(x, cos, sin, …)``: the tables are cast to the dtype of ``x``, so that ``x`` keeps it."""
        return self._wrap(fn, (("x",), ("cos",), ("sin",)), "rotary", lambda operands: operands[0].dtype)

    def note_cast(self, fn: Callable[..., Any], operands: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Count a cast of operands of ``fn`` to ``dtype``, which the caller performs.

        Raises:
            DtypeContractError: in ``strict`` mode.
        """
        self._handle_cast(self._site(fn, None), "attention", operands, dtype)

    def refuse_caches(self, fn: Callable[..., Any], operands: dict[str, torch.Tensor]) -> None:
        """Raise the error for a call whose caches cannot be cast.

        Raises:
            DtypeContractError: always.
        """
        arrived = ", ".join(f"{name} {shown(operand.dtype)}" for name, operand in operands.items())
        what = f"{fn.__name__} got {arrived}: caches are written in place and cannot be cast"
        remedy = f"allocate both caches in {self.compute} in the model's code"
        raise self._refusal(what, self._site(fn, None), remedy, code="precision.cache_dtype")

    def _wrap(
        self,
        fn: F,
        spellings: Sequence[tuple[str, ...]],
        target: str,
        dtype_of: Callable[[list[torch.Tensor]], torch.dtype | None],
    ) -> F:
        if self.mode == "off":
            return fn
        names = list(inspect.signature(fn).parameters)
        places = tuple(_place(names, spelling) for spelling in spellings)
        named_first = [spelling[0] for spelling in spellings]
        has_module = names[0] == "module"

        @functools.wraps(fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            operands = [args[at] if at < len(args) else kwargs[name] for at, name in places]
            dtype = dtype_of(operands)
            if dtype is not None and all(operand.dtype is dtype for operand in operands):
                return fn(*args, **kwargs)
            site = self._site(fn, args[0] if has_module and args else kwargs.get("module"))
            named = dict(zip(named_first, operands, strict=True))
            dtype = self._handle_cast(site, target, named, dtype)
            cast = [operand.to(dtype) for operand in operands]
            result = fn(*_with_operands(args, kwargs, places, cast), **kwargs)
            return result if target == "rotary" else returned(result, operands, dtype)

        return guarded  # type: ignore[return-value]

    @property
    def casts(self) -> int:
        """Number of calls in which at least one operand was cast."""
        return sum(site.casts for site in self._sites.values())

    def report(self) -> dict[str, Any]:
        """Return counters as JSON data: mode, compute, number of casts, one entry per site.

        Sites that still wait for their promoting line are logged without it.
        """
        for name, target in self._unreported.items():
            self._log_site(name, target)
        self._unreported.clear()
        sites = [{"site": name, **vars(site)} for name, site in self._sites.items()]
        return {"mode": self.mode, "compute": self.compute, "casts": self.casts, "sites": sites}

    def _handle_cast(
        self, site: str, target: str, operands: dict[str, torch.Tensor], dtype: torch.dtype | None
    ) -> torch.dtype:
        """Count a cast, or refuse it; returns the compute dtype."""
        if torch.compiler.is_compiling() and dtype is not None and self.mode == "cast":
            strays = ", ".join([f"{name} {operand.dtype}" for name, operand in operands.items()])
            note(self._number, target, strays, str(dtype))
            return dtype
        arrived = ", ".join(f"{name} {shown(operand.dtype)}" for name, operand in operands.items())
        if dtype is None:
            what = f"{target} got two half formats: {arrived}"
            remedy = "find the module with the other format in dtypes.json in the run folder"
            raise self._refusal(what, site, remedy, code="precision.mixed_dtypes")
        if self._probing:
            return dtype
        promoted = self._explain({name: tensor for name, tensor in operands.items() if tensor.dtype is not dtype})
        if self.mode == "strict":
            since = f"; {promoted}" if promoted else ""
            what = f"{target} computes in {shown(dtype)} but got {arrived}{since}"
            remedy = "set attention.guard: cast, or fix the lines that `halftune doctor` lists"
            raise self._refusal(what, site, remedy, code="precision.promoted")
        self._count_cast(site, target, Site(0, arrived, shown(dtype), promoted))
        return dtype

    def _count_cast(self, name: str, target: str, new: Site) -> None:
        """Count a cast; log the site's first once its promoting line is known or cannot be found."""
        site = self._sites.setdefault(name, new)
        site.casts += 1
        site.promoted = site.promoted or new.promoted
        if site.casts == 1 or name in self._unreported:
            if not new.promoted and self._record_next():
                self._unreported[name] = target
            else:
                self._unreported.pop(name, None)
                self._log_site(name, target)

    def count_graph_cast(self, file: str, line: int, target: str, arrived: str, dtype: str) -> None:
        """Count a cast in a compiled graph, once per graph; the site is the calling line."""
        name = f"{written_in(file, self._folder)}:{line}"
        site = self._sites.setdefault(name, Site(0, arrived, dtype, OF_A_GRAPH))
        site.casts += 1
        if site.casts == 1:
            self._log_site(name, target)

    def _log_site(self, name: str, target: str) -> None:
        """Log a site; of equal layers, only the first as a warning, the others as debug messages."""
        site = self._sites[name]
        kind = (site.arrived, site.cast_to, _LAYER.sub(".*", site.promoted))
        say = log.debug if kind in self._logged else log.warning
        self._logged.add(kind)
        since = f"; {site.promoted}" if site.promoted else ""
        say("%s: %s got %s; cast to %s%s", name, target, site.arrived, site.cast_to, since)

    def _refusal(self, what: str, site: str, remedy: str, *, code: str) -> DtypeContractError:
        error = DtypeContractError(what, where=site, remedy=remedy, code=code)
        self._refused = self._refused or error
        return error

    def check(self) -> None:
        """Check after a step that the model's code did not catch the guard's error and continue.

        Raises:
            DtypeContractError: a call was refused, and the error was caught.
        """
        if (refused := self._refused) is not None:
            what = f"{refused.what}; the model's code caught this error and continued without attention's result"
            raise DtypeContractError(what, where=refused.where, remedy=refused.remedy, code=refused.code)

    def _explain(self, strays: dict[str, torch.Tensor]) -> str:
        """``fp32 since file:line …`` if the forward pass is recorded; per operand if they differ."""
        lines: dict[str, list[str]] = {}
        for name, stray in strays.items():
            step = self._recorder.step_of(stray) if self._recorder is not None else None
            if step is not None:
                first = first_promotion(step)
                place = f"{written_in(first.place.file, self._folder)}:{first.place.line}"
                since = f"{shown(first.dtype)} since {place}: {first.formula()}, {first.cause()}"
                lines.setdefault(since, []).append(name)
        if len(lines) == 1:
            return next(iter(lines))
        return "; ".join(f"{' and '.join(names)} {since}" for since, names in lines.items())

    def _site(self, fn: Callable[..., Any], module: nn.Module | None) -> str:
        if torch.compiler.is_compiling() and self.mode == "cast":
            return ""
        if module is None:
            return self._caller() or f"{fn.__module__}.{fn.__qualname__}"
        if module in self._paths:
            return self._paths[module]
        layer = getattr(module, "layer_idx", None)
        return type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"

    def _caller(self) -> str:
        """Path of the innermost running module of the watched model; empty if there is none."""
        frame = sys._getframe(2) if not torch.compiler.is_compiling() else None
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._paths:
                return self._paths[module]
            frame = frame.f_back
        return ""


@contextmanager
def _run_eagerly() -> Iterator[None]:
    """Inside, compiled functions and layers run eagerly, since compiled ones cannot be recorded."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def computing_dtype(operands: Sequence[torch.Tensor], planned: torch.dtype) -> torch.dtype | None:
    """Return the compute dtype of a call: autocast's, else the one half dtype among the operands, else the plan's.

    None if the operands have two half dtypes.
    """
    if _autocast(operands[0]):
        return torch.get_autocast_dtype(operands[0].device.type)
    found: torch.dtype | None = None
    for operand in operands:
        if operand.dtype in _HALF:
            if found is not None and operand.dtype is not found:
                return None
            found = operand.dtype
    small = operands[0].dtype
    if small.itemsize == 1 and all(operand.dtype is small for operand in operands):
        return small  # fp8, supported by flash-attn 3
    return found or planned


def _autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is enabled on the tensor's device; the meta device has no autocast."""
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _with_operands(
    args: Sequence[Any], kwargs: dict[str, Any], places: Sequence[tuple[int, str]], operands: Sequence[torch.Tensor]
) -> list[Any]:
    """Positional arguments with other operands at their places; those passed by name are replaced in ``kwargs``."""
    replaced = list(args)
    for (at, name), operand in zip(places, operands, strict=True):
        if at < len(args):
            replaced[at] = operand
        else:
            kwargs[name] = operand
    return replaced


def _place(names: list[str], spellings: tuple[str, ...]) -> tuple[int, str]:
    for name in spellings:
        if name in names:
            return names.index(name), name
    raise TypeError(f"the attention function has no parameter {spellings[0]}; its parameters: {names}")


def returned(result: Any, operands: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
    """Return the output in the dtype of the surrounding layers.

    Promotion produces fp32, never a half dtype, so one operand in ``dtype`` shows that the weights have it. Under
    autocast the next layer casts its input.
    """
    if _autocast(operands[0]) or any(operand.dtype is dtype for operand in operands):
        return result
    out = result[0] if isinstance(result, tuple) else result
    back = out.to(operands[0].dtype)
    if not torch.compiler.is_compiling():
        copy_record(back, operands[0])  # the search for the promoting line must skip this cast
    return (back, *result[1:]) if isinstance(result, tuple) else back
