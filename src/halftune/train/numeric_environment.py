"""What the last bit of a run depends on beside its configuration: versions, device, threads, random states."""

from __future__ import annotations

import os
import platform
import random
from typing import Any

import numpy as np
import torch

from halftune import __version__
from halftune.core.log import get_logger
from halftune.core.optional import version_of
from halftune.train.state import TrainState


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)


def set_rounding(tf32: bool, deterministic: bool) -> None:
    """How operators round, before the first product on a GPU.

    Args:
        tf32: fp32 products may be computed in TF32.
        deterministic: those of torch and flash-attn round the same way each time; torch warns of one that cannot.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    if deterministic:
        # takes time, and is for finding bugs
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as cuBLAS asks


def random_state(device: torch.device) -> dict[str, Any]:
    """All states as JSON-able lists of numbers."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
        "cpu": torch.get_rng_state().tolist(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state().tolist()
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts back what :func:`random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["cpu"], dtype=torch.uint8))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(torch.tensor(state[device.type], dtype=torch.uint8))


log = get_logger(__name__)
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "numpy")
VARIABLES = (  # of the libraries; they change the format of products, or the order of sums
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def numeric_environment(run: TrainState) -> dict[str, str]:
    """Name → value, of this launch; a checkpoint holds it."""
    versions = {name: version_of(name) or "none" for name in PACKAGES}
    found = {"halftune": __version__, "python": platform.python_version(), **versions}
    found |= {"device": run.device.type, "compute": run.plan.precision.compute.value}
    if run.plan.precision.trains_in_float8:
        found["torchao"] = version_of("torchao") or "none"
    attention = run.plan.attention
    found["attention"] = f"{attention.softmax.value} ({attention.provider.value})"
    found["linear attention"] = attention.linear.value
    found |= {"processes": str(run.plan.batch.world_size), "strategy": run.plan.distribution.value}
    if run.device.type == "cpu":  # how a sum is split decides its rounding
        found |= {"threads": str(torch.get_num_threads()), "vectors": torch.backends.cpu.get_cpu_capability()}
    elif run.device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(run.device)}
    return found | variables_that_round()


def variables_that_round() -> dict[str, str]:
    """The environment variables that are set and can change numbers; name → value."""
    return {
        name: value
        for name, value in os.environ.items()
        if value and (name in VARIABLES or name.startswith("HALFTUNE_KERNELS"))
    }


def warn_other_environment(before: dict[str, Any], now: dict[str, str]) -> None:
    """Warn if a run resumes with other versions, or on another machine, than its checkpoint."""
    if not before:
        log.warning("the checkpoint does not record its versions: the result may not be bit-identical")
        return
    names = sorted(before.keys() | now.keys())
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        log.warning(
            "the checkpoint was written with %s, this process has %s: the result may not be bit-identical",
            *(", ".join(f"{name} {made.get(name, _absent(name))}" for name in changed) for made in (before, now)),
        )


def _absent(name: str) -> str:
    return "unset" if name.isupper() else "unknown"
