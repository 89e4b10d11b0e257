"""A machine as HTML: what plans know of it, and which optional packages are there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from halftune.core.optional import pip_line, version_of
from halftune.hardware import Hardware
from halftune.plan.explain import size
from halftune_webui.html import render
from halftune_webui.labels import Words

# why each is wanted says the label of its name
OPTIONAL = ("flash-attn", "flash-linear-attention", "causal-conv1d", "triton", "tensorboard", "wandb")


@dataclass(frozen=True)
class Free:
    """What is free now.

    Attributes:
        memory: of the main memory, bytes.
        disk: where runs are written, bytes.
        folder: that place.
    """

    memory: int
    disk: int
    folder: Path


def free_of(runs: Path) -> Free:
    """Memory, and disk at the folder of runs, which need not exist yet."""
    folder = next(place for place in (runs, *runs.parents) if place.is_dir())
    return Free(psutil.virtual_memory().available, shutil.disk_usage(folder).free, folder)


def machine_view(machine: Hardware, free: Free, words: Words) -> str:
    """Devices, memory, disk, notes, and the optional packages with the command that adds them."""
    facts = [(words("machine.kind"), words(f"machine.kinds.{machine.kind}"))]
    for number, device in enumerate(machine.devices):
        name = words("machine.device") + (f" {number}" if len(machine.devices) > 1 else "")
        parts = [device.name] if machine.kind == "cpu" else [device.name, size(device.memory_bytes)]
        if device.capability is not None:
            parts.append(words("machine.capability", n=".".join(map(str, device.capability))))
        facts.append((name, " · ".join([*parts, *filter(None, [device.arch]), *sorted(device.features)])))
    facts += [
        (words("machine.memory"), words("machine.free", free=size(free.memory), all=size(machine.host_memory_bytes))),
        (words("machine.disk"), words("machine.free_at", free=size(free.disk), folder=free.folder)),
        (words("machine.cores"), str(machine.cpu_cores)),
        *((name, version) for name, version in machine.packages if name not in OPTIONAL),
    ]
    versions = [(name, machine.version(name) or version_of(name)) for name in OPTIONAL]
    optional = [(name, version, pip_line(name)) for name, version in versions]
    return render("machine", machine=machine, facts=facts, optional=optional, words=words)
