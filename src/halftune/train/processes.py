"""Processes and devices of a run, through accelerate, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend

from halftune.core.errors import PlanError
from halftune.model.place import TORCH_TYPES
from halftune.plan import Plan

_REPLICATED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
}


def make_accelerator(plan: Plan) -> Accelerator:
    """Processes and device. Mixed precision is the plan's own, so accelerate's is off whatever its default config says.

    Raises:
        PlanError: what came up is not what was planned: another device, another number of processes, or a sharding or
            compiling engine that the environment or a default config of accelerate switches on.
    """
    accelerator = Accelerator(mixed_precision="no", cpu=plan.device.value == "cpu")
    expected = TORCH_TYPES[plan.device.value]
    if accelerator.device.type != expected:
        raise PlanError(
            f"the run was planned for {plan.device.value}, but torch offers {accelerator.device.type}",
            remedy="`halftune plan` shows what was found; check CUDA_VISIBLE_DEVICES and the torch build",
        )
    if accelerator.num_processes != plan.batch.world_size:
        raise PlanError(
            f"the run was planned for {plan.batch.world_size} processes, but {accelerator.num_processes} came up",
            remedy="start it with torchrun, which sets WORLD_SIZE",
        )
    dynamo = accelerator.state.dynamo_plugin
    compiled = dynamo is not None and dynamo.backend != DynamoBackend.NO
    if accelerator.distributed_type not in _REPLICATED or compiled:
        raise PlanError(
            f"the environment switches {accelerator.distributed_type.value} or torch dynamo on, which the plan has not",
            remedy="unset the ACCELERATE_* variables; training.torch_compile compiles",
        )
    return accelerator


def sum_over_processes(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Sums of ``values`` over all processes, in the widest format that crosses them (fp64; fp32 on MPS)."""
    if accelerator.num_processes == 1:
        return [float(value) for value in values]
    wide = torch.float32 if accelerator.device.type == "mps" else torch.float64
    sums = accelerator.reduce(torch.tensor(values, dtype=wide, device=accelerator.device), reduction="sum")
    assert isinstance(sums, torch.Tensor)
    return sums.tolist()
