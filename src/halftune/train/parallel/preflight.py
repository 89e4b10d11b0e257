"""Before anything heavy: all processes compare what they are, and the weakest device decides for all."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from halftune import __version__
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.core.log import get_logger
from halftune.core.optional import version_of
from halftune.core.processes.process import this_process
from halftune.hardware import Device, Hardware
from halftune.plan import Plan, resolve
from halftune.precision.resolve import weakest
from halftune.train.parallel.rendezvous import Rendezvous

log = get_logger(__name__)
PACKAGES = ("torch", "transformers", "accelerate", "peft", "tokenizers", "numpy")
_SHORT = 12  # characters of a checksum


def compare(rendezvous: Rendezvous, config: RunConfig, hardware: Hardware, facts: ModelFacts, plan: Plan) -> Plan:
    """The plan of all processes: this one's, or a new one where another process has a weaker device.

    Args:
        rendezvous: of all processes.
        config, hardware, facts: this process's.
        plan: made from them.

    Raises:
        PlanError: versions, configuration or model differ; names the rank.
        PeerLost: a process did not come.
    """
    rendezvous.tell("facts", own_facts(config, hardware, facts))
    everybody = rendezvous.ask("facts", config.distributed.timeout_seconds)
    if different := differences(everybody):
        raise PlanError(different, remedy="make them the same on all machines", code="launch.settings_differ")
    devices = tuple(_device(one["device"]) for one in everybody)
    hosts = {one["host"]: None for one in everybody}
    log.info("%d processes on %s", len(everybody), ", ".join(hosts))
    if set(devices) == set(hardware.devices):
        return plan
    merged = replace(hardware, devices=devices)
    decides = weakest(merged)[0]
    rank = devices.index(decides)
    log.info(
        "rank %d on %s has the weakest device, %s: it decides for all", rank, everybody[rank]["host"], decides.name
    )
    return resolve(config, merged, facts, world_size=rendezvous.world_size)


def own_facts(config: RunConfig, hardware: Hardware, facts: ModelFacts) -> dict[str, Any]:
    """What this process tells the others."""
    local = this_process().local_rank
    device = asdict(hardware.devices[local % len(hardware.devices)])
    device["features"] = sorted(device["features"])
    versions = {"halftune": __version__, "Python": platform.python_version()}
    versions |= {name: version_of(name) or "none" for name in PACKAGES}
    settings = config.model_dump(mode="json")
    settings["distributed"].pop("machine_rank")
    return {
        "host": socket.gethostname(),
        "device": device,
        "versions": versions,
        "configuration": dict(_leaves(settings)),
        "model": _checksum(asdict(facts)),
    }


def differences(everybody: Sequence[dict[str, Any]]) -> str:
    """What the first process that differs from rank 0 has otherwise, as a sentence; empty where all agree."""
    first = everybody[0]
    for rank, one in enumerate(everybody):
        who = f"rank {rank} on {one['host']}"
        for name, version in one["versions"].items():
            if version != first["versions"][name]:
                return f"{who} has {name} {version}, rank 0 has {first['versions'][name]}"
        if one["device"]["kind"] != first["device"]["kind"]:
            return f"{who} computes on {one['device']['kind']}, rank 0 on {first['device']['kind']}"
        for key in sorted(one["configuration"].keys() | first["configuration"].keys()):
            ours, theirs = one["configuration"].get(key, "nothing"), first["configuration"].get(key, "nothing")
            if ours != theirs:
                return f"{who} has {key}: {ours}, rank 0 has {theirs}"
        if one["model"] != first["model"]:
            return f"{who} has another model than rank 0 (checksum {one['model']} and {first['model']})"
    return ""


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a configuration with its dotted key."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:_SHORT]


def _device(values: dict[str, Any]) -> Device:
    capability = values["capability"]
    return Device(
        **{
            **values,
            "capability": tuple(capability) if capability else None,
            "features": frozenset(values["features"]),
        }
    )
