"""``halftune bench --paper``: predicts the speed of recipes on GPUs that need not be there."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halftune.bench.paper.kept import keep
from halftune.config.facts.model import ModelFacts
from halftune.config.load import LoadedConfig, load_config
from halftune.config.recipe_facts import model_facts, present_model
from halftune.core.errors import ConfigError, HalftuneError, PlanError
from halftune.core.log import get_logger
from halftune.core.optional import quick_imports
from halftune.core.quantities import significant
from halftune.hardware import Hardware
from halftune.hardware.catalogue import lookup
from halftune.launch.command import world_size
from halftune.plan import resolve
from halftune.plan.duration import Pace, duration, run_tokens

if TYPE_CHECKING:
    from halftune.bench.paper.report import PaperReport

log = get_logger(__name__)


def predict(args: argparse.Namespace) -> int:
    """Profile every recipe and variant on paper for every machine and print the reports.

    A machine that is refused leaves the others' results; the exit code is that of a refusal if all are refused.

    Raises:
        ConfigError: no machine is named, or not one price for each.
        HalftuneError: a recipe cannot be loaded; or the only result is refused: it cannot be planned or profiled.
    """
    machines = _machines(args)
    found: list[dict[str, Any]] = []
    refused: list[HalftuneError] = []
    for config in args.config:
        for variant in ("", *args.vary):
            loaded = load_config(config, [*args.overrides, *args.set, *variant.split()])
            facts, per_epoch = model_facts(loaded), cache(partial(epoch_tokens, loaded))
            for hardware, price in machines:
                name = hardware.devices[0].name if len(hardware.devices) == 1 else hardware.name
                one = {"config": config, "variant": variant, "machine": name}
                try:
                    one |= _one(args, variant, (loaded, facts, per_epoch), hardware, price)
                except HalftuneError as error:
                    refused.append(error)
                    one |= {"error": error.to_dict()}
                found.append(one)
    if refused and len(found) == 1:
        raise refused[0]
    for error, one in zip(refused, (one for one in found if "error" in one), strict=True):
        print(f"halftune bench: {_name(one)}: {error.report()}", file=sys.stderr)
    if args.json:
        print(json.dumps({"results": found}, indent=1))
    elif len(found) > 1:
        print("\n" + _table(found))
    return refused[0].exit_code if len(refused) == len(found) else 0


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
    args: argparse.Namespace,
    variant: str,
    recipe: tuple[LoadedConfig, ModelFacts, Callable[[], tuple[float, float] | None]],
    hardware: Hardware,
    price: float | None,
) -> dict[str, Any]:
    """Profile a variant on a machine, print it unless JSON is asked for, and keep its speed for ``plan``."""
    from halftune.bench.paper.report import profile, utilisation  # imports torch

    (loaded, facts, count), (device, *others) = recipe, hardware.devices
    if others:
        what = f"bench --paper predicts one GPU; {hardware.name} has {len(hardware.devices)}"
        remedy = "name each GPU alone, as in --hardware h200,a100"
        raise PlanError(what, where="--hardware", remedy=remedy, code="bench.paper_unsupported")
    plan = resolve(loaded.run, hardware, facts, world_size=world_size(loaded.run, hardware))
    report = profile(loaded.run, plan, hardware, sample=args.sample_length)
    speed = report.tokens_per_second
    used = utilisation(report, loaded.run, plan, facts)
    data = {**report.to_dict(), **used, "warnings": plan.warnings, **_compared(args, loaded, plan, hardware, report)}
    if args.sample_length is None and report.fits:
        keep(loaded.run, plan, facts, device, tokens_per_second=speed, peak=report.recorded.peak)
    counted = count() if report.fits and loaded.run.training.max_steps is None else None
    per_epoch = None if counted is None else counted[0 if plan.batch.packing.value else 1]
    pace = Pace(speed, plan.batch.tokens_per_step, per_epoch)
    tokens = run_tokens(loaded.run, plan, pace) if report.fits else None
    data["run"] = {"tokens": tokens, "seconds": tokens and tokens / speed}
    if price is not None:
        each = price / 3600 / speed
        data["price_per_million_tokens"] = each * 1e6 if report.fits else None
        data["run"]["price"] = tokens and tokens * each
    if not args.json:
        print("\n".join((*(["", variant] if variant else []), report.text())), flush=True)
        if report.fits:
            print(duration(loaded.run, plan, pace, "predicted"))
        print("\n".join((*_lines(data), *(f"warning: {one}" for one in plan.warnings))))
    return data


def epoch_tokens(loaded: LoadedConfig) -> tuple[float, float] | None:
    """Count the tokens that an epoch feeds to the model, packed and padded; training reads what is tokenised here.

    Returns:
        None where the data is not on this machine or cannot be tokenised: no data is downloaded.
    """
    with quick_imports():
        from halftune.data.pipeline import prepare
        from halftune.data.sources.source import BUILTIN
        from halftune.model.tokenizer.tokenizer import load_tokenizer

    sources = [section.path for section in (*loaded.run.data.train, *loaded.run.data.eval)]
    if not all(name.startswith(BUILTIN) or Path(name).exists() for name in sources):
        return None
    try:
        prepared = prepare(loaded.run, load_tokenizer(present_model(loaded)))
    except HalftuneError as error:
        log.warning("tokens of an epoch not counted: %s", error)
        return None
    real, rows = float(prepared.train.lengths.sum()), prepared.report.efficiency
    return real, real / rows.padded if rows else real


def _compared(
    args: argparse.Namespace, loaded: LoadedConfig, plan: Any, hardware: Hardware, report: PaperReport
) -> dict[str, Any]:
    """The other tool's step, where it is asked for."""
    if not args.compare:
        return {}
    from halftune.bench.paper.peers import record_peer
    from halftune.bench.paper.report import profile

    made = record_peer(args.compare, loaded.run, plan, hardware.devices[0], sample=args.sample_length)
    other = profile(loaded.run, plan, hardware, recorded=made)
    found = {
        "with": args.compare,
        "tokens_per_second": other.tokens_per_second,
        "launches_per_layer": other.launches_per_layer,
        "peak_bytes": made.peak,
        "fits": other.fits,
        "ratio": report.tokens_per_second / other.tokens_per_second,
    }
    return {"compare": found}


