"""Keeps the plan's number format at every attention call: operands that left it are cast and counted, or refused."""

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

from halftune.core.errors import DtypeContractError
from halftune.core.formats import Format
from halftune.core.log import get_logger
from halftune.precision.dtypes import plain_name, torch_dtype
from halftune.precision.in_graph import OF_A_GRAPH, note, number_of
from halftune.precision.trace.recorder import Recorder, credit
from halftune.precision.trace.sources import written_in
from halftune.precision.trace.steps import first_promotion, shown

log = get_logger(__name__)

Mode = Literal["cast", "strict", "off"]
F = TypeVar("F", bound=Callable[..., Any])
_LAYER = re.compile(r"\.\d+(?=\.)")
_HALF = (torch.bfloat16, torch.float16)
_OPERANDS = (("query", "q"), ("key", "k"), ("value", "v"))


@dataclass
class Site:
    """One place where operands arrived in another dtype than they are computed in.

    Attributes:
        casts: calls in which at least one operand was cast; in compiled code, graphs. Recomputation under gradient
            checkpointing counts again.
        arrived: what arrived the first time, e.g. ``query fp32, key fp32, value bf16``.
        cast_to: what it was cast to.
        promoted: the source line and call that first left the computing dtype, of each operand where they differ; empty
            where it was not seen.
    """

    casts: int
    arrived: str
    cast_to: str
    promoted: str = ""


