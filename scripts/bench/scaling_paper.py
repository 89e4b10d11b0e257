"""What a step costs on many H100s, on paper: from bytes and floating-point operations, by stated assumptions.

Nothing here is measured. :func:`step` is a pure function of a model, a method, a strategy and a number of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Strategy = Literal["ddp", "fsdp2"]
Method = Literal["full", "lora"]
GB = 1e9


@dataclass(frozen=True)
class Shape:
    """A decoder with SwiGLU and grouped-query attention.

    Attributes:
        parameters: all of them.
        layers, hidden: decoder layers, width.
        lora: parameters of a LoRA of rank 16 on all linear layers.
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    lora: float


# Llama 2's sizes: 4096/11008 with as many key heads as heads, 8192/28672 with 8 key heads of 128.
SHAPES = (
    Shape("7B", 6.74e9, 32, 4096, 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))),
    Shape("70B", 68.98e9, 80, 8192, 80 * 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))),
)


@dataclass(frozen=True)
class Machine:
    """A cluster of H100 SXM nodes; rates in bytes, operations and seconds.

    Attributes:
        per_node: GPUs of a node.
        memory: of a GPU, bytes.
        flops: dense bf16 operations a second of a GPU.
        utilisation: share of ``flops`` that the model's own operations reach while nothing waits.
        nvlink: bytes a second and direction between the GPUs of a node.
        adapter: bytes a second and direction of one GPU's network adapter. A ring enters and leaves a node once, over
            all of its adapters.
        hop_inside, hop_between: seconds that one step of a ring takes for no bytes, in a node and between nodes.
    """

    per_node: int = 8
    memory: float = 80e9
    flops: float = 989e12
    utilisation: float = 0.5
    nvlink: float = 450 * GB
    adapter: float = 50 * GB
    hop_inside: float = 1e-6
    hop_between: float = 5e-6

    def bandwidth(self, gpus: int) -> float:
        """Bytes a second at which each GPU of a ring sends."""
        return self.nvlink if gpus <= self.per_node else min(self.nvlink, self.per_node * self.adapter)

    def latency(self, gpus: int) -> float:
        """Seconds of one way around the ring for no bytes."""
        between = 0 if gpus <= self.per_node else gpus // self.per_node
        return (gpus - 1 - between) * self.hop_inside + between * self.hop_between


H100 = Machine()
WEIGHT, GATHERED, MOMENTS = 4, 2, 8  # bytes: fp32 master weights and gradients, gathered in bf16, Adam's two moments


@dataclass(frozen=True)
class Step:
    """One optimizer step of one micro-batch on each GPU.

    Attributes:
        memory: bytes of a GPU.
        sent: bytes that a GPU sends.
        compute, communication: seconds, each by itself.
    """

    shape: Shape
    method: Method
    strategy: Strategy
    gpus: int
    tokens: float
    memory: float
    sent: float
    compute: float
    communication: float

    @property
    def efficiency(self) -> tuple[float, float]:
        """Share of the step in which GPUs compute: where nothing of the communication is hidden behind it, and all."""
        return self.compute / (self.compute + self.communication), self.compute / max(self.compute, self.communication)


def all_reduced(size: float, processes: int) -> float:
    """Bytes that each process of a ring sends to sum ``size`` bytes: a reduce-scatter and an all-gather."""
    return 2 * gathered(size, processes)


def gathered(size: float, processes: int) -> float:
    """Bytes that each process of a ring sends to gather (or to reduce and scatter) ``size`` bytes in all."""
    return size * (processes - 1) / processes


