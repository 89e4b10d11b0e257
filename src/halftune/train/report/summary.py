"""The head of the report: what was run, how it ended, and its numbers at a glance."""

from __future__ import annotations

from typing import Any

from halftune.config.sections.method import METHOD_SECTIONS
from halftune.train.quantities import count, duration, short_count, significant, size
from halftune.train.report.record import Record


def sentence(record: Record) -> str:
    """What the run is, in one sentence."""
    model, adapter = record.setting("model", "name_or_path"), record.setting("adapter") or {}
    if not model:
        return ""
    method = METHOD_SECTIONS.get(record.setting("method", "type") or "sft")
    how = method.title if method else "Training"
    kind = f"with a LoRA adapter of rank {adapter.get('rank')}" if adapter.get("type") == "lora" else "in full"
    words = [f"{how} of {model} {kind}"]
    if compute := _value(record.plan, "precision", "compute"):
        words.append(f"computed in {compute}")
    if device := _value(record.plan, "device"):
        words.append(f"on {record.plan.get('machine') or device.upper()}")
    return ", ".join(words) + "."


Card = tuple[str, str, str] | None  # name, value, note


def cards(record: Record) -> list[Card]:
    """The numbers at a glance; a number that the run does not have leaves no gap."""
    shown = [_loss(record), _evaluation(record), *_work(record), _memory(record), _model(record)]
    return [card for card in shown if card is not None]


def _loss(record: Record) -> Card:
    if not record.training:
        return None
    first, last = record.training[0], record.training[-1]
    note = f"{significant(first['loss'])} at step {count(first['step'])}" if first is not last else ""
    return "final loss", significant(last["loss"]), note


def _evaluation(record: Record) -> Card:
    known = [line for line in record.evaluations if line["eval_loss"] is not None]
    if not known:
        return None
    best = min(known, key=lambda line: line["eval_loss"])
    return (
        "best eval loss",
        significant(best["eval_loss"]),
        f"at step {count(best['step'])}, of {len(known)} evaluations",
    )


def _work(record: Record) -> list[Card]:
    lines = record.training
    if not lines:
        return []
    totals = {name: sum(line.get(name) or 0 for line in lines) for name in ("tokens", "tokens_real", "tokens_trained")}
    seconds = sum(line.get("seconds") or 0 for line in lines)
    evaluating = sum(line.get("eval_seconds") or 0 for line in record.evaluations)
    cards: list[Card] = [("steps", count(lines[-1]["step"]), f"{lines[-1].get('epoch', 0):.2f} epochs")]
    if totals["tokens"]:
        real, trained = (totals[name] / totals["tokens"] for name in ("tokens_real", "tokens_trained"))
        cards.append(("tokens fed", count(totals["tokens"]), f"{real:.0%} not padding, {trained:.0%} trained"))
    if seconds:
        speeds = [count(totals[name] / seconds) for name in ("tokens", "tokens_real", "tokens_trained")]
        cards.append(("tokens per second", speeds[0], f"{speeds[1]} not padding, {speeds[2]} trained"))
        note = f"and {duration(evaluating)} in evaluations" if evaluating else ""
        cards.append(("time in steps", duration(seconds), note))
    return cards


def _memory(record: Record) -> Card:
    peaks = [line["memory_bytes"] for line in record.training if line.get("memory_bytes")]
    if not peaks:
        return None
    where = "resident memory of the process" if _value(record.plan, "device") == "cpu" else "allocated on one device"
    return "peak memory", size(max(peaks)), where


def _model(record: Record) -> Card:
    total, trained = _value(record.plan, "num_parameters"), _value(record.plan, "num_trainable")
    if not isinstance(total, int) or not isinstance(trained, int):
        return None
    share = f"{trained / total:.2%} of {short_count(total)}" if 0 < trained < total else "all of them"
    return "trained parameters", short_count(trained), share


def _value(plan: dict[str, Any], *keys: str) -> Any:
    """The value of a decision of the plan, or None."""
    found: Any = plan
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found.get("value") if isinstance(found, dict) else found