class Guard:
    """Stands in front of attention callables.

    The dtype that a call computes in is the autocast dtype of its operands' device where autocast is on, else the one
    half dtype among the operands, else the plan's compute dtype. Operands in it pass untouched.

    Args:
        mode: ``cast`` casts and logs the first time at each site; ``strict`` raises with the same facts; ``off`` does
            nothing at all.
        compute: the plan's compute format.
    """

    def __init__(self, mode: Mode, compute: Format) -> None:
        self.mode, self.compute = mode, compute
        self._dtype = torch_dtype(compute)
        self._sites: dict[str, Site] = {}
        self._logged: set[tuple[str, str, str]] = set()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._recorder: Recorder | None = None
        self._watched: Callable[[], nn.Module | None] | None = None  # until its recording is asked for
        self._pending = False  # the watched model's next forward pass will be recorded
        self._untold: dict[str, str] = {}  # sites that wait for it, and where their operands were going
        self._rehearsing = False
        self._folder = ""  # where the model's own code is, as the user knows it
        self._refused: DtypeContractError | None = None
        self._number = number_of(self)

    def watch(self, model: nn.Module) -> None:
        """Learns the paths of a model's modules, so that sites are named by them. Not needed for the casts.

        Once an operand has strayed, the model's next forward pass is recorded, so that the report names the line that
        promoted it; a model that keeps to its plan is never recorded. In ``strict``, where there is no next pass, the
        first one is.
        """
        self._paths.update({module: plain_name(name) for name, module in model.named_modules() if name})
        named = (vars(module)["name_or_path"] for module in model.modules() if "name_or_path" in vars(module))
        self._folder = next(named, "")
        if self.mode != "off":
            self._watched = weakref.ref(model)
        if self.mode == "strict":
            self._record_next()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """For a pass that only looks at a model: strays are cast and neither noted nor refused, as the next will do."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    def _record_next(self) -> bool:
        """Sees to it, once, that a forward pass is recorded; says whether that is still to come."""
        model = self._watched() if self._watched is not None else None
        self._watched = None
        if model is not None and model._compiled_call_impl is None:  # a compiled graph would be rebuilt
            self._record_once(model)
        return self._pending

    def _record_once(self, model: nn.Module) -> None:
        """Puts a recorder around the next call of ``model.forward``."""
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
                with _parts_uncompiled(), Recorder(model) as self._recorder:
                    return forward(*args, **kwargs)
            finally:
                self._recorder = None

        model.forward = recorded

    def attention(self, fn: F, operands: Sequence[str] | None = None) -> F:
        """``fn`` behind the guard, with its own signature.

        ``fn`` takes query, key and value (or q, k and v), or the parameters that ``operands`` names (``q, kv``), by
        position or by name, and returns the output, or a tuple that begins with it. Where its first parameter is
        ``module``, that names the site.

        The output comes back as computed. Only where no autocast is on and no operand arrived in the computing dtype
        are the layers around not in it either: then the output takes the dtype in which the query arrived.

        Raises, when called:
            DtypeContractError: two half dtypes among the operands without autocast; in ``strict``, any cast needed.
        """
        spellings = _OPERANDS if operands is None else tuple((name,) for name in operands)
        return self._wrap(fn, spellings, "attention", lambda operands: computing_dtype(operands, self._dtype))

    def operator(self, fn: F, operands: Sequence[str] = ("q", "k", "v")) -> F:
        """``fn`` of linear attention behind the guard: the named operands share one half dtype.

        Decays and states keep their own. All in fp32 without autocast is legal there. A single operand may hold
        several (``qkv``).

        Raises, when called:
            DtypeContractError: as ``attention``.
        """

        def dtype_of(found: Sequence[torch.Tensor]) -> torch.dtype | None:
            return computing_dtype(found, torch.float32)

        return self._wrap(fn, tuple((name,) for name in operands), "linear attention", dtype_of)

    def rotary(self, fn: F) -> F:
        """``fn(x, cos, sin, …)`` behind the guard: the tables take the dtype of ``x``, so that ``x`` keeps its own."""
        return self._wrap(fn, (("x",), ("cos",), ("sin",)), "rotary", lambda operands: operands[0].dtype)

    def note_cast(self, fn: Callable[..., Any], operands: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Counts a cast of operands of ``fn`` to ``dtype``, which the caller makes.

        Raises:
            DtypeContractError: in ``strict``.
        """
        self._settle(self._site(fn, None), "attention", operands, dtype)

    def refuse_caches(self, fn: Callable[..., Any], operands: dict[str, torch.Tensor]) -> None:
        """Stops a call whose caches cannot be cast.

        Raises:
            DtypeContractError: always.
        """
        arrived = ", ".join(f"{name} {shown(operand.dtype)}" for name, operand in operands.items())
        what = f"{arrived}: {fn.__name__} writes into its caches, and a cast would copy them"
        remedy = f"make both caches in {self.compute}, where the model's code allocates them"
        raise self._refusal(what, self._site(fn, None), remedy)

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
        has_module = names[0] == "module"

        @functools.wraps(fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            operands = [args[at] if at < len(args) else kwargs[name] for at, name in places]
            dtype = dtype_of(operands)
            if dtype is not None and all(operand.dtype is dtype for operand in operands):
                return fn(*args, **kwargs)
            site = self._site(fn, args[0] if has_module and args else kwargs.get("module"))
            named = dict(zip([spelling[0] for spelling in spellings], operands, strict=True))
            dtype = self._settle(site, target, named, dtype)
            args_list = list(args)
            for (at, name), operand in zip(places, operands, strict=True):
                if at < len(args_list):
                    args_list[at] = operand.to(dtype)
                else:
                    kwargs[name] = operand.to(dtype)
            result = fn(*args_list, **kwargs)
            return result if target == "rotary" else returned(result, operands, dtype)

        return guarded  # type: ignore[return-value]

    @property
    def casts(self) -> int:
        """Calls so far in which at least one operand was cast."""
        return sum(site.casts for site in self._sites.values())

    def report(self) -> dict[str, Any]:
        """Counters as JSON data: mode, compute, number of casts, one entry for each site. A healthy run has none.

        Sites that still wait for the line that promotes are logged without it.
        """
        for name, target in self._untold.items():
            self._tell(name, target)
        self._untold.clear()
        sites = [{"site": name, **vars(site)} for name, site in self._sites.items()]
        return {"mode": self.mode, "compute": self.compute, "casts": self.casts, "sites": sites}

    def _settle(
        self, site: str, target: str, operands: dict[str, torch.Tensor], dtype: torch.dtype | None
    ) -> torch.dtype:
        """Notes a cast, or refuses it."""
        if torch.compiler.is_compiling() and dtype is not None and self.mode == "cast":
            strays = ", ".join([f"{name} {operand.dtype}" for name, operand in operands.items()])
            note(self._number, target, strays, str(dtype))
            return dtype
        arrived = ", ".join(f"{name} {shown(operand.dtype)}" for name, operand in operands.items())
        if dtype is None:
            raise self._refusal(
                f"{arrived}: two half formats on the way into {target}",
                site,
                "find the module that is in the other format: dtypes.json in the run folder lists them",
            )
        if self._rehearsing:
            return dtype
        promoted = self._explain({name: tensor for name, tensor in operands.items() if tensor.dtype is not dtype})
        if self.mode == "strict":
            since = f"; {promoted}" if promoted else ""
            raise self._refusal(
                f"{arrived} on the way into {target}, which computes in {shown(dtype)}{since}",
                site,
                "attention.guard: cast brings it back; `halftune doctor` names every line that promotes",
            )
        if site in self._sites:
            self._sites[site].casts += 1
        else:
            self._sites[site] = Site(1, arrived, shown(dtype))
        if promoted and not self._sites[site].promoted:
            self._sites[site].promoted = promoted
        if self._sites[site].casts == 1 or site in self._untold:
            if not promoted and self._record_next():
                self._untold[site] = target
            else:
                self._untold.pop(site, None)
                self._tell(site, target)
        return dtype

    def noted_in_graph(self, file: str, line: int, target: str, arrived: str, dtype: str) -> None:
        """Notes a cast in a compiled graph by the line that calls, once for each graph."""
        name = f"{written_in(file, self._folder)}:{line}"
        site = self._sites.setdefault(name, Site(0, arrived, dtype, OF_A_GRAPH))
        site.casts += 1
        if site.casts == 1:
            self._tell(name, target)

    def _tell(self, name: str, target: str) -> None:
        """One line for each site; the first of many equal layers is news, the others are for whoever looks."""
        site = self._sites[name]
        kind = (site.arrived, site.cast_to, _LAYER.sub(".*", site.promoted))
        say = log.debug if kind in self._logged else log.warning
        self._logged.add(kind)
        since = f"; {site.promoted}" if site.promoted else ""
        say("%s: %s arrive at %s; cast to %s%s", name, site.arrived, target, site.cast_to, since)

    def _refusal(self, what: str, site: str, remedy: str) -> DtypeContractError:
        error = DtypeContractError(what, where=site, remedy=remedy)
        self._refused = self._refused or error
        return error

    def check(self) -> None:
        """For after a step: a model that catches exceptions computes on without attention's result.

        Raises:
            DtypeContractError: a call was refused, and nobody has seen it.
        """
        if self._refused is not None:
            what = f"{self._refused.what}; the model's own code caught this error and computed something else"
            raise DtypeContractError(what, where=self._refused.where, remedy=self._refused.remedy)

    def _explain(self, strays: dict[str, torch.Tensor]) -> str:
        """``fp32 since file:line …``, where the forward pass is being recorded; by operand where they differ."""
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
        """Path of the innermost watched module that is running; empty where none is."""
        frame = sys._getframe(2) if not torch.compiler.is_compiling() else None
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._paths:
                return self._paths[module]
            frame = frame.f_back
        return ""


@contextmanager
def _parts_uncompiled() -> Iterator[None]:
    """Inside, functions and layers that somebody compiled run as written; compiled ones cannot be recorded."""
    if "torch._dynamo" not in sys.modules:  # nobody has, and importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def computing_dtype(operands: Sequence[torch.Tensor], planned: torch.dtype) -> torch.dtype | None:
    """The dtype that a call computes in: autocast's, else the one half dtype among the operands, else the plan's.

    None where two half dtypes contradict each other.
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
        return small  # fp8, which flash-attn 3 takes
    return found or planned


def _autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is on where the tensor lives; the meta device knows no autocast."""
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _place(names: list[str], spellings: tuple[str, ...]) -> tuple[int, str]:
    for name in spellings:
        if name in names:
            return names.index(name), name
    raise TypeError(f"an attention callable takes {spellings[0]}, but its parameters are {names}")


def returned(result: Any, operands: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
    """The output in the dtype that the layers around work in.

    A half operand never comes about by accident, a fp32 one does: one operand in ``dtype`` shows that the weights are
    in it. Under autocast the next layer casts for itself.
    """
    if _autocast(operands[0]) or any(operand.dtype is dtype for operand in operands):
        return result
    out = result[0] if isinstance(result, tuple) else result
    back = out.to(operands[0].dtype)
    if not torch.compiler.is_compiling():
        credit(back, operands[0])  # who looks for the line that promoted must not stop at this cast of ours
    return (back, *result[1:]) if isinstance(result, tuple) else back
