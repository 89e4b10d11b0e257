"""Results as a text table: a row per number, a column per configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Spell = Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.0f} MiB"


ROWS: tuple[tuple[str, str, Spell], ...] = (
    ("tokens/s, with padding", "tokens_per_second", _count),
    ("tokens/s, without padding", "real_per_second", _count),
    ("tokens/s, trained", "trained_per_second", _count),
    ("tokens/CPU-s, with padding", "tokens_per_cpu_second", _count),
    ("tokens/CPU-s, without padding", "real_per_cpu_second", _count),
    ("tokens/CPU-s, trained", "trained_per_cpu_second", _count),
    ("step, median", "step_seconds", _seconds),
    ("step, 10th percentile", "step_seconds_p10", _seconds),
    ("step, 90th percentile", "step_seconds_p90", _seconds),
    ("step, CPU time, median", "step_cpu_seconds", _seconds),
    ("MFU", "mfu", "{:.1%}".format),
    ("peak memory of the process", "peak_rss_bytes", _bytes),
    ("peak memory of the device", "peak_device_bytes", _bytes),
    ("CPU time to the first step", "cpu_seconds_to_first_step", _seconds),
    ("wall time to the first step", "seconds_to_first_step", _seconds),
)


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Rows of cells as lines with aligned columns; with ``right``, all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    adjust = [str.rjust if right and column else str.ljust for column in range(len(widths))]
    return [
        "  ".join(fit(cell, width) for fit, cell, width in zip(adjust, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def text(results: list[dict[str, Any]], *, steps: int, warm_up: int) -> str:
    """Return the table with notes; ratios are relative to the first column."""
    runs = len(results[0]["runs"])
    columns = [[""]] + [[result["label"]] for result in results]
    for name, key, spell in ROWS:
        if key not in results[0]["median"]:
            continue
        columns[0].append(name)
        for index, result in enumerate(results):
            ratio = f"  {result['ratio'][key]:.2f}×" if index and key in result["ratio"] else ""
            value = result["median"].get(key)
            columns[index + 1].append("–" if value is None else f"{spell(value)}{ratio}")
    lines = aligned(list(zip(*columns, strict=True)), right=True)
    last = results[0]["runs"][-1]
    notes = [
        f"{runs} run{'s' if runs > 1 else ''} each, {steps} steps after {warm_up} warm-up steps; medians over runs; "
        f"{last['device']}, {last['threads']} thread(s), torch {last['torch']}.",
    ]
    return "\n".join([*lines, "", *notes, *map(_note, results)])


def _note(result: dict[str, Any]) -> str:
    run = result["runs"][-1]
    return (
        f"{result['label']}: {run['compute']}, attention {run['attention']}, "
        f"{'packed' if run['packing'] else 'not packed'}. MFU: {run['mfu_convention']}; "
        f"of {run['peak_flops'] / 1e9:,.0f} GFLOP/s ({run['peak_flops_source']})."
    )