def _lines(data: dict[str, Any]) -> list[str]:
    """MFU, prices and comparison as text."""
    teraflops = f"{data['flops_per_second'] / 1e12:,.0f} TFLOP/s"
    lines = [f"MFU: unknown, {teraflops}: no peak of this GPU is known"]
    if data["mfu"] is not None:
        peak = f"{data['peak_flops'] / 1e12:,.0f} ({data['peak_flops_source']})"
        lines = [f"MFU: {data['mfu']:.1%}, {teraflops} of {peak}; without recomputation"]
    if "price_per_million_tokens" in data:
        price, whole = data["price_per_million_tokens"], data["run"]["price"]
        lines.append(f"a million tokens: {'no price, the step does not fit' if price is None else f'{price:.3g}'}")
        lines += [] if whole is None else [f"the run: {significant(whole)}"]
    if other := data.get("compare"):
        memory = f"{other['peak_bytes'] / 2**30:.1f} GiB{'' if other['fits'] else ' (does not fit)'}"
        lines.append(
            f"{other['with']} with peft: {other['tokens_per_second']:,.0f} tokens/s, {memory}, "
            f"{other['launches_per_layer']:.0f} launches a layer; halftune is {other['ratio']:.2f} times as fast"
        )
    return lines


def _name(one: dict[str, Any]) -> str:
    return f"{one['machine']} {one['variant']}".strip()


def _table(found: list[dict[str, Any]]) -> str:
    """One line for each result."""
    names = ("tokens/s", "MFU", "launches/layer", "host syncs", "GiB", "per million")
    lines = ["".join((f"{'':<44}", *(f"{name:>16}" for name in names)))]
    for one in found:
        cells = (one["error"]["code"],) if "error" in one else _cells(one)
        lines.append("".join((f"{_name(one):<44}", *(f"{cell:>16}" for cell in cells))))
    return "\n".join(lines)


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    price = one.get("price_per_million_tokens")
    return (
        f"{one['tokens_per_second']:,.0f}",
        "-" if one["mfu"] is None else f"{one['mfu']:.1%}",
        f"{one['launches_per_layer']:.0f}",
        str(sum(sync["count"] for sync in one["syncs"])),
        f"{one['peak_bytes'] / 2**30:.1f}{'' if one['fits'] else ' (too much)'}",
        "-" if price is None else f"{price:.3g}",
    )
