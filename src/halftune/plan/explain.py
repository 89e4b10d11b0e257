"""The plan as a table that a person reads: grouped, every decision with its reason, safe at 80 columns."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from halftune.core.choice import Choice

if TYPE_CHECKING:  # a plan prints itself with this module
    from halftune.plan.tree import MemoryPlan, Plan

GIB, MIB = 2**30, 2**20
WIDEST = 110
_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "overhead")
_BAR = 24

Row = tuple[str, str, str]
_GUARD = {
    "cast": "an operand that left the planned dtype is cast and logged",
    "strict": "an operand that left the planned dtype stops the run",
    "off": "operands are not looked at",
}
# what per_device_train_batch_size counts, where it is not rows
_COUNTED = {
    **dict.fromkeys(("dpo", "simpo", "orpo", "cpo", "reward"), "pairs"),
    "kto": "groups of answers",
    "grpo": "prompts with all their answers",
}


def explain(plan: Plan, *, width: int | None = None, footer: Iterable[str] = ()) -> str:
    """The plan as text.

    Args:
        plan: what to show.
        width: columns; the terminal's by default, 110 at most.
        footer: further lines under the table, e.g. a time estimate.
    """
    from rich import box
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    columns = width or min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    stream = io.StringIO()
    console = Console(file=stream, width=columns, force_terminal=False, color_system=None, legacy_windows=False)
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, expand=True, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=columns // 3)
    table.add_column(overflow="fold", ratio=1)
    for title, rows in _groups(plan):
        table.add_row(Text(title.upper()), "", "")
        for label, value, reason in rows:
            table.add_row(Text(f"  {label}"), Text(value), Text(reason))
        table.add_section()
    console.print(Text(f"Plan for {plan.model}"))
    console.print(Text(f"on {plan.machine}"))
    console.print(table)
    for warning in plan.warnings:
        console.print(Padding(Text(f"! {warning}"), (0, 0, 0, 0)))
    for line in footer:
        console.print(Text(line))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _groups(plan: Plan) -> list[tuple[str, list[Row]]]:
    return [
        ("method", [_row("method", plan.method.name), _row("reference", plan.method.reference), *_head(plan)]),
        ("device", [_row("device", plan.device), *_processes(plan)]),
        ("number formats", _formats(plan)),
        ("attention", _attention(plan)),
        ("batch", _batch(plan)),
        ("size", _size(plan)),
        *([("parts", _parts(plan))] if plan.parts else []),
        ("memory per device", _memory(plan.memory)),
    ]


def _head(plan: Plan) -> list[Row]:
    return [] if plan.method.head.value == "tokens" else [_row("head", plan.method.head)]


def _processes(plan: Plan) -> list[Row]:
    count, parallel = plan.batch.world_size, plan.parallel
    if parallel is None:
        return [_row("processes", plan.distribution, f"{count} process")]
    on = "" if parallel.machines == 1 else f" on {parallel.machines} machines"
    rows = [_row("processes", plan.distribution, f"{count} processes{on}"), _row("strategy", plan.distribution)]
    rows[0] = (*rows[0][:2], f"one device each, {count // parallel.machines} on a machine")
    rows += [
        (f"with {name}", size(total), f"memory of one device, estimated: {verdict}")
        for name, total, verdict in parallel.memory
    ]
    if plan.distribution.value == "fsdp2":
        rows += [_row("gathered", parallel.param), _row("buffers", parallel.buffer)]
        rows.append(_row("sum each pass", parallel.sync_each))
        if parallel.gather_once is not None:
            rows.append(_row("gather once", parallel.gather_once))
    return [*rows, _row("summed", parallel.reduce)]


def _formats(plan: Plan) -> list[Row]:
    precision = plan.precision
    names = ("compute", "storage", "trainable", "optimizer_state", "reduce", "saved")
    rows = [_row(name.replace("_", " "), getattr(precision, name)) for name in names]
    rows += [_row(name.replace("_", " "), getattr(precision, name)) for name in ("autocast", "grad_scaler", "tf32")]
    if precision.linear is not None:
        rows.append(_row("linear", precision.linear))
    if precision.experts is not None:
        rows.append(_row("experts", precision.experts))
    kept = precision.keep_fp32
    if plan.weights.format.value != "none":
        rows.append(_row("weights", plan.weights.format))
    return [*rows, ("keep fp32", ", ".join(kept.value) or "-", kept.reason)]


def _attention(plan: Plan) -> list[Row]:
    attention = plan.attention
    rows = [_row("softmax", attention.softmax), _row("provider", attention.provider)]
    if plan.batch.packing.value:
        rows.append(_row("packed rows", attention.varlen))
    if attention.linear.value != "none":
        rows.append(_row("linear layers", attention.linear))
        rows += [(f"not {name}", "", reason) for name, reason in attention.rejected_linear]
    rows += [(f"not {name}", "", reason) for name, reason in attention.rejected]
    return [*rows, ("guard", attention.guard, _GUARD[attention.guard])]


def _batch(plan: Plan) -> list[Row]:
    batch = plan.batch
    padded = not batch.packing.value
    counted = _COUNTED.get(plan.method.name.value, "rows")
    forward = (
        f"{batch.micro_batch} {counted}" if batch.tokens_per_batch is None else f"{batch.tokens_per_batch:,} tokens"
    )
    if batch.tokens_per_batch is not None and not padded:
        forward = f"{batch.micro_batch} rows (that is what {batch.tokens_per_batch:,} tokens hold)"
    split = f"{forward} × {batch.accumulation} × {batch.world_size}"
    return [
        ("tokens per step", f"{batch.tokens_per_step:,}", f"at most: {split} (device, accumulation, processes)"),
        _row("packing", batch.packing),
        *([_row("grouping", batch.grouped)] if padded else []),
        _row("checkpointing", batch.gradient_checkpointing),
        _row("fused layers", batch.fused_layers),
    ]


def _size(plan: Plan) -> list[Row]:
    total = plan.all_parameters
    share = plan.num_trainable.value / max(total.value, 1)
    trained = f"{plan.num_trainable.value:,} ({share:.2%})" if share < 1 else f"{plan.num_trainable.value:,}"
    return [
        ("parameters", f"{total.value:,}", total.reason),
        ("trained", trained, plan.num_trainable.reason),
        *([_row("optimizer", plan.optimizer)] if plan.optimizer is not None else []),
        *([_row("added tokens", plan.added_tokens)] if plan.added_tokens is not None else []),
        *([_row("towers", plan.towers)] if plan.towers is not None else []),
        ("checkpoint", size(plan.memory.checkpoint_disk), "on disk, each: trained weights and optimizer state"),
    ]


def _parts(plan: Plan) -> list[Row]:
    rows: list[Row] = []
    for part in plan.parts:
        mode = part.trained
        rows.append((part.name, mode.value, f"{part.parameters:,} parameters; {mode.reason}"))
        rows += [_row("  dtype", part.dtype), _row("  attention", part.attention), _row("  keep fp32", part.keep_fp32)]
        if part.learning_rate is not None:
            rows.append(_row("  learning rate", part.learning_rate, f"{part.learning_rate.value:g}"))
    return [*rows, *([_row("media features", plan.features)] if plan.features is not None else [])]


def _memory(memory: MemoryPlan) -> list[Row]:
    rows = [_part(name, getattr(memory, name), memory) for name in _PARTS]
    if memory.overlap > memory.total // 100:
        rows.append(("overlap", f"-{size(memory.overlap)}", "gradients take the place of freed activations"))
    return [*rows, ("total", size(memory.total), _bar(memory.total, memory.available)), _row("verdict", memory.verdict)]


def _part(name: str, part: int, memory: MemoryPlan) -> Row:
    return (name, size(part), _bar(part, max(memory.available, memory.total)))


def _bar(part: int, whole: int) -> str:
    """A bar as long as the part's share of the device; more than the whole device ends in an arrow."""
    share = part / whole
    filled = min(_BAR, round(share * _BAR))
    return ("█" * filled).ljust(_BAR, "·") + (" ▶" if share > 1 else "")


def _row(label: str, choice: Choice, value: str | None = None) -> Row:
    said = (
        {True: "on", False: "off"}.get(choice.value, choice.value) if isinstance(choice.value, bool) else choice.value
    )
    return (label, value or str(said), choice.reason)


def size(count: int) -> str:
    """Bytes as a person says them."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
