"""Compiles kernels for GPUs that are not here and reads what they need: shared memory, registers, spills.

A stand-in driver tells Triton which GPU to compile for; the operator itself runs on CPU tensors that no kernel
ever touches, so that every kernel is specialised as a real call would specialise it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from halftune_kernels.cases import Case
from halftune_kernels.gate import SHARED_MEMORY
from halftune_kernels.launch import standing_in

TENSOR_MEMORY = 512  # columns that a block may have where there is any (sm_100): what Triton checks at a launch
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """What one kernel needs on one GPU.

    Attributes:
        kernel: its name.
        capability: 10 * major + minor.
        shared: bytes of shared memory per block.
        limit: what the GPU has.
        registers: per thread.
        spills: bytes per thread that did not fit the registers.
        tensor_cores: whether it uses them.
        cut: tiles and warps it is cut into.
        tensor_memory: columns of it; with too many, Triton compiles a trap and nothing else.
    """

    kernel: str
    capability: int
    shared: int
    limit: int
    registers: int
    spills: int
    tensor_cores: bool
    cut: str
    tensor_memory: int = 0

    @property
    def fits(self) -> bool:
        """Whether a block fits the GPU's shared memory and tensor memory."""
        return self.shared <= self.limit and self.tensor_memory <= TENSOR_MEMORY


class _StandInDriver:
    """What Triton asks a driver when it only compiles; the device number is the capability, one cache for each."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_case(case: Case, dtype: torch.dtype, capability: int, only: Collection[str] = ()) -> list[Compiled]:
    """Compiles every kernel that ``case`` starts, forward and backward, in ``dtype``, once each; ``only`` those named,
    or all."""
    return compile_kernels(lambda: case.call(dtype, torch.device("cpu"), "triton"), capability, only)


def compile_kernels(run: Callable[[], Any], capability: int, only: Collection[str] = ()) -> list[Compiled]:
    """Compiles every kernel that ``run`` starts for a GPU of ``capability``, or ``only`` those named."""
    found: dict[int, Compiled] = {}

    def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if only and kernel.fn.__name__ not in only:
            return
        mocked = [MockTensor(x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
        built = kernel.warmup(*mocked, **options, grid=grid)
        if id(built) not in found:
            found[id(built)] = _read(kernel.fn.__name__, built, capability, _cut(options))

    driver.set_active(_StandInDriver(capability))  # type: ignore[arg-type]
    try:
        with standing_in(capability, start):
            run()
    finally:
        if torch.cuda.is_available():  # without a GPU there is no driver to go back to
            driver.reset_active()
    return list(found.values())


def _cut(options: dict[str, Any]) -> str:
    tiles = [f"{name} {options[name]}" for name in ("M", "R", "BD", "BV", "TK", "TV") if name in options]
    return ", ".join([*tiles, f"{options['num_warps']} warps"])


def _read(name: str, built: Any, capability: int, cut: str) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [_TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, f"cuobjdump speaks differently: {text[:200]}"
    instruction = re.search(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", built.asm["ptx"])
    limit = SHARED_MEMORY[capability]
    registers, spills = int(match[1]), int(match[2])
    shared, columns, products = built.metadata.shared, built.metadata.tmem_size or 0, instruction is not None
    return Compiled(name, capability, shared, limit, registers, spills, products, cut, columns)
