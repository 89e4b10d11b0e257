"""The result of the paper profiler: for JSON, and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from halftune.bench.flops import training_flops
from halftune.bench.paper.step import Recorded, record_step
from halftune.bench.paper.timeline import Sum, Timeline, timeline
from halftune.bench.peak import listed_peak
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.core.errors import PlanError
from halftune.core.table import did_you_mean
from halftune.hardware import Hardware
from halftune.hardware.roofline import ROOFLINES, Roofline, roofline_of
from halftune.plan import Plan
from halftune.plan.weights.parts import modes

_SHOWN = 0.01  # of a step, at least: modules of the text


@dataclass(frozen=True)
class PaperReport:
    """A step on paper.

    Attributes:
        model, machine: what was profiled.
        attention: softmax backend, provider and method for packed rows.
        recorded: the step.
        time: on the machine's roofline.
        roofline: its rates.
        memory: bytes of the device.
    """

    model: str
    machine: str
    attention: str
    recorded: Recorded
    time: Timeline
    roofline: Roofline
    memory: int

    @property
    def fits(self) -> bool:
        """Whether the device holds the step's tensors, the weights among them."""
        return self.recorded.peak <= self.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over its time."""
        return self.recorded.tokens / self.time.seconds

    @property
    def launches_per_layer(self) -> float:
        """Kernel launches of a layer and micro-batch, both passes: the sum of the kinds' medians over layers."""
        return sum(one.launches for one in self.time.layer_kinds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sums are of a whole step, ``layer`` of a micro-batch; seconds of one GPU."""
        time, made = self.time, self.recorded
        return {
            "measured": False,
            "model": self.model,
            "machine": self.machine,
            "attention": self.attention,
            "fused_layers": made.fused,
            "tokens_per_step": made.tokens,
            "sample_tokens": made.sample,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": time.seconds,
            "gpu_seconds": time.gpu,
            "host_seconds": time.host,
            "gpu_waits_seconds": time.waiting,
            "bound_by": time.bound,
            "peak_bytes": made.peak,
            "memory_bytes": self.memory,
            "fits": self.fits,
            "launches_per_layer": self.launches_per_layer,
            "kinds": {kind: asdict(one) for kind, one in time.kinds.items()},
            "layers": {str(layer): asdict(one) for layer, one in sorted(time.layers.items())},
            "layer": {kind: asdict(one) for kind, one in time.layer_kinds.items()},
            "modules": {name: asdict(one) for name, one in time.modules.items()},
            "syncs": [{"what": what, "line": line, "count": many} for (what, line), many in self._syncs().items()],
            "roofline": asdict(self.roofline),
        }

    def _syncs(self) -> Counter[tuple[str, str]]:
        return Counter((sync.what, sync.line) for sync in self.recorded.syncs)

    def _longest(self) -> list[tuple[str, Sum]]:
        """Modules that take 1 % of the GPU's time or more, the longest first."""
        found = [one for one in self.time.modules.items() if one[1].seconds >= _SHOWN * self.time.gpu]
        return sorted(found, key=lambda one: -one[1].seconds)

    def text(self) -> str:
        """The tables."""
        made, time = self.recorded, self.time
        too_much = "" if self.fits else f": does not fit, the device has {self.memory / 2**30:.1f} GiB"
        tokens = made.tokens // made.micro_batches
        gigaflops = sum(one.flops for one in time.kinds.values()) / made.tokens / 1e9
        lines = [
            f"{self.model} on {self.machine}: predicted on paper, nothing was measured",
            f"{made.tokens:,} tokens a step in samples of {made.sample:,}; attention {self.attention}; "
            f"fused layers: {made.fused}",
            "",
            _row("kind", "launches", "MB/token", "GFLOP/token", "µs/token", "share"),
            *(_kind(kind, one, made.tokens, time.gpu) for kind, one in time.kinds.items() if one.launches),
            _kind("all", _total(time), made.tokens, time.gpu),
            "",
            _row(f"one layer of {made.layers}", "launches", "MB/token", "GFLOP/token", "µs/token", "share"),
            *(
                _kind(kind, one, tokens, sum(each.seconds for each in time.layer_kinds.values()))
                for kind, one in time.layer_kinds.items()
                if one.launches
            ),
            "",
            _row("modules, all layers", "launches", "MB/token", "GFLOP/token", "µs/token", "share", width=44),
            *(_kind(name, one, made.tokens, time.gpu, width=44) for name, one in self._longest()),
            "",
            f"host syncs a step: {len(made.syncs)}",
            *(f"  {many} × {what}: {line}" for (what, line), many in self._syncs().items()),
            "",
            f"tensors take {made.peak / 2**30:.1f} GiB at their most{too_much}",
            f"step {time.seconds * 1e3:,.1f} ms: GPU {time.gpu * 1e3:,.1f} ms, host {time.host * 1e3:,.1f} ms, "
            f"the GPU waits {time.waiting * 1e3:,.1f} ms",
            f"{self.tokens_per_second:,.0f} tokens/s ({1e6 / self.tokens_per_second:.1f} µs a token, "
            f"{gigaflops:.1f} GFLOP a token); bound by: {time.bound}",
        ]
        return "\n".join(lines)


def profile(
    config: RunConfig, plan: Plan, hardware: Hardware, *, sample: int | None = None, recorded: Recorded | None = None
) -> PaperReport:
    """Profile a training step of a recipe on paper.

    Args:
        config, plan: the recipe and its plan for ``hardware``.
        hardware: a machine with one GPU of ``ROOFLINES``.
        sample: tokens of every sample; by default ``data.max_length``.
        recorded: a step that was recorded before with the same plan.

    Raises:
        PlanError: there are no rates of this GPU, or a step of this kind is not supported.
    """
    device = hardware.devices[0]
    roofline = roofline_of(device.name)
    if roofline is None:
        known = [row.name for row in ROOFLINES]
        what = f"no rates of {device.name} are known"
        raise PlanError(what, where="--hardware", remedy=did_you_mean(device.name, known), code="bench.no_roofline")
    made = recorded or record_step(config, plan, device, sample=sample)
    step, tf32 = (made.launches, made.syncs, made.calls), plan.precision.tf32.value
    time = timeline(*step, roofline, tf32=tf32, micro_batches=made.micro_batches)
    attention = f"{plan.attention.softmax.value} ({plan.attention.provider.value}, {plan.attention.varlen.value})"
    return PaperReport(plan.model, device.name, attention, made, time, roofline, device.memory_bytes)


def utilisation(report: PaperReport, config: RunConfig, plan: Plan, facts: ModelFacts) -> dict[str, Any]:
    """Return MFU and what it is made of, by the convention and with the keys of a measured run.

    Without a dense peak of the GPU in the compute format, ``mfu`` and ``peak_flops`` are None.
    """
    precision, made = plan.precision, report.recorded
    frozen = modes(config)["language"] != "full"
    flops = training_flops(facts, plan.num_trainable.value, adapter=frozen, attended=made.sample)
    achieved = flops.per_second(made.tokens, made.trained, report.time.seconds)
    peak = listed_peak(report.machine, precision.compute.value, tf32=precision.tf32.value)
    return {
        "mfu": peak and achieved / peak.flops,
        "flops_per_second": achieved,
        "mfu_convention": flops.convention,
        "peak_flops": peak and peak.flops,
        "peak_flops_source": peak and peak.source,
    }


def _row(name: str, *cells: str, width: int = 22) -> str:
    return f"{name:<{width}}" + "".join(f"{cell:>13}" for cell in cells)


def _kind(name: str, one: Sum, tokens: int, of: float, width: int = 22) -> str:
    return _row(
        name,
        f"{one.launches:,.0f}",
        f"{one.bytes / tokens / 1e6:,.3f}",
        f"{one.flops / tokens / 1e9:,.3f}",
        f"{one.seconds / tokens * 1e6:,.2f}",
        f"{one.seconds / of if of else 0:.1%}",
        width=width,
    )


def _total(time: Timeline) -> Sum:
    names = ("launches", "bytes", "flops", "seconds")
    return Sum(**{name: sum(getattr(one, name) for one in time.kinds.values()) for name in names})
