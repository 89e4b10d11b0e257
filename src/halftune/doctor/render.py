"""Renders the doctor's results for a terminal with 80 columns."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halftune.doctor.environment import Check

if TYPE_CHECKING:  # they import torch, which a check of the environment does not
    from halftune.doctor.trace_model import TraceReport
    from halftune.precision.trace.findings import Finding

WIDEST = 120
_MARKS = {"ok": "ok", "note": "!", "fail": "FAIL"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_GUARDED = {
    "cast": " casts the operands, at {cost} written per step.",
    "strict": " stops the run there; cast fixes it.",
    "off": " changes nothing; cast fixes it.",
}


def render_environment(checks: Iterable[Check], width: int | None = None) -> str:
    """Return a line for each check, with its remedy."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        said = check.what + (f" · {check.remedy}" if check.remedy else "")
        table.add_row(Text(check.name), Text(_MARKS[check.status]), Text(said))
    return _printed([Text("Environment"), table], width)


def render_trace(found: TraceReport, width: int | None = None) -> str:
    """Return what was traced, then every finding with its line, cause, cost and the guard's action."""
    autocast = f"autocast {found.compute}" if found.autocast else f"{found.compute}, no autocast"
    calls = ", ".join(f"{count} × {label}" for label, count in found.calls.items()) or "none"
    lines = [
        f"Dtype trace of {found.model}",
        f"on {found.machine}",
        f"{autocast}; casting rules of {found.rules}; {found.tensors}; {found.seconds:.1f} s",
        f"calls: {calls}",
        "",
    ]
    if found.calls and all(finding.target == "loss" for finding in found.findings):
        lines.append("Every tensor arrives at attention in the plan's format.")
    for number, finding in enumerate(found.violations, 1):
        lines += [*_block(number, finding), ""]
    for finding in found.findings:
        lines += [] if finding.breaks else _harmless(finding)
    lines += [f"! {note}" for note in found.notes]
    if found.violations:
        lines.append(_verdict(found))
    return _printed([Text(line) for line in lines], width)


def _verdict(found: TraceReport) -> str:
    count, total = len(found.violations), sum(finding.bytes_per_step for finding in found.violations)
    what = f"Contract violated in {count} place{'s' * (count > 1)}; attention.guard: {found.guard}"
    return what + _GUARDED[found.guard].format(cost=_size(total))


def _block(number: int, finding: Finding) -> Iterator[str]:
    site = f" of {finding.site}" if finding.site else ""
    layers = ", ".join(f"{count} layer{'s' * (count > 1)} in {phase}" for phase, count in finding.layers.items())
    yield f"{number}. {finding.operand} arrives in {finding.arrives} at {finding.target}{site}: {layers}"
    if finding.file:
        yield f"   {finding.op} → {finding.becomes} at {short(finding.file)}:{finding.line}: {finding.cause}"
        yield f"     {finding.source}"
        module = f"in {finding.module}; " if finding.module and finding.module != finding.site else ""
        yield f"   {module}{' and '.join(finding.passes)}"
    else:
        yield f"   {finding.op}: {finding.cause}"
    if finding.raw:
        yield f"   unguarded: {finding.raw!r}"
    cost = f", {_size(finding.bytes_per_step)} per step" if finding.bytes_per_step else ""
    yield f"   guard: {finding.guard}{cost}"


def _harmless(finding: Finding) -> Iterator[str]:
    place = f"{short(finding.file)}:{finding.line}"
    if finding.target == "loss":
        why = f"{finding.op} at {place}, {finding.cause}"
        yield f"Loss: {finding.operand} arrive in {finding.arrives}: {why}. As meant."
        return
    layers = ", ".join(f"{count} layer{'s' * (count > 1)} in {phase}" for phase, count in finding.layers.items())
    made = f"{finding.op} at {place}, {finding.cause}" if finding.file else f"{finding.op}, {finding.cause}"
    yield f"! {finding.operand} arrives in {finding.arrives} at the model's own attention in {finding.site}: {layers}"
    yield f"    {made}. The guard does not see this call: {finding.guard.removeprefix('nothing: ')}."


def short(file: str) -> str:
    """A source file relative to the working folder or to its import path."""
    path = Path(file)
    roots: Sequence[str] = sorted({os.getcwd(), *(entry for entry in sys.path if entry)}, key=len, reverse=True)
    for root in roots:
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return file


def _size(count: int) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _printed(parts: Iterable[Text | Table], width: int | None) -> str:
    columns = width or min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    stream = io.StringIO()
    console = Console(file=stream, width=columns, force_terminal=False, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
