"""Markdown tables of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]
OURS = "halftune"


def speeds(results: list[Result]) -> str:
    """Per model, precision and packing: medians over rounds, and ours against the best of the others."""
    parts = []
    for model, precision, packed in dict.fromkeys((r["model"], r["precision"], r["packed"]) for r in results):
        chosen = [r for r in results if (r["model"], r["precision"], r["packed"]) == (model, precision, packed)]
        rows = {name: [r for r in chosen if r["framework"] == name] for name in {r["framework"]: 0 for r in chosen}}
        speed = {name: _median(some, "tokens_per_cpu_second") for name, some in rows.items()}
        best = max((value for name, value in speed.items() if name != OURS and value), default=None)
        parts.append(f"**{model}, {precision}, {'packed' if packed else 'not packed'}**\n")
        parts.append(
            "| framework | tokens / CPU-s | against the best other | step, CPU-s | tokens a step (fed) | "
            "CPU-s to first step | peak RSS, GB | weights, trained, autocast | failed |"
        )
        parts.append("|---|---:|---:|---:|---:|---:|---:|---|---:|")
        for name, some in sorted(rows.items(), key=lambda item: -(speed[item[0]] or 0)):
            own = speed[name]
            ratio = f"{own / best:.2f}" if own and best else "–"
            memory = _median(some, "peak_rss_bytes")
            cells = [
                name,
                _number(own, "{:,.0f}"),
                ratio,
                _number(_median(some, "step_cpu_seconds"), "{:.3f}"),
                f"{_number(_median(some, 'real_per_step'), '{:,.0f}')} "
                f"({_number(_median(some, 'tokens_per_step'), '{:,.0f}')})",
                _number(_median(some, "cpu_to_first_step"), "{:.1f}"),
                _number(memory / 1e9 if memory else None, "{:.2f}"),
                _dtypes(some[-1]),
                str(sum(r["rc"] != 0 for r in some)),
            ]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def same_work(results: list[Result]) -> str:
    """What was computed with a learning rate of nothing: trained weights, dtypes, tokens, mean loss."""
    lines = [
        "| model, precision, packed | framework | trained weights | weights, trained, autocast | optimizer | "
        "tokens a step (fed) | first loss | mean loss |",
        "|---|---|---:|---|---|---:|---:|---:|",
    ]
    for r in results:
        case = f"{r['model']}, {r['precision']}{', packed' if r['packed'] else ''}"
        tokens = f"{_number(r.get('real_per_step'), '{:,.0f}')} ({_number(r.get('tokens_per_step'), '{:,.0f}')})"
        cells = [
            case,
            r["framework"],
            _number(r.get("trained"), "{:,}"),
            _dtypes(r),
            r.get("optimizer", "–"),
            tokens,
            _number(r["first_loss"], "{:.4f}"),
            _number(r["mean_loss"], "{:.4f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _median(results: Iterable[Result], key: str) -> float | None:
    values = [r[key] for r in results if r.get(key) is not None and r["rc"] == 0]
    return statistics.median(values) if values else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _dtypes(result: Result) -> str:
    if "weights" not in result:
        return "–"
    return f"{result['weights']}, {'/'.join(result['trained_dtypes'])}, {result['autocast']}"
