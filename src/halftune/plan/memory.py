"""The memory estimate of a run, whether it fits, and gradient checkpointing where it must."""

from __future__ import annotations

from dataclasses import replace

from halftune.attention.contract import AttentionPlan
from halftune.config.facts.model import ModelFacts
from halftune.config.optimizers import OPTIMIZERS
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter
from halftune.config.weight_formats import format_of
from halftune.core.choice import Choice, Format
from halftune.core.errors import DoesNotFitError
from halftune.hardware import Hardware
from halftune.hardware.memory import Estimate, Workload, estimate, experts_size
from halftune.plan.tree import MemoryPlan, batch_size
from halftune.plan.weights.trainable import Adapted
from halftune.precision import PrecisionPlan

BYTES: dict[Format, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
FITS, TIGHT = 0.85, 0.97
GIB = 2**30
# What the second forward pass adds to a step, measured; adapters' backward passes are shorter. By: all weights trained?
_SLOWER = {True: "a quarter", False: "a third"}


def plan_memory(
    config: RunConfig, facts: ModelFacts, work: Workload, available: int
) -> tuple[Choice[bool], MemoryPlan]:
    """Gradient checkpointing (decided here where it is ``auto``) and the estimate that goes with it.

    Args:
        config: what was asked.
        facts: the model.
        work: one device's share, as the plan's strategy gives it.
        available: bytes that one process may use.
    """
    asked = config.training.gradient_checkpointing
    plain, saving = estimate(work, facts), estimate(replace(work, checkpointing=True), facts)
    costs = (
        f"{_gib(plain.total)} without it, {_gib(saving.total)} with it, which makes a step {_SLOWER[work.full]} longer"
    )
    if asked != "auto":
        checkpointing = Choice(asked, f"asked for (training.gradient_checkpointing): {costs}")
    elif plain.total <= FITS * available:
        checkpointing = Choice(False, f"the estimate is {_gib(plain.total)} of {_gib(available)} without it")
    else:
        checkpointing = Choice(True, costs)
    chosen = saving if checkpointing.value else plain
    disk = work.trained * work.trainable + work.optimizer_state
    plain_weights = facts.quantization is None and not facts.multimodal
    verdict = _verdict(chosen, available, config, work, checkpointing.value, plain_weights)
    return checkpointing, MemoryPlan(**vars(chosen), available=available, checkpoint_disk=disk, verdict=verdict)


def check_fits(memory: MemoryPlan, config: RunConfig) -> None:
    """Makes sure that the run is expected to fit, unless the estimate is to be ignored.

    Raises:
        DoesNotFitError: it is not.
    """
    if memory.verdict.value == "does not fit" and not config.training.ignore_memory_estimate:
        what = f"the run is not expected to fit: {memory.verdict.reason}"
        remedy = "training.ignore_memory_estimate: true trains all the same"
        raise DoesNotFitError(what, remedy=remedy, code="plan.does_not_fit")


def per_process(hardware: Hardware, processes: int) -> int:
    """Bytes of the smallest device; processes of one machine share its main memory."""
    smallest = min(device.memory_bytes for device in hardware.devices)
    return smallest // processes if hardware.kind in ("cpu", "mps") else smallest


def workload(
    config: RunConfig,
    hardware: Hardware,
    facts: ModelFacts,
    precision: PrecisionPlan,
    attention: AttentionPlan,
    packing: bool,
    adapted: Adapted,
    fused: bool,
) -> Workload:
    """What one process does in a step, with the whole model on its device."""
    training, adapter = config.training, config.adapter
    length = config.data.max_length
    rows, budget = batch_size(config)
    tokens, labelled = rows * config.method.segments * length, config.method.labelled_share
    if budget is not None and not packing:
        tokens, labelled = budget, 1.0  # many short rows: at nearly every position some row has a label
    lora = isinstance(adapter, LoraAdapter)
    dropout = adapter.dropout if lora else 0.0
    fusible = lora and not adapter.use_dora and dropout == 0
    scan_kept, scan_workspace = _scan(hardware, facts, attention.linear.value, tokens, length)
    state = precision.optimizer_state.value
    width = 1 if state in ("8bit", "4bit") else BYTES[state]  # such an optimizer counts its bytes itself
    return Workload(
        kind=hardware.kind,
        storage=BYTES[precision.storage.value],
        trainable=BYTES[precision.trainable.value],
        compute=BYTES[precision.compute.value],
        autocast=precision.autocast.value,
        half_range=precision.compute.value == "fp16",
        trained=adapted.count.value,
        adapter=adapted.adapter + adapted.saved_whole,
        optimizer_state=adapted.state_bytes(OPTIMIZERS[training.optim].of_rank(training.projection_rank), width),
        tokens=tokens,
        length=length,
        labelled=labelled,
        accumulation=training.gradient_accumulation_steps,
        attention=attention.softmax.value,
        checkpointing=False,
        dora_outputs=adapted.dora_outputs,
        experts=experts_size(facts) if facts.quantized_experts else adapted.summed,
        packed=packing,
        fused=fused and fusible and format_of(facts.quantization).bytes_per_param is None,
        linear=attention.linear.value if facts.linear_layers else "torch",
        scan_kept=scan_kept,
        scan_workspace=scan_workspace,
        float8=adapted.wrapped if precision.linear is not None else 0,
        adapted_inputs=sum(width * count for width, count in adapted.inputs) if dropout > 0 else 0,
    )


def _scan(hardware: Hardware, facts: ModelFacts, linear: str, tokens: int, length: int) -> tuple[int, int]:
    """Bytes that a linear-attention layer keeps, and those of its workspace; 0 without such layers."""
    if not facts.linear_layers:
        return 0, 0
    from halftune.attention.linear_memory import held_by_layer  # the operators' sizes

    return held_by_layer(hardware, facts, linear, max(1, tokens // length), min(tokens, length))


def _verdict(
    chosen: Estimate, available: int, config: RunConfig, work: Workload, checkpointing: bool, plain_weights: bool
) -> Choice[str]:
    share = chosen.total / available
    said = f"{_gib(chosen.total)} of {_gib(available)} ({share:.0%})"
    if share <= FITS:
        return Choice("fits", said)
    if share <= TIGHT:
        return Choice("tight", f"{said}: other programs or a longer sample may push it over")
    left = (chosen.total - chosen.optimizer) / available
    if OPTIMIZERS[config.training.optim].paged and work.kind != "cpu" and left <= TIGHT:
        return Choice("tight", f"{said}: paged optimizer state has to move to main memory, which is slow")
    # what would take less memory → whether this run can do it
    rows, budget = batch_size(config)
    several_rows, shared = budget is None and rows > 1, work.strategy == "fsdp2"
    full, heavy = config.adapter.type == "none", chosen.weights > available / 2
    unquantised = config.model.quantization == "none" and plain_weights
    fits_in_half = (budget or 0) >= 2 * config.data.max_length
    ways = {
        "model.quantization: nf4": heavy and not full and unquantised and work.kind == "cuda",
        "training.gradient_checkpointing: true": not checkpointing,
        "fewer training.tokens_per_batch with more gradient_accumulation_steps": fits_in_half,
        "a smaller training.per_device_train_batch_size with more gradient_accumulation_steps": several_rows,
        "a smaller data.max_length": chosen.weights < available,
        "adapter: lora": full,
        "more devices": shared,
        "distributed.fsdp.cpu_offload: true": shared and not work.offload and work.kind != "cpu",
    }
    tried = ", ".join(filter(ways.get, ways)) or "a device with more memory"
    return Choice("does not fit", f"{said}; try {tried}")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
