"""The processes of a run: agreement, sums over them, and the memory of this one."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend, gather_object

from halftune.core.errors import PlanError
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.core.processes.process import hidden, this_process
from halftune.model.load.device import TORCH_TYPES
from halftune.plan import Plan

# glibc's names, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
log = get_logger(__name__)
# What switches an engine or a precision of accelerate's on, and the options of those.
_SWITCHES = (
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
_ENGINES = (*_SWITCHES, "ACCELERATE_DYNAMO_", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "FSDP_")
GRACE = 2.0  # seconds that one which hangs has to say so itself, before the others do
_REPLICATED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
}


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes in use so far: allocated on a CUDA, ROCm or XPU device, resident in this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "xpu":
        return torch.xpu.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_memory() -> bool:
    """Lets this process keep the memory of freed tensors for the next ones, where its C library is glibc.

    By default glibc maps every large tensor anew and gives it back when it is freed: each step then faults in the same
    pages again, a tenth of the time of a small model on a CPU. Small tensors that are made between large ones can leave
    holes that the next large ones do not fit.

    Returns:
        Whether the C library took it.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def make_accelerator(plan: Plan) -> Accelerator:
    """Processes and device. Mixed precision is the plan's own, so accelerate's is off whatever its default config says.

    Raises:
        PlanError: what came up is not what was planned: another device, another number of processes, or a sharding or
            compiling engine that the environment or a default config of accelerate switches on.
    """
    # Takes out of the environment what `accelerate launch` puts there from a default config in the home folder. How
    # numbers are computed and models are shared is in the plan; a warning says what was asked for elsewhere.
    for name in [name for name in os.environ if name.startswith(_ENGINES)]:
        value = os.environ.pop(name)
        if name in _SWITCHES and value.lower() not in ("", "no", "false", "0"):
            log.warning("%s=%s has no effect here: the plan decides (an accelerate config asks for it)", name, value)
    if (started := this_process().world_size) != plan.batch.world_size:
        what = f"the run was planned for {plan.batch.world_size} processes, but a launcher has started {started}"
        raise PlanError(what, remedy="start it with `halftune train` or torchrun", code="launch.process_count_differs")
    if plan.parallel is not None:
        _gather(plan, plan.parallel.timeout)
    with hidden():
        accelerator = Accelerator(mixed_precision="no", cpu=plan.device.value == "cpu")
    expected = TORCH_TYPES[plan.device.value]
    if accelerator.device.type != expected:
        what = f"the run was planned for {plan.device.value}, but torch offers {accelerator.device.type}"
        remedy = "`halftune plan` shows what was found; check CUDA_VISIBLE_DEVICES and the torch build"
        raise PlanError(what, remedy=remedy, code="hardware.device_unavailable")
    if accelerator.num_processes != plan.batch.world_size:
        what = f"the run was planned for {plan.batch.world_size} processes, but {accelerator.num_processes} came up"
        remedy = "start it with torchrun, which sets WORLD_SIZE"
        raise PlanError(what, remedy=remedy, code="launch.process_count_differs")
    dynamo = accelerator.state.dynamo_plugin
    compiled = dynamo is not None and dynamo.backend != DynamoBackend.NO
    if accelerator.distributed_type not in _REPLICATED or compiled:
        what = f"the environment enables {accelerator.distributed_type.value} or torch dynamo, the plan does not"
        remedy = "unset the ACCELERATE_* variables; training.torch_compile compiles"
        raise PlanError(what, remedy=remedy, code="launch.bad_environment")
    answered = round(sum_over_processes(accelerator, [1.0])[0])
    if answered != accelerator.num_processes:
        what = f"{answered} of {accelerator.num_processes} processes answered the first sum"
        raise PlanError(what, code="launch.process_count_differs")
    return accelerator


def _gather(plan: Plan, seconds: float) -> None:
    """Waits for processes that still tokenise, however long that takes, and makes the group."""
    from halftune.train.parallel.rendezvous import join, join_rendezvous

    rendezvous = join_rendezvous()
    rendezvous.tell("ready", True)
    rendezvous.wait("ready", lambda: True)  # one that dies meanwhile ends this one, too: its launcher sees to that
    join(TORCH_TYPES[plan.device.value], seconds + GRACE)


def barrier(processes: int) -> None:
    """Wait until all processes have reached this point; see ``train.parallel.barrier``."""
    if processes > 1:
        from halftune.train.parallel import barrier as several  # most runs have one process

        several.barrier(processes)


def check_agreed(accelerator: Accelerator, what: str, value: str) -> None:
    """Makes sure that all processes have the same value.

    Raises:
        PlanError: names the first rank that has another one than rank 0.
    """
    if accelerator.num_processes == 1:
        return
    barrier(accelerator.num_processes)  # one may have read its weights from a slower disk
    everybody = gather_object([value])
    differing = [rank for rank, other in enumerate(everybody) if other != everybody[0]]
    if differing:
        raise PlanError(
            f"rank {differing[0]} has another {what} than rank 0 ({everybody[differing[0]][:12]}, {everybody[0][:12]})",
            remedy="make it the same on all machines",
            code="launch.settings_differ",
        )


def wide(device: torch.device) -> torch.dtype:
    """The widest float format of a device: fp64, on MPS fp32."""
    return torch.float32 if device.type == "mps" else torch.float64


def sum_over_processes(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Sums of ``values`` over all processes, in the widest format that crosses them; waits for the device."""
    if accelerator.num_processes == 1:
        return [float(value) for value in values]
    device = accelerator.device
    return sum_tensor(accelerator, torch.tensor(values, dtype=wide(device), device=device)).tolist()


def sum_tensor(accelerator: Accelerator, values: torch.Tensor) -> torch.Tensor:
    """Sums of a tensor's elements over all processes, on its device; does not wait for it."""
    if accelerator.num_processes == 1:
        return values
    heartbeat.tick()
    sums = accelerator.reduce(values, reduction="sum")
    assert isinstance(sums, torch.Tensor)
    return sums


class Readout:
    """A vector on its way from its device; the only place where a training step waits for one.

    Args:
        values: ``[N]``, any float dtype; on a CPU it is what is read.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.device.type in ("cuda", "xpu"):
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived: Any = torch.get_device_module(values.device).Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers, once the device has come that far."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
