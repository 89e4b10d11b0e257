"""How busy the machine's NVIDIA devices are now, through NVML; nothing where there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from halftune_webui.html import render
from halftune_webui.labels import Words


@dataclass(frozen=True)
class Use:
    """One device; None where it does not tell.

    Attributes:
        name: of the device.
        used, total: memory in bytes.
        busy: percent of the last moment in which a kernel ran.
        watts: power.
        celsius: temperature.
    """

    name: str
    used: int | None
    total: int | None
    busy: int | None
    watts: float | None
    celsius: int | None


@dataclass
class Gpus:
    """Queries the devices at most once in ``every`` seconds, for all callers."""

    every: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _seen: list[Use] = field(default_factory=list)
    _at: float = -float("inf")
    _there: bool | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> list[Use]:
        """Every device in NVML's order."""
        with self._lock:
            if self._there is None:
                self._there = _begin()
            if self._there and self.clock() - self._at >= self.every:
                self._at, self._seen = self.clock(), _uses()
            return self._seen


def _begin() -> bool:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except pynvml.NVMLError:
        return False


def _uses() -> list[Use]:
    handles = [
        _or_none(lambda at=at: pynvml.nvmlDeviceGetHandleByIndex(at)) for at in range(pynvml.nvmlDeviceGetCount())
    ]
    return [_use(handle) for handle in handles if handle is not None]


def _use(handle: Any) -> Use:
    name = _or_none(lambda: pynvml.nvmlDeviceGetName(handle))
    memory = _or_none(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _or_none(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    power = _or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    return Use(
        name=name.decode() if isinstance(name, bytes) else str(name or ""),
        used=None if memory is None else int(memory.used),
        total=None if memory is None else int(memory.total),
        busy=None if rates is None else int(rates.gpu),
        watts=None if power is None else power / 1000,  # of milliwatts
        celsius=_or_none(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
    )


def _or_none(ask: Callable[[], Any]) -> Any:
    """An answer, or None: parts of a device (MIG) and some drivers do not tell everything."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def gpu_view(uses: list[Use], words: Words) -> str:
    """A line for each device; empty where there is none."""
    return render("gpus", uses=uses, words=words) if uses else ""
