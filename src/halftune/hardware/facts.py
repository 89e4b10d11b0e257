"""A machine as frozen data. Everything above decides from these facts, never from a live device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cuda", "rocm", "mps", "xpu", "cpu"]


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU as a whole.

    Attributes:
        kind: which runtime drives it.
        name: as the driver calls it.
        memory_bytes: device memory; on CPU and MPS the machine's main memory.
        capability: CUDA compute capability ``(major, minor)``; None elsewhere.
        arch: ROCm target such as ``gfx942``; for a CPU, ``x86_64`` or ``arm64``; empty elsewhere.
        features: what else decides about formats: ``amx_bf16``, ``avx512_bf16``, ``bf16`` (ARM), ``amd``, ``macos14``.
    """

    kind: Kind
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    arch: str = ""
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Hardware:
    """A machine: its devices (at least one), its main memory and the versions of the packages that decide routes.

    Attributes:
        name: ``this machine``, or the name in the catalogue.
        devices: accelerators of one kind, or a single CPU device.
        host_memory_bytes: main memory.
        cpu_cores: usable logical cores.
        packages: distribution name → installed version, of those that route or precision look at
            (torch, triton, flash-attn, flash-linear-attention, bitsandbytes …).
        notes: what the probe found odd, e.g. a GPU that the installed torch build cannot use.
    """

    name: str
    devices: tuple[Device, ...]
    host_memory_bytes: int
    cpu_cores: int
    packages: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """Kind of the devices (they are all of one)."""
        return self.devices[0].kind

    def version(self, distribution: str) -> str | None:
        """Installed version of a package, or None."""
        return dict(self.packages).get(distribution)
