"""Converts traced calls to findings: the promoting line, the layers and the cost."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halftune.precision.dtypes import plain_name
from halftune.precision.record.steps import HALF, Step, first_promotion, shown
from halftune.precision.trace.tracer import Arrival, Operand

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclass(frozen=True)
class Finding:
    """An operand outside the planned dtype; equal layers share a finding.

    Attributes:
        target: where it arrives: ``attention``, ``rotary``, ``linear attention`` or ``loss``.
        operand: its name there.
        site: path of the calling module, layer numbers written as ``*``.
        arrives, computes: its dtype there, and what the call computes in (empty: two half formats contradict).
        op: the promoting call as written, with the dtypes that went in: ``addcmul(fp16, fp16, fp32)``.
        becomes: dtype of its result.
        cause: why.
        file, line, function: where that call is written; ``source`` is the line.
        module: path of the module in which it ran.
        layers: how many modules, by phase.
        passes: ``forward``, and ``backward`` where gradients flow back through it.
        breaks: whether the contract is broken: True everywhere but at the loss and where autocast, or the code as it is
            written, brings the operands of attention outside of the guard into one format.
        raw: what the unguarded kernel raises, empty where it takes it.
        guard: what halftune's guard does.
        bytes_per_step: written by the guard's casts, forward and backward, on one device, were a step made of rows like
            the traced one: in a tower it grows with pictures and sounds.
    """

    target: str
    operand: str
    site: str
    arrives: str
    computes: str
    op: str
    becomes: str
    cause: str
    file: str
    line: int
    function: str
    source: str
    module: str
    layers: dict[str, int]
    passes: tuple[str, ...]
    breaks: bool
    raw: str
    guard: str
    bytes_per_step: int

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON data."""
        return asdict(self)


def findings(
    arrivals: Iterable[Arrival], *, mode: str, scale: float, objection: Callable[[Arrival], str], training: str
) -> list[Finding]:
    """Group operands outside the planned dtype by name, promoting line and module (layer numbers ignored).

    Args:
        arrivals: of all phases.
        mode: of the guard.
        scale: tokens of a step per traced token, for the cost.
        objection: what the raw kernel raises for a call, or empty.
        training: the phase that steps are made of; gradients flow back through it.
    """
    groups: dict[tuple[Any, ...], list[tuple[Arrival, Operand, Step | None]]] = {}
    for arrival in arrivals:
        for operand in _strays(arrival):
            step = first_promotion(operand.step) if operand.step is not None else None
            at = (step.op, step.place, starred(step.module)) if step is not None else ("", starred(operand.leaf), "")
            key = (arrival.target, operand.name, starred(arrival.site), operand.dtype, arrival.dtype, at)
            groups.setdefault(key, []).append((arrival, operand, step))
    return [_finding(group, mode, scale, objection, training) for group in groups.values()]


def _strays(arrival: Arrival) -> list[Operand]:
    if arrival.target == "loss":
        return [operand for operand in arrival.operands if operand.dtype not in HALF and _promoted(operand)]
    return arrival.strays


def _promoted(operand: Operand) -> bool:
    return operand.step is not None and first_promotion(operand.step).promotes


def _finding(
    group: Sequence[tuple[Arrival, Operand, Step | None]],
    mode: str,
    scale: float,
    objection: Callable[[Arrival], str],
    training: str,
) -> Finding:
    arrival, operand, step = group[0]
    sites: dict[str, set[str]] = {}
    for each, _, _ in group:
        sites.setdefault(each.phase, set()).add(each.site)
    in_training = [(each, stray) for each, stray, _ in group if each.phase == training]
    trains = any(stray.grad for _, stray in in_training)
    to_loss = arrival.target == "loss"
    harmless = to_loss or bool(arrival.settled)
    written = sum(_cast_bytes(each, stray) for each, stray in in_training)
    return Finding(
        target=arrival.target,
        operand=operand.name,
        site=starred(arrival.site),
        arrives=shown(operand.dtype),
        computes="" if arrival.dtype is None else shown(arrival.dtype),
        cause=_cause(step, operand),
        **_origin(step, operand),
        layers={phase: len(modules) for phase, modules in sites.items()},
        passes=("forward", "backward") if trains else ("forward",),
        breaks=not harmless,
        raw="" if harmless else objection(arrival),
        guard="nothing: the loss sums in fp32" if to_loss else _action(arrival, operand, mode),
        bytes_per_step=0 if to_loss or mode != "cast" or not arrival.guarded else round(written * scale),
    )


def _origin(step: Step | None, operand: Operand) -> dict[str, Any]:
    """The call that made an operand, and its line."""
    if step is None:
        made = operand.leaf or "made outside of torch's functions"
        unknown = dict.fromkeys(("file", "function", "source", "module"), "")
        return {"op": made, "becomes": shown(operand.dtype), **unknown, "line": 0}
    place = step.place
    return {
        "op": step.formula(),
        "becomes": shown(step.dtype),
        "file": place.file,
        "line": place.line,
        "function": place.function,
        "source": linecache.getline(place.file, place.line).strip(),
        "module": starred(step.module),
    }


def _cause(step: Step | None, operand: Operand) -> str:
    if step is None:
        return "created in this dtype"
    if step.promotes or step.escapes:
        return step.cause()
    if operand.dtype in HALF:
        return "in another half format"
    leaves = ", ".join(dict.fromkeys(source.leaf for source in step.sources if source.leaf))
    off = "" if step.autocast is not None else " and autocast is off"
    verb = "are" if "," in leaves or not leaves else "is"
    return f"never in half precision: {leaves or 'its operands'} {verb} fp32{off}"


def _action(arrival: Arrival, operand: Operand, mode: str) -> str:
    if arrival.settled:
        return f"nothing: {arrival.settled}"
    if not arrival.guarded:
        return "nothing: the model's own call, outside the guard"
    if arrival.dtype is None:
        return "raises: two half formats"
    if operand.name in ("k_cache", "v_cache") and mode != "off":
        return "raises: the cache is written in place and cannot be cast"
    if mode == "strict":
        return "raises"
    if mode == "off":
        return "nothing: attention.guard is off (set it to cast)"
    if arrival.target == "rotary":
        x, tables = arrival.operands[0], _tables(arrival)
        names = " and ".join(each.name for each in tables) if operand is x else operand.name
        return f"casts {names} to {shown(x.dtype)}"
    return f"casts {operand.name} to {shown(arrival.dtype)}"


def _cast_bytes(arrival: Arrival, operand: Operand) -> int:
    """Bytes written by a call's casts: copies in forward, gradients in the operands' dtypes in backward.

    Recomputation under gradient checkpointing is not counted.
    """
    if arrival.dtype is None:
        return 0
    to = arrival.operands[0].dtype if arrival.target == "rotary" else arrival.dtype
    cast = _tables(arrival) if arrival.target == "rotary" and operand is arrival.operands[0] else [operand]
    return sum(math.prod(each.shape) * (to.itemsize + each.grad * each.dtype.itemsize) for each in cast)


def _tables(arrival: Arrival) -> list[Operand]:
    """The rotary tables with another dtype than ``x``, which the guard casts."""
    x, *tables = arrival.operands
    return [table for table in tables if table.dtype is not x.dtype]


def starred(path: str) -> str:
    """Return a module's path without peft's wrappers, with layer numbers replaced by ``*``."""
    return _INDEX.sub("*", plain_name(path))
