"""The report's plan: number formats, attention, batch and memory with their reasons, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from halftune.core.quantities import count, short_count, size
from halftune.core.templates import render
from halftune.train.report.series import HERE, Record

_SHOWN = 10  # rows that are shown as they are; more are summed up


def dtypes(record: Record) -> Markup:
    """The section on dtypes as they are."""
    rows = record.dtypes.get("rows", ())
    if not rows and not record.guard:
        return Markup()
    return render(
        HERE,
        "dtypes",
        rows=rows,
        wrong=[row["name"] for row in rows if not row.get("as_planned", True)],
        tensors=sum(row.get("tensors", 0) for row in rows),
        groups=_groups(rows),
        guard=record.guard,
        shown=_SHOWN,
        count=count,
        short_count=short_count,
    )


def _groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one role, dtype and planned dtype as one."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        same = {name: str(row.get(name, "")) for name in ("role", "dtype", "planned")}
        total = groups.setdefault(tuple(same.values()), {**same, "tensors": 0, "elements": 0})
        for name in ("tensors", "elements"):
            total[name] += row.get(name, 0)
    return list(groups.values())


# rows of the precision table in the order in which a number travels
_PRECISION = (
    ("storage", "frozen weights are loaded as"),
    ("trainable", "trained weights"),
    ("compute", "matmuls and attention"),
    ("autocast", "autocast"),
    ("grad_scaler", "loss scaler"),
    ("reduce", "gradient all-reduce"),
    ("optimizer_state", "optimizer moments"),
    ("tf32", "TF32 for fp32 matmuls"),
    ("saved", "the result is saved as"),
    ("keep_fp32", "names kept in fp32"),
)
_ATTENTION = (
    ("softmax", "softmax attention"),
    ("provider", "carried out by"),
    ("varlen", "packed rows"),
    ("linear", "linear attention"),
)
_MODEL = (("num_parameters", "parameters"), ("num_trainable", "trained parameters"), ("towers", "towers"))
_FLAGS = ("packing", "gradient_checkpointing", "fused_layers")
_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "overhead")
_GUARDS = {
    "cast": "an operand that left the planned dtype is cast and counted",
    "strict": "an operand that left the planned dtype stops the run",
    "off": "operands are not looked at",
}
Row = tuple[str, Any, str]  # name, value, reason


def decisions(record: Record) -> Markup:
    """The section on the plan."""
    plan = record.plan
    if not plan:
        return Markup()
    precision, attention, batch = (_tree(plan, name) for name in ("precision", "attention", "batch"))
    guard = attention.get("guard")
    guarded = [("guard", guard, _GUARDS.get(guard, ""))] if guard else []
    return render(
        HERE,
        "plan",
        warnings=list(dict.fromkeys([*plan.get("warnings", ()), *precision.get("warnings", ())])),
        decided=[
            ("Number formats", _decided(_PRECISION, precision)),
            ("Attention", [*_decided(_ATTENTION, attention), *guarded]),
            ("Device, batch, model", _batch(plan, batch)),
        ],
        rejected=[pair for pair in attention.get("rejected", ()) if len(pair) == 2],
        memory=_memory(record),
        size=size,
    )


def _tree(plan: dict[str, Any], name: str) -> dict[str, Any]:
    found = plan.get(name)
    return found if isinstance(found, dict) else {}


def _decided(names: tuple[tuple[str, str], ...], tree: dict[str, Any]) -> list[Row]:
    return [(words, tree[name]["value"], tree[name]["reason"]) for name, words in names if _is_choice(tree.get(name))]


def _batch(plan: dict[str, Any], batch: dict[str, Any]) -> list[Row]:
    rows = _decided((("device", "device"), ("distribution", "distribution")), plan)
    if "micro_batch" in batch:
        rows.append(_step(batch))
    packed = _tree(batch, "packing").get("value")
    rows += _decided(() if packed else (("grouped", "grouping"),), batch)
    rows += _decided(tuple((name, name.replace("_", " ")) for name in _FLAGS), batch)
    for words, value, reason in _decided(_MODEL, plan):
        rows.append((words, value if isinstance(value, str) else short_count(value), reason))
    return rows


def _step(batch: dict[str, Any]) -> Row:
    """How many rows, or tokens, a step has."""
    micro, accumulation, world = (batch.get(name, 1) for name in ("micro_batch", "accumulation", "world_size"))
    split = f"{accumulation} forwards × {world} {'process' if world == 1 else 'processes'}"
    most = count(batch.get("tokens_per_step", 0))
    if batch.get("tokens_per_batch") and not _tree(batch, "packing").get("value"):
        each = f"as many rows as {count(batch['tokens_per_batch'])} tokens hold × {split}"
        return "tokens per step", most, f"at most: {each}"
    return "rows per step", micro * accumulation * world, f"{micro} rows × {split}, at most {most} tokens"


def _memory_lines(memory: dict[str, Any], estimate: float, measured: float, available: float) -> Iterator[str]:
    yield f"Estimated {size(estimate)}"
    if measured:
        yield f"measured {size(measured)} ({measured / estimate - 1:+.0%})".replace("-", "−")
    if available:
        yield f"{size(available)} on the device"
    if isinstance(verdict := memory.get("verdict"), dict):
        yield f"{verdict['value']}: {verdict['reason']}"
    if memory.get("checkpoint_disk"):
        yield f"{size(memory['checkpoint_disk'])} of disk per checkpoint"


def _memory(record: Record) -> dict[str, Any] | None:
    """The parts of the estimate as shares of a bar, and what was measured; None where nothing was estimated."""
    memory = _tree(record.plan, "memory")
    parts = [(name, float(memory[name])) for name in _PARTS if memory.get(name)]
    estimate = sum(amount for _, amount in parts) - float(memory.get("overlap") or 0)
    if not estimate:
        return None
    measured = max((line["memory_bytes"] for line in record.training if line.get("memory_bytes")), default=0)
    available = float(memory.get("available") or 0)
    # a run that fills a small share of a big device would be a sliver
    whole = available if available and estimate > available / 4 else max(estimate, measured) * 1.15
    lines = list(_memory_lines(memory, estimate, measured, available))
    shares, start = [], 0.0
    for name, amount in parts:
        shares.append({"name": name, "bytes": amount, "start": start / whole, "share": amount / whole})
        start += amount
    return {"parts": shares, "measured": measured, "marker": min(measured / whole, 1), "lines": lines}


def _is_choice(value: Any) -> bool:
    return isinstance(value, dict) and "value" in value and "reason" in value
