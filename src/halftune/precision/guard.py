"""Keeps the plan's number format at every attention call: operands that left it are cast and counted, or refused."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from halftune.core.errors import DtypeContractError
from halftune.core.formats import Format
from halftune.core.log import get_logger
from halftune.precision.dtypes import torch_dtype

log = get_logger(__name__)

Mode = Literal["cast", "strict", "off"]
F = TypeVar("F", bound=Callable[..., Any])
_HALF = (torch.bfloat16, torch.float16)
_OPERANDS = (("query", "q"), ("key", "k"), ("value", "v"))
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass
class Site:
    """One place where operands arrived in another dtype than they are computed in.

    Attributes:
        casts: calls in which at least one operand was cast. Recomputation under gradient checkpointing counts again.
        arrived: what arrived the first time, e.g. ``query fp32, key fp32, value bf16``.
        cast_to: what it was cast to.
    """

    casts: int
    arrived: str
    cast_to: str


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
        self._logged: set[tuple[str, str]] = set()
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def watch(self, model: nn.Module) -> None:
        """Learns the paths of a model's modules, so that sites are named by them. Not needed for the casts."""
        self._paths.update({module: name for name, module in model.named_modules() if name})

    def attention(self, fn: F) -> F:
        """``fn`` behind the guard, with its own signature.

        ``fn`` takes query, key and value (or q, k and v), by position or by name, and returns the output, or a tuple
        that begins with it. Where its first parameter is ``module``, that names the site.

        The output comes back as computed. Only where no autocast is on and no operand arrived in the computing dtype
        are the layers around not in it either: then the output takes the dtype in which the query arrived.

        Raises, when called:
            DtypeContractError: two half dtypes among the operands without autocast; in ``strict``, any cast needed.
        """
        if self.mode == "off":
            return fn
        names = list(inspect.signature(fn).parameters)
        places = tuple(_place(names, spellings) for spellings in _OPERANDS)
        has_module = names[0] == "module"

        @functools.wraps(fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            operands = [args[at] if at < len(args) else kwargs[name] for at, name in places]
            dtype = self._computing_dtype(operands)
            if dtype is not None and all(operand.dtype is dtype for operand in operands):
                return fn(*args, **kwargs)
            site = self._site(fn, args[0] if has_module and args else kwargs.get("module"))
            dtype = self._settle(site, operands, dtype)
            args_list = list(args)
            for (at, name), operand in zip(places, operands, strict=True):
                if at < len(args_list):
                    args_list[at] = operand.to(dtype)
                else:
                    kwargs[name] = operand.to(dtype)
            return _returned(fn(*args_list, **kwargs), operands, dtype)

        return guarded  # type: ignore[return-value]

    def report(self) -> dict[str, Any]:
        """Counters as JSON data: mode, compute, number of casts, one entry for each site. A healthy run has none."""
        sites = [{"site": name, **vars(site)} for name, site in self._sites.items()]
        casts = sum(site.casts for site in self._sites.values())
        return {"mode": self.mode, "compute": self.compute, "casts": casts, "sites": sites}

    def _computing_dtype(self, operands: list[torch.Tensor]) -> torch.dtype | None:
        """The dtype of a call; None where two half dtypes contradict each other."""
        if _autocast(operands[0]):
            return torch.get_autocast_dtype(operands[0].device.type)
        found: torch.dtype | None = None
        for operand in operands:
            if operand.dtype in _HALF:
                if found is not None and operand.dtype is not found:
                    return None
                found = operand.dtype
        return found or self._dtype

    def _settle(self, site: str, operands: list[torch.Tensor], dtype: torch.dtype | None) -> torch.dtype:
        """Notes a cast, or refuses it."""
        if torch.compiler.is_compiling() and dtype is not None and self.mode == "cast":
            return dtype  # a compiled graph casts without counting
        arrived = ", ".join(
            f"{spellings[0]} {_SHORT.get(operand.dtype, str(operand.dtype).removeprefix('torch.'))}"
            for spellings, operand in zip(_OPERANDS, operands, strict=True)
        )
        if dtype is None:
            raise DtypeContractError(
                f"{arrived}: two half formats on the way into attention",
                where=site,
                remedy="find the module that is in the other format: dtypes.json in the run folder lists them",
            )
        if self.mode == "strict":
            raise DtypeContractError(
                f"{arrived} on the way into attention, which computes in {_SHORT[dtype]}",
                where=site,
                remedy="attention.guard: cast brings it back; an fp32 norm or table in front of attention promotes it",
            )
        if site in self._sites:
            self._sites[site].casts += 1
        else:
            self._sites[site] = Site(1, arrived, _SHORT[dtype])
            # The first of many equal layers is news; the others are for whoever looks.
            kind = (arrived, _SHORT[dtype])
            say = log.debug if kind in self._logged else log.warning
            self._logged.add(kind)
            say("%s: %s arrive at attention; cast to %s", site, arrived, _SHORT[dtype])
        return dtype

    def _site(self, fn: Callable[..., Any], module: nn.Module | None) -> str:
        if torch.compiler.is_compiling() and self.mode == "cast":
            return ""
        if module is None:
            return f"{fn.__module__}.{fn.__qualname__}"
        if module in self._paths:
            return self._paths[module]
        layer = getattr(module, "layer_idx", None)
        return type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"


def _autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is on where the tensor lives; the meta device knows no autocast."""
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _place(names: list[str], spellings: tuple[str, ...]) -> tuple[int, str]:
    for name in spellings:
        if name in names:
            return names.index(name), name
    raise TypeError(f"an attention callable takes {spellings[0]}, but its parameters are {names}")


def _returned(result: Any, operands: list[torch.Tensor], dtype: torch.dtype) -> Any:
    """The output in the dtype that the layers around work in.

    A half operand never comes about by accident, a fp32 one does: one operand in ``dtype`` shows that the weights are
    in it. Under autocast the next layer casts for itself.
    """
    if _autocast(operands[0]) or any(operand.dtype is dtype for operand in operands):
        return result
    arrived = operands[0].dtype
    if isinstance(result, tuple):
        return (result[0].to(arrived), *result[1:])
    return result.to(arrived)
