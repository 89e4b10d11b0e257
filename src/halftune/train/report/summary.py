"""The report's summary: what was run and how it ended, its data, time and surroundings."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from halftune.config.sections.method import METHOD_SECTIONS
from halftune.core.quantities import count, duration, short_count, significant, size
from halftune.core.templates import render
from halftune.train.report.series import HERE, Record

_SAMPLES_SHOWN = 8  # row numbers listed per reason
_SHOWN = 15  # operators on the page; the trace has all
Card = tuple[str, str, str] | None  # name, value, note


def dataset(record: Record) -> Markup:
    """The section on data."""
    if not record.data:
        return Markup()
    train, evaluation = record.data.get("train", ()), record.data.get("eval", ())
    sources = [("training", source) for source in train] + [("evaluation", source) for source in evaluation]
    return render(
        HERE,
        "data",
        sources=sources,
        summary=_summary(record.data),
        reasons=[row for _, source in sources for row in _reasons(source)],
        lengths=_lengths([source["lengths"] for source in train if source.get("lengths")]),
        count=count,
    )


def _summary(data: dict[str, Any]) -> list[str]:
    lines = []
    if data.get("train_samples"):
        lines.append(f"{count(data['train_samples'])} samples an epoch")
    if data.get("eval_samples"):
        lines.append(f"{count(data['eval_samples'])} for evaluation")
    if data.get("max_length"):
        lines.append(f"at most {count(data['max_length'])} tokens each")
    fed = data.get("efficiency") or {}
    if fed:
        lines.append(
            f"padded batches of {fed['batch']} are {fed['padded']:.0%} real tokens, packed rows {fed['packed']:.0%}"
        )
    return lines


def _reasons(source: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What happened to rows: ``(dropped | cut | note, how many, why, their numbers)``."""
    rows = []
    for kind, word in (("dropped", "dropped"), ("truncated", "cut"), ("notes", "note")):
        for reason, found in (source.get(kind) or {}).items():
            places = [str(place) for place in found.get("rows", ())][:_SAMPLES_SHOWN]
            more = ", …" if places and found.get("count", 0) > len(places) else ""
            rows.append((word, count(found.get("count", 0)), reason, ", ".join(places) + more))
    for column, number in (source.get("gaps") or {}).items():
        rows.append(("note", count(number), f"column {column} is missing, so empty there", ""))
    if source.get("unused"):
        rows.append(("note", "", f"columns that nothing reads: {', '.join(source['unused'])}", ""))
    return rows


def _lengths(listed: list[list[list[int]]]) -> list[tuple[int, int]]:
    """``(bound, samples)`` of all training sources; bins of different sources are laid over the widest ones."""
    if not listed:
        return []
    bounds = [bound for bound, _ in max(listed, key=lambda lengths: lengths[-1][0])]
    counts: Counter[int] = Counter()
    for lengths in listed:
        for bound, number in lengths:
            counts[next(i for i, wide in enumerate(bounds) if bound <= wide)] += number
    return [(bound, counts[i]) for i, bound in enumerate(bounds)] if any(counts.values()) else []


def machine(record: Record) -> Markup:
    """The section on environment and configuration."""
    environment = record.environment
    if not environment and not record.config_text:
        return Markup()
    return render(
        HERE,
        "environment",
        rows=[*_hardware(environment.get("hardware") or {}), *_software(environment)],
        packages=environment.get("packages") or {},
        git=environment.get("git"),
        command=shlex.join(environment.get("command") or ()),
        data=environment.get("data") or {},
        config_text=record.config_text,
    )


def _hardware(hardware: dict[str, Any]) -> list[tuple[str, str]]:
    rows, devices = [], hardware.get("devices", ())
    for name in dict.fromkeys(device["name"] for device in devices):
        same = [device for device in devices if device["name"] == name]
        times = f"{len(same)} × " if len(same) > 1 else ""
        rows.append(("device", f"{times}{name}, {size(same[0]['memory_bytes'])}"))
    if hardware.get("cpu_cores"):
        rows.append(("host", f"{hardware['cpu_cores']} cores, {size(hardware['host_memory_bytes'])}"))
    return rows + [("note", note) for note in hardware.get("notes", ())]


def _software(environment: dict[str, Any]) -> list[tuple[str, str]]:
    python = environment.get("python")
    return [
        ("halftune", environment.get("halftune", "")),
        ("Python", f"{python} on {environment.get('platform', '')}" if python else ""),
    ]


def profile(record: Record) -> Markup:
    """The section on the profile, or nothing where none was recorded (``logging.profile``)."""
    found = record.profile
    if not found:
        return Markup()
    on_device = any(row["device_seconds"] for row in found["groups"])
    return render(HERE, "profile", found=found, on_device=on_device, shown=_SHOWN, duration=duration, size=size)


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
    metric = record.setting("training", "metric_for_best") or "eval_loss"
    known = [line for line in record.evaluations if line.get(metric) is not None]
    if not known:
        return None
    best = min(known, key=lambda line: line[metric])
    return (
        f"best {metric.replace('_', ' ', 2)}",
        significant(best[metric]),
        f"at step {count(best['step'])}, of {len(known)} evaluations",
    )


def _total(lines: Iterable[dict[str, Any]], name: str) -> float:
    return sum(line.get(name) or 0 for line in lines)


def _work(record: Record) -> list[Card]:
    lines = record.training
    if not lines:
        return []
    totals = {name: _total(lines, name) for name in ("tokens", "tokens_real", "tokens_trained")}
    seconds, evaluating = _total(lines, "seconds"), _total(record.evaluations, "eval_seconds")
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
    total = sum(part["parameters"] for part in record.plan.get("parts", ())) or total  # with the towers
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
