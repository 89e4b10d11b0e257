"""A machine as frozen data: plans are made from these facts, never from a live device.

In: a live machine, or the name of a catalogued one.
Out: `Hardware`, frozen data; bytes and rates.
Imported by: `api`, `attention`, `bench`, `certify`, `cli`, `data`, `doctor`, `halftune_webui`, `launch`, `model`,
    `plan`, `precision`, `train`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cuda", "rocm", "mps", "xpu", "cpu"]


@dataclass(frozen=True)
class Device:
    """An accelerator, or the CPU as a whole.

    Attributes:
        kind: its runtime.
        name: the driver's name for it.
        memory_bytes: device memory; on CPU and MPS the machine's main memory.
        capability: CUDA compute capability ``(major, minor)``; None for other kinds.
        arch: ROCm target such as ``gfx942``; for a CPU, ``x86_64`` or ``arm64``; empty for other kinds.
        features: facts that select number formats: ``amx_bf16``, ``avx512_bf16``, ``bf16`` (ARM), ``amd``, ``macos14``.
    """

    kind: Kind
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    arch: str = ""
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Hardware:
    """A machine: devices (at least one), main memory, and versions of packages that a plan depends on.

    Attributes:
        name: ``this machine``, or the name in the catalogue.
        devices: accelerators of one kind, or a single CPU device.
        host_memory_bytes: main memory.
        cpu_cores: usable logical cores.
        packages: (distribution, installed version) of packages that attention or precision depend on
            (torch, triton, flash-attn, flash-linear-attention, bitsandbytes …).
        notes: problems found by the probe, e.g. a GPU that the installed torch build cannot use.
    """

    name: str
    devices: tuple[Device, ...]
    host_memory_bytes: int
    cpu_cores: int
    packages: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """The devices' kind; all have the same."""
        return self.devices[0].kind

    def version(self, distribution: str) -> str | None:
        """Return the installed version of a package; None if it is not installed."""
        return dict(self.packages).get(distribution)


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``3.7.1+git5`` → (3, 7, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group(0).split(".")) if match else ()
