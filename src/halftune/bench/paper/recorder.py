"""Records every kernel of a step on fake CUDA tensors, and every place where the host waits for the GPU."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from halftune.bench.paper.attention import is_attention
from halftune.bench.paper.costs import Cost, cost_of, distinct, is_free, tensors_in, touched
from halftune.bench.paper.kinds import Context, around, kind_of
from halftune.bench.paper.syncs import answer, by_positions, on_gpu, sync_of
from halftune.bench.paper.values import Values
from halftune.model.meta.packed_weights import unpacked_product
from halftune.precision.dtypes import plain_name

_BLOCK = 512  # bytes; torch's allocator rounds up to them (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_forward_calls: Callable[[], int] = vars(torch._C)["_autograd"]._get_sequence_nr
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)
_PACKAGES = re.compile(r".*/(?=(halftune|halftune_kernels|transformers|peft|accelerate)/)")


@dataclass(frozen=True)
class Launch:
    """A call that launches kernels.

    Attributes:
        op: the operator, or ``triton::kernel``.
        kind: what it belongs to (``kinds``).
        module: path of the module that called it, forward; empty outside of the model.
        layer: index of the decoder layer, or None.
        backward: whether it ran in the backward pass.
        cost: its traffic and arithmetic.
        calls: operators before it that launched nothing.
    """

    op: str
    kind: str
    module: str
    layer: int | None
    backward: bool
    cost: Cost
    calls: int


@dataclass(frozen=True)
class Sync:
    """A wait of the host for the GPU.

    Attributes:
        what: the operation that waits.
        line: the line of halftune, transformers … that asked.
        after: number of launches before it.
        until: number of launches that it waits for; 0 for those of earlier steps.
    """

    what: str
    line: str
    after: int
    until: int


class Recorder(TorchDispatchMode):
    """A mode around a step, above the fake tensors' own.

    Args:
        ranks: sizes that mark a product as a side product of an adapter.
    """

    def __init__(self, ranks: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.ranks = ranks
        self.values = Values()
        self.device_asked = False  # by Python code; torch's own code sees a CPU, whose autograd needs no streams
        self.moves = False  # a copy to another device, which Python code asked for
        self.on_gpu = False  # the model is there
        self.by_python = False  # Python code makes a tensor and says where
        self.launches: list[Launch] = []
        self.syncs: list[Sync] = []
        self.on = False
        self.session = 0  # counts recordings
        self.bytes, self.peak = 0, 0  # of live tensors on the GPU, in blocks of its allocator
        self._blocks: set[int] = set()  # their storages
        self._names: dict[nn.Module, Context] = {}
        self._stack: list[Context] = []
        self._made: dict[int, Context] = {}  # by autograd's number of the forward call
        self.calls = 0  # operators after the last launch that launched nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not set(types) <= {FakeTensor}:
            return NotImplemented  # a pair of float8 values and scales takes itself apart
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device if self.device_asked else torch.device("cpu")
        if func._schema.name == "bitsandbytes::gemm_4bit":
            with self:  # its parts are recorded
                return unpacked_product(*args, **kwargs)
        if kwargs.get("device") == _CPU:
            kwargs = {**kwargs, "device": self._meant(func, args)}
        if waits := sync_of(func, args, kwargs):
            self.sync(waits, sys._getframe(1))
        func, args = by_positions(func, args, self.values)
        own = answer(func, kwargs, self.values) if any(map(is_fake, args)) else None
        out = (own or func)(*args, **kwargs)
        self._allocate(out)
        self.values.follow(func, args, kwargs, out)
        self._note(func, args, kwargs, out, sys._getframe(1))
        return out

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, calls are attributed to the model's modules."""
        self.on_gpu = True
        self._names = {module: _context(name, module) for name, module in model.named_modules()}
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, kernels and waits are recorded; earlier records are dropped."""
        self.launches, self.syncs, self.calls, self.on = [], [], 0, True
        self.peak = self.bytes
        self.session += 1
        try:
            yield
        finally:
            self.on = False

    def sync(self, what: str, frame: FrameType | None, until: int | None = None) -> None:
        """Record a wait of the host, for the first ``until`` launches or all so far."""
        if self.on:
            now = len(self.launches)
            self.syncs.append(Sync(what, line_of(frame), now, now if until is None else until))

    def triton(self, name: str, args: Any, hopper: float = 0.0, flops: float = 0.0) -> None:
        """Record the launch of a Triton kernel: every operand is read or written once.

        Args:
            name: of the kernel.
            args: its arguments.
            hopper, flops: see ``Cost``.
        """
        if not self.on:
            return
        operands = distinct(tensors_in(args))
        moved = sum(map(touched, operands))
        dtype = max(operands, key=lambda one: one.numel()).dtype if operands else torch.float32
        self._add(f"triton::{name}", Cost(moved, 0, flops, dtype=dtype, hopper=hopper), sys._getframe(1))

    def _meant(self, func: Any, args: Any) -> torch.device:
        """The device that torch's own code means by the CPU, which it takes every tensor to be on."""
        operands = tensors_in(args)
        if operands:
            return operands[0].fake_device if isinstance(operands[0], FakeTensor) and not self.moves else _CPU
        made = self.on_gpu and not self.by_python and func is not torch.ops.aten.scalar_tensor.default
        return _CUDA if made else _CPU

    def _allocate(self, out: Any) -> None:
        """Count the memory of new tensors until their storages are freed."""
        for tensor in filter(on_gpu, tensors_in(out)):
            storage = tensor.untyped_storage()
            if (key := storage._cdata) in self._blocks:
                continue
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            self._blocks.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._blocks.discard(key)
        self.bytes -= size

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, frame: FrameType | None) -> None:
        context = self._context(frame)
        if not torch._C._current_autograd_node() or self._stack:
            self._made.setdefault(_forward_calls() - 1, context)  # later calls may make no node
        if not self.on:
            return
        if is_free(func) or not any(map(on_gpu, tensors_in((args, kwargs, out)))):
            self.calls += 1
            return
        cost = cost_of(func, args, kwargs, out, self._lengths)
        self._add(func._schema.name, cost, frame, context, self._low_rank(args, cost))

    def _add(
        self, name: str, cost: Cost, frame: FrameType | None, context: Context | None = None, low_rank: bool = False
    ) -> None:
        context = context or self._context(frame)
        kind = kind_of(
            name,
            context,
            fused_attention=is_attention(name),
            low_rank=low_rank,
            product=cost.flops > 0,
        )
        layer = _LAYER.search(context.module)
        backward = torch._C._current_autograd_node() is not None
        at = int(layer.group(1)) if layer else None
        self.launches.append(Launch(name, kind, context.module, at, backward, cost, self.calls))
        self.calls = 0

    def _context(self, frame: FrameType | None) -> Context:
        """Where a call is made; in the backward pass, where its forward call was made."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._stack:
            return self._made.get(node._sequence_nr()) or Context(around=around(frame))
        inner = self._stack[-1] if self._stack else Context()
        return Context(inner.module, inner.type, around(frame))

    def _low_rank(self, args: Any, cost: Cost) -> bool:
        sides = {size for tensor in tensors_in(args) if tensor.ndim >= 2 for size in tensor.shape[-2:]}
        return cost.flops > 0 and bool(self.ranks & sides)

    def _lengths(self, vector: torch.Tensor) -> list[int] | None:
        known = self.values.of(vector)
        return None if known is None else known.tolist()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._stack.append(self._names.get(module) or (self._stack[-1] if self._stack else Context()))

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()


def _context(name: str, module: nn.Module) -> Context:
    package = type(module).__module__.partition(".")[0]
    return Context(plain_name(name), f"peft.{type(module).__name__}" if package == "peft" else type(module).__name__)


def line_of(frame: FrameType | None) -> str:
    """``package/file.py:line function`` of the innermost line outside of torch and this package."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        frame = frame.f_back
    if frame is None:
        return "?"
    file = _PACKAGES.sub("", frame.f_code.co_filename)
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)
