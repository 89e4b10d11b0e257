"""How processes share a model: whole on each device, or in shards; with the memory that each way takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from halftune.config.facts.model import ModelFacts
from halftune.config.optimizers import OPTIMIZERS
from halftune.config.run import RunConfig
from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.model import LoraAdapter, NoAdapter, PeftAdapter
from halftune.config.weight_formats import format_of
from halftune.core.choice import Choice, Format
from halftune.core.errors import PlanError
from halftune.hardware import Hardware
from halftune.hardware.memory import Workload, weight_bytes
from halftune.plan.memory import BYTES, FITS, per_process, plan_memory
from halftune.plan.tree import EACH, MemoryPlan, ParallelPlan
from halftune.precision import PrecisionPlan

STRATEGIES = ("ddp", "fsdp2")
GIB = 2**30


def choose_strategy(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, work: Workload, world_size: int
) -> tuple[Choice[str], Workload]:
    """The strategy, and what one process has to do under it.

    Args:
        config, hardware, facts: what was asked, where it runs, the model.
        work: with the whole model on one device.
        world_size: processes over all machines.
    """
    asked = config.distributed.strategy
    if world_size == 1:
        return Choice("single", "one process"), work
    if asked != "auto":
        chosen = Choice(asked, f"asked for; {_meaning(asked, world_size)}")
    else:
        chosen = _by_memory(config, hardware, facts, work, world_size)
    return chosen, under(chosen.value, work, config, world_size)


def choose_sync(config: RunConfig, facts: ModelFacts, work: Workload, available: int) -> Choice[bool]:
    """Whether processes under fsdp2 sum gradients after every forward pass of a step, not only after the last one.

    Args:
        config, facts: what was asked, the model.
        work: of one process.
        available: bytes that it may use.
    """
    asked = config.distributed.fsdp.sync_each_batch
    if work.strategy != "fsdp2" or work.accumulation == 1:
        return EACH
    if asked != "auto":
        return Choice(asked, "asked for (distributed.fsdp.sync_each_batch)")
    each, once = (plan_memory(config, facts, replace(work, sync_each=sync), available) for sync in (True, False))
    more = f"{(once[1].gradients - each[1].gradients) / GIB:.1f} GiB more for whole gradients"
    fits = once[1].verdict.value == "fits" and once[0].value == each[0].value
    if fits:
        return Choice(False, f"once a step: there is room for {more}")
    return Choice(True, f"after every forward pass: there is no room for {more}")


def sharing_problems(config: RunConfig, hardware: Hardware, facts: ModelFacts, compute: Format) -> Iterator[PlanError]:
    """Everything that was asked of ``distributed`` and cannot be had here."""
    asked, fsdp = config.distributed.strategy, config.distributed.fsdp
    if asked == "fsdp2" and (refused := cannot_shard(config, hardware, facts)):
        yield PlanError(
            refused, where="distributed.strategy", remedy="distributed.strategy: ddp", code="plan.strategy_unavailable"
        )
    if fsdp.cpu_offload and hardware.kind in ("cpu", "mps"):
        what = "the device has no memory of its own: offload has no effect"
        yield PlanError(what, where="distributed.fsdp.cpu_offload", remedy="remove it", code="plan.offload_unavailable")
    elif fsdp.cpu_offload and compute == "fp16":
        what = (
            "fp16's loss scaler all-reduces overflow flags in main memory, which the devices' backend does not support"
        )
        yield PlanError(
            what,
            where="distributed.fsdp.cpu_offload",
            remedy="remove it, or precision: bf16",
            code="plan.offload_unavailable",
        )


def cannot_shard(config: RunConfig, hardware: Hardware, facts: ModelFacts) -> str:
    """Return why FSDP2 is not supported here; empty if it is."""
    if hardware.kind == "mps":
        return "FSDP2 is not supported on MPS"
    if not format_of(facts.quantization).shardable:
        return f"fsdp2 does not shard weights that are quantised ({facts.quantization})"
    adapter = config.adapter
    if config.precision.linear == "fp8" and not isinstance(adapter, NoAdapter):
        return "fsdp2 does not shard weights in float8"
    if isinstance(adapter, LoraAdapter) and adapter.target_parameters:
        return "fsdp2 does not shard a model with adapter.target_parameters"
    if isinstance(adapter, PeftAdapter):
        return f"fsdp2 does not shard a model with adapter: {adapter.type}"
    if isinstance(adapter, NoAdapter) and adapter.is_partial:
        return "fsdp2 does not shard a model of which some parameters are trained in full"
    if config.data.audio and ((facts.raw or {}).get("audio_config") or {}).get("encoder_layerdrop"):
        return "fsdp2 does not shard an audio encoder that skips layers at random (encoder_layerdrop)"
    if reason := OPTIMIZERS[config.training.optim].cannot_shard:
        return f"{config.training.optim} {reason}"
    return ""


def needs_whole_weights(config: RunConfig) -> str:
    """Return why each process must read the unsharded weights under FSDP2; empty if it need not."""
    if isinstance(config.adapter, LoraAdapter) and config.adapter.use_dora:
        return "DoRA initialises from the norms of unsharded weights"
    if isinstance(config.adapter, LoraAdapter) and config.adapter.reduces_base:
        return f"init: {config.adapter.init} decomposes whole weights"
    if isinstance(config.adapter, LoraAdapter) and config.adapter.name_or_path and config.adapter.modules_to_save:
        return "modules_to_save begin as they are in the adapter"
    return ""


def under(strategy: str, work: Workload, config: RunConfig, world_size: int) -> Workload:
    """The same work shared by so many processes."""
    fsdp = config.distributed.fsdp
    return replace(
        work,
        strategy=strategy,
        processes=world_size,
        offload=fsdp.cpu_offload,
        regather=fsdp.reshard_after_forward,
    )


def plan_parallel(
    config: RunConfig,
    hardware: Hardware,
    facts: ModelFacts,
    precision: PrecisionPlan,
    work: Workload,
    world_size: int,
    sync: Choice[bool],
    available: int,
) -> ParallelPlan | None:
    """Dtypes between processes and the memory of each strategy; None for one process.

    The dtypes are set explicitly wherever processes exchange tensors, and nothing else may set them.

    Args:
        config, hardware, facts: what was asked, where it runs, the model.
        precision: the dtypes.
        work: of one process, under the chosen strategy.
        world_size: processes over all machines.
        sync: see ``choose_sync``.
        available: bytes that a process may use.
    """
    if world_size == 1:
        return None
    asked = config.distributed
    param: Choice[Format] = Choice(precision.storage.value, "as stored")
    if work.strategy == "fsdp2" and precision.autocast.value and precision.storage.value == "fp32":
        param = Choice(precision.compute.value, "linear layers, which autocast casts anyway; all else as stored")
    return ParallelPlan(
        machines=asked.num_machines,
        param=param,
        reduce=precision.reduce,
        buffer=Choice("as loaded", "no process changes them; rotary tables are fp32"),
        wrap=asked.fsdp.wrap,
        reshard=asked.fsdp.reshard_after_forward,
        offload=asked.fsdp.cpu_offload,
        sync_each=sync,
        gather_once=_gather_once(config, facts, work, available),
        timeout=asked.timeout_seconds,
        memory=tuple(
            (name, memory.total, memory.verdict.value)
            for name, memory in _estimates(config, hardware, facts, work, world_size)
        ),
    )


def _gather_once(config: RunConfig, facts: ModelFacts, work: Workload, available: int) -> Choice[bool] | None:
    """Whether all weights stay gathered while the model answers prompts: the keys and values of the answers get the
    room of a training step's activations.
    """
    served = isinstance(config.method, GrpoMethod) and config.method.server is not None
    if work.strategy != "fsdp2" or not config.method.samples_answers or served:
        return None
    shares = plan_memory(config, facts, work, available)[1]
    whole = weight_bytes(facts, facts.quantization, work.storage)
    needed = shares.total - shares.weights + work.teacher + whole
    said = f"{whole / GIB:.1f} GiB of whole weights while the model answers"
    if not config.distributed.fsdp.reshard_after_forward:
        return Choice(True, f"{said}: asked for (distributed.fsdp.reshard_after_forward: false)")
    if needed <= FITS * available:
        return Choice(True, f"{said}: there is room")
    return Choice(False, f"{said}: there is no room; gathered layer by layer for every token, which is slow")


def main_memory(config: RunConfig, hardware: Hardware, facts: ModelFacts, work: Workload, each: int) -> str:
    """What is to be said of main memory, where processes read a model before it goes to their devices; else empty.

    Weights that keep their format are pages of the files, which processes share and the system takes back; what is
    read into another format is each process's own. Under fsdp2 a process reads one weight after the other, and only its
    rows, unless :func:`needs_whole_weights`; what it offloads stays.

    Args:
        config: what was asked.
        hardware, facts: where it runs, the model.
        work: of one process.
        each: processes on one machine.
    """
    if hardware.kind in ("cpu", "mps") or each == 1 or facts.quantization is not None:
        return ""
    there = hardware.host_memory_bytes
    if work.strategy == "fsdp2" and not needs_whole_weights(config):
        if not work.offload:
            return ""
        state = work.trained * work.trainable + work.optimizer_state
        needed = each * (facts.num_parameters * work.storage + state) / work.processes
        said = (
            f"{each} processes on a machine keep their shares of weights, gradients and optimizer state in main memory"
        )
    elif facts.dtype in BYTES and BYTES[facts.dtype] == work.storage:
        return ""
    else:
        needed = each * facts.num_parameters * work.storage
        said = f"{each} processes on a machine each read the whole model"
    if needed <= there:
        return ""
    return (
        f"{said}: {needed / GIB:.0f} GiB of {there / GIB:.0f} GiB of main memory; with fewer processes on more "
        "machines it is less."
    )


def _by_memory(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, work: Workload, world_size: int
) -> Choice[str]:
    room = per_process(hardware, world_size // config.distributed.num_machines)
    whole = plan_memory(config, facts, under("ddp", work, config, world_size), room)[1]
    said = f"a whole model needs {whole.total / GIB:.1f} GiB of {room / GIB:.1f} GiB on each device"
    if whole.verdict.value != "does not fit":
        return Choice("ddp", f"{said}: it fits, and {_meaning('ddp', world_size)}")
    if refused := cannot_shard(config, hardware, facts):
        return Choice("ddp", f"{said}, which does not fit, but {refused}")
    return Choice("fsdp2", f"{said}, which does not fit; {_meaning('fsdp2', world_size)}")


def _estimates(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, work: Workload, world_size: int
) -> Iterator[tuple[str, MemoryPlan]]:
    room = per_process(hardware, world_size // config.distributed.num_machines)
    for name in STRATEGIES:
        if name == "ddp" or not cannot_shard(config, hardware, facts):
            yield name, plan_memory(config, facts, under(name, work, config, world_size), room)[1]


def _meaning(strategy: str, world_size: int) -> str:
    if strategy == "ddp":
        return f"{world_size} processes, each with a whole copy of the model"
    return f"{world_size} processes, each with a share of weights, gradients and optimizer state"
