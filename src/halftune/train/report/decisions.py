"""The plan with its reasons: number formats, attention, batch, and the memory estimate beside what was measured."""

from __future__ import annotations

from typing import Any

from halftune.train.quantities import count, short_count, size
from halftune.train.report.chart import divided_bar
from halftune.train.report.html import Content, Html, element, section, table
from halftune.train.report.record import Record

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
_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "overhead")


def decisions(record: Record) -> Html:
    """The section on the plan."""
    plan = record.plan
    precision, attention, batch = (_tree(plan, name) for name in ("precision", "attention", "batch"))
    warnings = [*plan.get("warnings", ()), *precision.get("warnings", ())]
    return section(
        "plan",
        "Plan",
        element("ul", [element("li", text) for text in dict.fromkeys(warnings)], class_="warnings")
        if warnings
        else None,
        _decided("Number formats", _PRECISION, precision),
        _decided("Attention", _ATTENTION, attention, guard=attention.get("guard")),
        _rejected(attention),
        _batch(plan, batch),
        _memory(record),
    )


def _tree(plan: dict[str, Any], name: str) -> dict[str, Any]:
    found = plan.get(name)
    return found if isinstance(found, dict) else {}


def _decided(title: str, names: tuple[tuple[str, str], ...], tree: dict[str, Any], guard: str | None = None) -> Html:
    rows: list[tuple[Content, ...]] = [
        (words, _word(tree[name]["value"]), tree[name]["reason"]) for name, words in names if _is_choice(tree.get(name))
    ]
    if guard:
        rows.append(("guard", _word(guard), _GUARDS.get(guard, "")))
    return _titled(title, table(("", "decision", "because"), rows))


_GUARDS = {
    "cast": "an operand that left the planned dtype is cast and counted",
    "strict": "an operand that left the planned dtype stops the run",
    "off": "operands are not looked at",
}


def _rejected(attention: dict[str, Any]) -> Html:
    rows: list[tuple[Content, ...]] = [
        (element("code", pair[0]), pair[1]) for pair in attention.get("rejected", ()) if len(pair) == 2
    ]
    return _titled("Attention backends not taken", table(("backend", "because"), rows))


def _batch(plan: dict[str, Any], batch: dict[str, Any]) -> Html:
    rows: list[tuple[Content, ...]] = []
    for name, tree in (("device", plan), ("distribution", plan)):
        if _is_choice(tree.get(name)):
            rows.append((name, _word(tree[name]["value"]), tree[name]["reason"]))
    if "micro_batch" in batch:
        micro, accumulation, world = (batch.get(name, 1) for name in ("micro_batch", "accumulation", "world_size"))
        split = f"{accumulation} forwards × {world} {'process' if world == 1 else 'processes'}"
        most = count(batch.get("tokens_per_step", 0))
        if batch.get("tokens_per_batch") and not _tree(batch, "packing").get("value"):
            each = f"as many rows as {count(batch['tokens_per_batch'])} tokens hold × {split}"
            rows.append(("tokens per step", _word(most), f"at most: {each}"))
        else:
            each = f"{micro} rows × {split}, at most {most} tokens"
            rows.append(("rows per step", _word(micro * accumulation * world), each))
    if _is_choice(batch.get("grouped")) and not _tree(batch, "packing").get("value"):
        rows.append(("grouping", _word(batch["grouped"]["value"]), batch["grouped"]["reason"]))
    for name in ("packing", "gradient_checkpointing", "fused_layers"):
        if _is_choice(batch.get(name)):
            rows.append((name.replace("_", " "), _word(batch[name]["value"]), batch[name]["reason"]))
    for name, words in _MODEL:
        if _is_choice(plan.get(name)):
            value = plan[name]["value"]
            said = _word(value) if isinstance(value, str) else element("b", short_count(value))
            rows.append((words, said, plan[name]["reason"]))
    return _titled("Device, batch, model", table(("", "decision", "because"), rows))


def _memory(record: Record) -> Html:
    memory = _tree(record.plan, "memory")
    parts = [(name, float(memory.get(name) or 0), size(memory.get(name) or 0)) for name in _PARTS]
    estimate = sum(amount for _, amount, _ in parts) - float(memory.get("overlap") or 0)
    if not estimate:
        return Html("")
    peaks = [line["memory_bytes"] for line in record.training if line.get("memory_bytes")]
    measured = max(peaks) if peaks else None
    marker = (float(measured), f"measured {size(measured)}") if measured else None
    available = float(memory.get("available") or 0)
    # a run that fills a small share of a big device would be a sliver
    whole = available if available and estimate > available / 4 else max(estimate, measured or 0) * 1.15
    lines = [f"Estimated {size(estimate)}"]
    if measured:
        lines.append(f"measured {size(measured)} ({measured / estimate - 1:+.0%})".replace("-", "−"))
    if available:
        lines.append(f"{size(available)} on the device")
    verdict = memory.get("verdict")
    if isinstance(verdict, dict):
        lines.append(f"{verdict['value']}: {verdict['reason']}")
    if memory.get("checkpoint_disk"):
        lines.append(f"{size(memory['checkpoint_disk'])} of disk per checkpoint")
    return _titled(
        "Memory of one device", [divided_bar(parts, whole, marker), element("p", " · ".join(lines), class_="note")]
    )


def _titled(title: str, content: Content) -> Html:
    return Html(element("h3", title) + element("div", content)) if content else Html("")


def _is_choice(value: Any) -> bool:
    return isinstance(value, dict) and "value" in value and "reason" in value


def _word(value: Any) -> Content:
    """A decision's value: on or off for switches, names as code, none for nothing."""
    if isinstance(value, bool):
        return element("b", "on" if value else "off", class_="on" if value else "off")
    if isinstance(value, list):
        return [element("code", item, class_="item") for item in value] or element("b", "none", class_="off")
    return element("code", value) if isinstance(value, str) else element("b", value)
