"""``halftune bench --paper``: predicts the speed of recipes on GPUs that need not be there."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from halftune.bench.paper.kept import keep
from halftune.config.load import load_config
from halftune.config.recipe_facts import model_facts
from halftune.core.errors import ConfigError
from halftune.hardware import Hardware
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.plan.duration import Pace, duration

if TYPE_CHECKING:
    from halftune.bench.paper.report import PaperReport


def predict(args: argparse.Namespace) -> int:
    """Profile every recipe and variant on paper for every machine and print the reports.

    Raises:
        ConfigError: no machine is named, or not one price for each.
        HalftuneError: a recipe cannot be planned or profiled for it.
    """
    machines = _machines(args)
    found: list[dict[str, Any]] = []
    for config in args.config:
        for variant in ("", *args.vary):
            for hardware, price in machines:
                found.append({"config": config, "variant": variant, **_one(args, config, variant, hardware, price)})
    if args.json:
        print(json.dumps({"results": found}, indent=1))
    elif len(found) > 1:
        print("\n" + _table(found))
    return 0


def _machines(args: argparse.Namespace) -> list[tuple[Hardware, float | None]]:
    """The machines, each with the price of an hour or None."""
    if not args.hardware:
        what = "--paper needs a machine to predict for"
        raise ConfigError(what, remedy="add --hardware, as in --hardware h200", code="cli.option_conflict")
    names, packages = args.hardware.split(","), dict(entry.partition("=")[::2] for entry in args.packages)
    prices = args.price or [None] * len(names)
    if len(prices) != len(names):
        what = f"{len(names)} machines and {len(prices)} prices"
        raise ConfigError(what, where="--price", remedy="give one price for each machine", code="cli.option_conflict")
    return [(lookup(name.strip(), packages), price) for name, price in zip(names, prices, strict=True)]


def _one(
    args: argparse.Namespace, config: str, variant: str, hardware: Hardware, price: float | None
) -> dict[str, Any]:
    """Profile a variant on a machine, print it unless JSON is asked for, and keep its speed for ``plan``."""
    from halftune.bench.paper.report import profile  # imports torch

    loaded = load_config(config, [*args.overrides, *args.set, *variant.split()])
    facts, device = model_facts(loaded), hardware.devices[0]
    plan = resolve(loaded.run, hardware, facts)
    report = profile(loaded.run, plan, hardware, sample=args.sample_length)
    data = {**report.to_dict(), **_extra(args, loaded.run, plan, hardware, report, price)}
    if args.sample_length is None and report.fits:
        speed, peak = report.tokens_per_second, report.recorded.peak
        keep(loaded.run, plan, facts, device, tokens_per_second=speed, peak=peak)
    if not args.json:
        print("\n".join((*(["", variant] if variant else []), report.text())), flush=True)
        if loaded.run.training.max_steps is not None and report.fits:
            pace = Pace(report.tokens_per_second, plan.batch.tokens_per_step, None)
            print(duration(loaded.run, plan, pace, "predicted"))
        for line in _lines(data):
            print(line)
    return data


def _extra(
    args: argparse.Namespace, config: Any, plan: Any, hardware: Hardware, report: PaperReport, price: float | None
) -> dict[str, Any]:
    """The price of a million tokens, and the other tool's step, where they are asked for."""
    found: dict[str, Any] = {}
    if price is not None:
        each = price / 3600 / report.tokens_per_second * 1e6
        found["price_per_million_tokens"] = each if report.fits else None
    if args.compare:
        from halftune.bench.paper.peers import record_peer
        from halftune.bench.paper.report import profile

        made = record_peer(args.compare, config, plan, hardware.devices[0], sample=args.sample_length)
        other = profile(config, plan, hardware, recorded=made)
        speed = other.tokens_per_second
        found["compare"] = {
            "with": args.compare,
            "tokens_per_second": speed,
            "launches_per_layer": other.launches_per_layer,
            "peak_bytes": made.peak,
            "fits": other.fits,
            "ratio": report.tokens_per_second / speed,
        }
    return found


def _lines(data: dict[str, Any]) -> list[str]:
    """Price and comparison as text."""
    lines = []
    if "price_per_million_tokens" in data:
        price = data["price_per_million_tokens"]
        lines.append(f"a million tokens: {'no price, the step does not fit' if price is None else f'{price:.3g}'}")
    if other := data.get("compare"):
        memory = f"{other['peak_bytes'] / 2**30:.1f} GiB{'' if other['fits'] else ' (does not fit)'}"
        lines.append(
            f"{other['with']} with peft: {other['tokens_per_second']:,.0f} tokens/s, {memory}, "
            f"{other['launches_per_layer']:.0f} launches a layer; halftune is {other['ratio']:.2f} times as fast"
        )
    return lines


def _table(found: list[dict[str, Any]]) -> str:
    """One line for each result."""
    names = ("tokens/s", "launches/layer", "host syncs", "GiB", "per million")
    lines = ["".join((f"{'':<44}", *(f"{name:>16}" for name in names)))]
    for one in found:
        price = one.get("price_per_million_tokens")
        cells = (
            f"{one['tokens_per_second']:,.0f}",
            f"{one['launches_per_layer']:.0f}",
            str(sum(sync["count"] for sync in one["syncs"])),
            f"{one['peak_bytes'] / 2**30:.1f}{'' if one['fits'] else ' (too much)'}",
            "-" if price is None else f"{price:.3g}",
        )
        name = f"{one['machine']} {one['variant']}"
        lines.append("".join((f"{name:<44}", *(f"{cell:>16}" for cell in cells))))
    return "\n".join(lines)
