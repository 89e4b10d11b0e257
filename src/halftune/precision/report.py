"""The dtypes of a loaded model as a table, checked against the plan."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from halftune.core.errors import DtypeContractError
from halftune.precision import PrecisionPlan
from halftune.precision.dtypes import CONFIG_NAMES, plain_name, stays_fp32

_ADAPTER = re.compile(r"\.((lora|vera|hada|lokr)_\w+|oft_R|ia3_l|modules_to_save)\.")
_ROTARY = re.compile(r"(^|\.)\w*inv_freq$")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by peft's naming."""
    return _ADAPTER.search(name) is not None


@dataclass(frozen=True)
class DtypeRow:
    """Tensors with the same name except for layer numbers, role and dtype.

    Attributes:
        name: their name, with layer numbers replaced by ``*``.
        role: ``trained``, ``adapter`` (not trained now), ``frozen``, ``kept fp32``, ``rotary`` or ``buffer``.
        dtype: torch's name without ``torch.``.
        planned: the plan's dtype; empty if it has none (integers, other buffers).
        tensors: number of tensors.
        elements: total number of elements.
    """

    name: str
    role: str
    dtype: str
    planned: str
    tensors: int
    elements: int

    @property
    def as_planned(self) -> bool:
        """Whether the dtype matches the plan."""
        return self.planned in ("", self.dtype)


@dataclass(frozen=True)
class DtypeReport:
    """The dtype of every tensor of a model; equal layers share a row."""

    rows: tuple[DtypeRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as JSON data, for ``dtypes.json``."""
        return {"rows": [{**asdict(row), "as_planned": row.as_planned} for row in self.rows]}

    def render(self, width: int = 120) -> str:
        """Return the rows as a table for a terminal."""
        table = Table(title="dtypes after loading", title_justify="left")
        for column in ("module", "role", "dtype", "planned"):
            table.add_column(column)
        for column in ("tensors", "elements"):
            table.add_column(column, justify="right")
        for row in self.rows:
            style = None if row.as_planned else "bold red"
            cells = (row.name, row.role, row.dtype, row.planned, f"{row.tensors:,}", f"{row.elements:,}")
            table.add_row(*cells, style=style)
        console = Console(file=io.StringIO(), width=width)
        console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined]


def dtype_report(model: torch.nn.Module, plan: PrecisionPlan) -> DtypeReport:
    """Return the dtype and the planned dtype of every parameter and buffer, grouped."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for name, tensor, role, planned in _tensors(model, plan):
        key = (_INDEX.sub("*", plain_name(name)), role, str(tensor.dtype).removeprefix("torch."), planned)
        count = groups.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += tensor.numel()
    return DtypeReport(tuple(DtypeRow(*key, *count) for key, count in groups.items()))


def check_dtypes(model: torch.nn.Module, plan: PrecisionPlan) -> None:
    """Check the dtypes of a loaded model: frozen, trained, adapter and kept weights, and rotary tables.

    Raises:
        DtypeContractError: a tensor has another dtype; names the first and the number of others.
    """
    wrong = [
        (name, str(tensor.dtype).removeprefix("torch."), role, planned)
        for name, tensor, role, planned in _tensors(model, plan)
        if planned not in ("", str(tensor.dtype).removeprefix("torch."))
    ]
    if wrong:
        name, dtype, role, planned = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        what = f"{role} weight is {dtype}; planned: {planned}{others}"
        if role == "rotary":
            what = f"rotary table is {dtype}; must be {planned}, or positions are rounded{others}"
        remedy = "find what cast the model after loading (cast parameters, never the whole module)"
        raise DtypeContractError(what, where=name, remedy=remedy, code="precision.contract_broken")


def _tensors(model: torch.nn.Module, plan: PrecisionPlan) -> Iterator[tuple[str, torch.Tensor, str, str]]:
    """(name, tensor, role, planned dtype or "") of every parameter, then every buffer."""
    for name, parameter in model.named_parameters():
        role, planned = _planned(name, parameter, plan)
        yield name, parameter, role, planned if parameter.is_floating_point() else ""
    for name, buffer in model.named_buffers():
        if _ROTARY.search(name):
            yield name, buffer, "rotary", CONFIG_NAMES["fp32"]
        else:
            yield name, buffer, "buffer", ""


def _planned(name: str, parameter: torch.Tensor, plan: PrecisionPlan) -> tuple[str, str]:
    if stays_fp32(name, parameter, plan.keep_fp32.value):
        return "kept fp32", CONFIG_NAMES["fp32"]
    if parameter.requires_grad:
        return "trained", CONFIG_NAMES[plan.trainable.value]
    if is_adapter_weight(name):
        return "adapter", CONFIG_NAMES[plan.trainable.value]
    return "frozen", CONFIG_NAMES[plan.storage.value]
