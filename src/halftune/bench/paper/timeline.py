"""The time of a recorded step: the host enqueues kernels one after the other, the GPU runs each when it may."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from halftune.bench.paper.kinds import KINDS
from halftune.bench.paper.recorder import Launch, Sync
from halftune.hardware.roofline import HOST_CALL, HOST_LAUNCH, HOST_SYNC, Roofline, Work

OUTSIDE = "outside the model"  # its key among modules
_NUMBERS = re.compile(r"\.\d+(?=\.|$)")
_ROUNDING, _GATED = re.compile(r"float8_rows|quantise_row"), re.compile(r"adapted_(activation|forward|backward)")
_WORK: dict[torch.dtype, Work] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


@dataclass
class Sum:
    """Kernels added up: launches, bytes moved, FLOPs, seconds of the GPU."""

    launches: float = 0
    bytes: float = 0
    flops: float = 0.0
    seconds: float = 0.0

    def add(self, launch: Launch, seconds: float) -> None:
        """Add one call."""
        self.launches += launch.cost.launches
        self.bytes += launch.cost.read + launch.cost.written
        self.flops += launch.cost.flops
        self.seconds += seconds


@dataclass
class Timeline:
    """A step's time.

    Attributes:
        seconds: from the first call of the host to the end of the last kernel.
        gpu, host: seconds of the GPU's kernels, and of the host's calls, each alone.
        waiting: seconds that the GPU waits for the host.
        kinds: sums by kind.
        layers: sums by decoder layer.
        layer_kinds: sums by kind of one layer and micro-batch, the median over layers.
        modules: sums by the module of the forward call, those of all layers and experts as one: ``layers.*.mlp``.
    """

    seconds: float = 0.0
    gpu: float = 0.0
    host: float = 0.0
    waiting: float = 0.0
    kinds: dict[str, Sum] = field(default_factory=dict)
    layers: dict[int, Sum] = field(default_factory=dict)
    layer_kinds: dict[str, Sum] = field(default_factory=dict)
    modules: dict[str, Sum] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """What the step's time is bound by: ``host``, or the kind that takes most of the GPU's time."""
        if self.waiting > 0.25 * self.seconds:
            return "host"
        return max(self.kinds, key=lambda kind: self.kinds[kind].seconds)


def seconds_of(launch: Launch, roofline: Roofline, *, tf32: bool) -> float:
    """The time of a call's kernels on a GPU."""
    cost, work = launch.cost, _WORK.get(launch.cost.dtype)
    if cost.rate:
        kernel, _, backward = cost.rate.partition("/")
        rates = roofline.attention.get(kernel) or roofline.attention["efficient"]
        rate = min(rates[1 if backward else 0], roofline.products(work or "fp32"))  # the rates are those of half
    else:
        rate = roofline.products(work or ("tf32" if tf32 else "fp32"))
        rate *= roofline.exact if cost.exact else 1.0
    share = roofline.gated if _GATED.search(launch.op) else 1.0
    share = roofline.rounding if _ROUNDING.search(launch.op) else share
    flops = 0.0 if cost.hopper else cost.flops
    found = roofline.seconds(moved=cost.read + cost.written, flops=flops, rate=rate, share=share)
    return max(found, cost.launches * roofline.kernel, cost.hopper * roofline.scan)


def timeline(
    launches: Sequence[Launch],
    syncs: Sequence[Sync],
    calls: int,
    roofline: Roofline,
    *,
    tf32: bool,
    micro_batches: int = 1,
) -> Timeline:
    """Play a step on a GPU.

    Args:
        launches, syncs: in the order of the host.
        calls: operators after the last launch that launched nothing.
        roofline: the GPU's rates.
        tf32: whether fp32 products may use TF32.
        micro_batches: of the step.
    """
    found = Timeline(kinds={kind: Sum() for kind in KINDS})
    waits: dict[int, list[Sync]] = defaultdict(list)
    for sync in syncs:
        waits[sync.after].append(sync)
    ends = [0.0]  # when the GPU has done the first launches
    host = free = 0.0  # when the host may enqueue the next kernel, and when the GPU has done the last one
    by_layer: dict[int, dict[str, Sum]] = defaultdict(lambda: defaultdict(Sum))
    for index, launch in enumerate(launches):
        for sync in waits[index]:
            host = max(host, ends[sync.until]) + HOST_SYNC
        spent = launch.calls * HOST_CALL + launch.cost.launches * HOST_LAUNCH
        host, found.host = host + spent, found.host + spent
        taken = seconds_of(launch, roofline, tf32=tf32)
        found.waiting += max(0.0, host - free)
        free = max(free, host) + taken
        ends.append(free)
        found.gpu += taken
        found.kinds[launch.kind].add(launch, taken)
        found.modules.setdefault(_NUMBERS.sub(".*", launch.module) or OUTSIDE, Sum()).add(launch, taken)
        if launch.layer is not None:
            found.layers.setdefault(launch.layer, Sum()).add(launch, taken)
            by_layer[launch.layer][launch.kind].add(launch, taken)
    found.seconds = max(free, host + calls * HOST_CALL)
    found.waiting += found.seconds - free  # the next step's first kernel
    for kind in KINDS if by_layer else ():
        found.layer_kinds[kind] = _median([sums[kind] for sums in by_layer.values()], micro_batches)
    return found


def _median(sums: list[Sum], parts: int) -> Sum:
    """The median, of each of so many parts."""
    names = ("launches", "bytes", "flops", "seconds")
    return Sum(**{name: statistics.median(getattr(one, name) for one in sums) / parts for name in names})
