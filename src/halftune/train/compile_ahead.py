"""What the first step would wait for is proven and compiled before it, while the device is still empty."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halftune.config.run import RunConfig
from halftune.core.log import get_logger
from halftune.model.files.architectures import read_config
from halftune.model.files.locate import locate
from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype
from halftune.train.callback import Phase

log = get_logger(__name__)


def prove_kernels(plan: Plan, device: torch.device, phase: Callable[[Phase], None]) -> None:
    """Compares the kernels of dense layers with their references on this GPU, side by side, unless it was done before.

    What is wrong here is computed by torch, and the log says so.
    """
    if device.type != "cuda":
        return
    from halftune_kernels.dispatch import choose, prove  # imports the operators
    from halftune_kernels.gate import DENSE

    phase("compiling")
    dtype = torch_dtype(plan.precision.compute.value)
    dense = DENSE if plan.batch.fused_layers.value else ("linear_cross_entropy",)
    frozen = plan.precision.linear is not None and not plan.precision.trains_in_float8  # torchao has its own kernels
    needed = {"float8_rows": frozen, "gated_rms_norm": plan.attention.linear.value != "none"}
    operators = [name for name in dense if needed.get(name, True)]
    prove(operators, device, dtype)
    for name in operators:
        if (backend := choose(name, device, dtype)).name != "triton":
            log.warning("%s runs on backend %s: %s", name, backend.name, backend.reason)
    phase("loading")


def compile_ahead(config: RunConfig, plan: Plan, device: torch.device, phase: Callable[[Phase], None]) -> None:
    """Proves the kernels of dense layers, compiles those of linear-attention layers, while the device is still empty.

    Every process does so for its own device: which kernels are right is found there, and Triton's cache, which they
    share, is whole at every moment.

    Raises:
        PlanError: a kernel does not run here.
    """
    prove_kernels(plan, device, phase)
    if plan.attention.linear.value != "halftune":
        return
    from halftune.model.attention.compile_kernels import compile_kernels, kernels_to_compile  # imports the operators

    if device.type != "cpu":
        phase("compiling")
    model_config = read_config(locate(config.model), trust_remote_code=config.model.trust_remote_code)
    if operators := kernels_to_compile(model_config, plan, device):
        seconds = compile_kernels(model_config, plan, device, frozen=config.adapter.type != "none")
        log.info("kernels: %s compiled in %.1f s, or found in Triton's cache", ", ".join(operators), seconds)
    if device.type != "cpu":
        phase("loading")