def step(
    shape: Shape, method: Method, strategy: Strategy, gpus: int, tokens: float = 8192, machine: Machine = H100
) -> Step:
    """What a step takes, by the assumptions of this module.

    Operations of a token: 2 for each weight forward, as many for the gradient of activations and, in full fine-tuning,
    of weights; 2 again for gradient checkpointing. Those of attention itself are left out.

    Args:
        shape, method, strategy, gpus: what runs where.
        tokens: of one GPU's micro-batch.
        machine: the cluster.
    """
    full = method == "full"
    trained = shape.parameters if full else shape.lora
    frozen = 0.0 if full else shape.parameters
    compute = (8 if full else 6) * shape.parameters * tokens / (machine.utilisation * machine.flops)

    held = trained * (WEIGHT + WEIGHT + MOMENTS) + frozen * GATHERED
    if strategy == "ddp":
        sent, ways = all_reduced(trained * WEIGHT, gpus), 2 * shape.layers
    else:
        whole = GATHERED * (trained + frozen)
        sent = 2 * gathered(whole, gpus) + gathered(trained * WEIGHT, gpus)
        held = held / gpus + 3 * whole / shape.layers  # a layer at work, the next one on its way, gradients of one
        ways = 3 * shape.layers
    inputs = shape.layers * tokens * shape.hidden * 2  # what checkpointing keeps
    layer = 34 * tokens * shape.hidden  # arXiv:2205.05198, without the attention matrix
    seconds = sent / machine.bandwidth(gpus) + ways * machine.latency(gpus) if gpus > 1 else 0.0
    return Step(shape, method, strategy, gpus, tokens, held + inputs + layer, sent, compute, seconds)


def fewest_tokens(made: Step) -> float:
    """Tokens of a GPU's micro-batch below which communication takes longer than computation, hidden or not."""
    return made.tokens * made.communication / made.compute


def most_gpus(shape: Shape, method: Method, strategy: Strategy, batch: float, machine: Machine = H100) -> int:
    """The largest power of two of GPUs that share a global batch of so many tokens without waiting for each other."""
    gpus = machine.per_node
    while True:
        made = step(shape, method, strategy, 2 * gpus, batch / (2 * gpus), machine)
        if made.communication > made.compute or 2 * gpus > 2**20:
            return gpus
        gpus *= 2


METHODS: tuple[Method, ...] = ("full", "lora")
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2")
BATCH = 2**22  # tokens of a step, where it says how many GPUs can share one


def tables(machine: Machine = H100, sizes: tuple[int, ...] = (8, 64, 512)) -> Iterator[str]:
    """Both tables in Markdown, line by line."""
    head = ("model", "method", "strategy", "GPUs", "GB a GPU", "GB sent", "computing, s", "communicating, s")
    yield f"| {' | '.join(head)} | tokens/s at least | time spent computing |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|"
    kinds: list[tuple[Shape, Method, Strategy]] = [
        (shape, method, strategy) for shape in SHAPES for method in METHODS for strategy in STRATEGIES
    ]
    for shape, method, strategy in kinds:
        for gpus in sizes:
            made = step(shape, method, strategy, gpus, machine=machine)
            start = f"| {shape.name} | {method} | {strategy} | {gpus} | {made.memory / GB:,.0f}"
            if made.memory > machine.memory:
                yield f"{start}, does not fit | | | | | |"
                continue
            low, high = made.efficiency
            yield (
                f"{start} | {made.sent / GB:,.2f} | {made.compute:.2f} | {made.communication:.3f} "
                f"| {gpus * made.tokens / made.compute * low:,.0f} | {low:.0%} to {high:.0%} |"
            )
    yield ""
    yield "| model | method | strategy | waits below … tokens a GPU, by GPUs | 4 M tokens a step: pays up to |"
    yield "|---|---|---|--:|--:|"
    for shape, method, strategy in kinds:
        if step(shape, method, strategy, sizes[-1], machine=machine).memory > machine.memory:
            yield f"| {shape.name} | {method} | {strategy} | does not fit | |"
            continue
        least = " / ".join(f"{fewest_tokens(step(shape, method, strategy, n, machine=machine)):,.0f}" for n in sizes)
        most = most_gpus(shape, method, strategy, BATCH, machine)
        yield f"| {shape.name} | {method} | {strategy} | {least} | {most:,} GPUs |"


# The same nodes with one adapter of 100 Gb/s for all eight GPUs.
ETHERNET = replace(H100, adapter=100e9 / 8 / H100.per_node, hop_between=30e-6)
