"""Fake CUDA tensors on any build of torch: no GPU, no driver, no memory for weights.

torch's fake tensors know their device, and a CPU build cannot run autograd on CUDA tensors, whose engine asks for
streams. So Python code is told that a tensor is on ``cuda:0``, and torch's own code that it is on the CPU. Autocast's
casts are then made by ``cuda_autocast_rules``. What else asks the driver is answered by the planned machine.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.cuda.amp.common
import torch.optim.optimizer as optimizers
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from halftune.attention import flash, flex
from halftune.bench.paper.attention import attend_as_cuda
from halftune.bench.paper.attention_kernels import attend_flex, package
from halftune.bench.paper.recorder import Recorder
from halftune.bench.paper.scans import scan_flops, scan_seconds
from halftune.bench.paper.syncs import device_of, on_gpu
from halftune.hardware import Device
from halftune.precision.trace.cuda_rules import cuda_autocast_rules
from halftune.precision.trace.fake_tensors import FakeTensors
from halftune_kernels import dispatch, launch, selfcheck

CUDA = torch.device("cuda", 0)
_DEVICE = {getattr(torch.Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")}
_FACTORIES = frozenset(
    (
        *("tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "range", "eye", "linspace", "logspace"),
        *("rand", "randn", "randint", "randperm", "normal", "scalar_tensor", "tril_indices", "triu_indices"),
        *("empty_strided", "complex", "polar", "from_numpy"),
    )
)
_parse: Any = vars(torch._C)["_nn"]._parse_to
# Multiprocessors of V100, T4, A100, RTX 3090, RTX 4090, H100, B200, RTX 5090.
_SM = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}


class _Python(TorchFunctionMode):
    """Answers Python code about fake tensors where torch's C++ code must not."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DEVICE:
            before, self.recorder.device_asked = self.recorder.device_asked, True
            try:
                return func(*args, **kwargs)
            finally:
                self.recorder.device_asked = before
        if func is torch.Tensor.numpy and isinstance(args[0], FakeTensor):
            return _read(self.recorder, args[0]).numpy()
        if func is torch.Tensor.get_device:
            return 0 if on_gpu(args[0]) else -1
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in (torch.nn.functional.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func is torch.Tensor.to:
            return _to(self.recorder, *args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return _to(self.recorder, args[0], CUDA if func is torch.Tensor.cuda else torch.device("cpu"))
        if kwargs.get("device") in ("cuda", torch.device("cuda")):
            kwargs = {**kwargs, "device": CUDA}
        before, self.recorder.by_python = self.recorder.by_python, getattr(func, "__name__", "") in _FACTORIES
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.by_python = before


def _read(recorder: Recorder, tensor: FakeTensor) -> torch.Tensor:
    """The values of a tensor, for which the host waits."""
    if tensor.fake_device.type == "cuda":
        recorder.sync("copy to the host", sys._getframe(2))
    return recorder.values.or_ones(tensor)


def _list(recorder: Recorder) -> Any:
    """``Tensor.tolist`` by one copy; fake tensors would read their elements one by one."""

    def tolist(tensor: FakeTensor) -> Any:
        values = _read(recorder, tensor)
        with unset_fake_temporarily():
            return values.tolist()

    return tolist


def _to(recorder: Recorder, tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to``, whose C++ code would take a tensor on ``cuda`` for one on the CPU and copy it."""
    other = kwargs.pop("other", args[0] if args and isinstance(args[0], torch.Tensor) else None)
    if other is not None:
        args = (device_of(other), other.dtype, *args[1:])
    device, dtype, non_blocking, layout = _parse(*args, **kwargs)
    device = CUDA if device is not None and device.type == "cuda" else device or device_of(tensor)
    same = device == device_of(tensor)
    if same and dtype in (None, tensor.dtype) and not copy and layout in (None, torch.preserve_format):
        return tensor
    options: dict[str, Any] = {} if same else {"device": device, "non_blocking": non_blocking}
    if layout is not None:
        options["memory_format"] = layout
    recorder.moves = not same
    try:
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype or tensor.dtype, **options)
    finally:
        recorder.moves = False


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, train: bool | None = None, inplace: Any = None
) -> torch.Tensor:
    """The fused kernel, which C++ code chooses for CUDA tensors only."""
    training = training if train is None else train
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


@contextmanager
def fake_cuda(recorder: Recorder, device: Device) -> Iterator[FakeTensors]:
    """Inside, new floating tensors are fake, those on ``cuda`` as if ``device`` were there; kernels are recorded."""
    capability = device.capability or (8, 0)
    with ExitStack() as stack:
        for context in _answers(recorder, device, capability):
            stack.enter_context(context)
        stack.enter_context(cuda_autocast_rules("cuda"))
        stack.enter_context(_as_on_cuda())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(launch.standing_in(10 * capability[0] + capability[1], _starter(recorder)))
        dispatch._on_gpu.cache_clear()
        stack.callback(dispatch._on_gpu.cache_clear)
        mode = stack.enter_context(FakeTensors())
        stack.enter_context(recorder)
        python = stack.enter_context(_Python(recorder))
        # it is off in a backward pass, where a checkpoint computes its forward pass again
        defaults = inspect.unwrap(torch.utils.checkpoint.checkpoint).__kwdefaults__
        stack.enter_context(patch.dict(defaults, context_fn=lambda: (nullcontext(), python)))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield mode


def _event(recorder: Recorder) -> type:
    """A class like ``torch.cuda.Event`` that knows how many launches were enqueued before it."""

    class Event:
        """A place in the stream of kernels."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.after = (0, 0)

        def record(self, *_: Any) -> None:
            """Remember the place."""
            self.after = (recorder.session, len(recorder.launches))

        def wait(self, *_: Any) -> None:
            """Another stream waits; the host does not."""

        def query(self) -> bool:
            """Whether the GPU has come that far."""
            return True

        def synchronize(self) -> None:
            """Wait until the GPU has come that far: at once, if that was in an earlier step."""
            session, after = self.after
            recorder.sync("event", sys._getframe(1), after if session == recorder.session else 0)

    return Event


def _answers(recorder: Recorder, device: Device, capability: tuple[int, int]) -> Iterator[Any]:
    """What would ask the driver."""
    properties = SimpleNamespace(
        name=device.name,
        major=capability[0],
        minor=capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=_SM.get(capability, 108),
        warp_size=32,
    )
    cuda = {
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: device.name,
        "current_device": lambda: 0,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "synchronize": lambda *_: recorder.sync("torch.cuda.synchronize", sys._getframe(1)),
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "Event": _event(recorder),
        "max_memory_allocated": lambda *_: 0,
    }
    yield from (patch.object(torch.cuda, name, answer) for name, answer in cuda.items())
    yield patch.object(FakeTensor, "tolist", _list(recorder))
    yield patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    yield patch.object(masking_utils, "is_tracing", lambda *_: False)  # true of fake tensors, which then get a mask
    yield patch.object(torch.random, "fork_rng", lambda *_, **__: nullcontext())
    yield patch.object(torch.utils.checkpoint, "get_device_states", lambda *_: ([], []))
    yield patch.object(clip_grad, "_has_foreach_support", lambda _, device: device.type == "cuda")
    kinds = [*optimizers._foreach_supported_types, FakeTensor]
    yield patch.object(optimizers, "_foreach_supported_types", kinds)
    yield patch.object(torch._C, "_group_tensors_by_device_and_dtype", _grouped)
    yield patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend)
    yield patch.object(flex, "attend", attend_flex)
    yield patch.object(flash, "need", package)
    yield patch.object(dispatch, "_verdict", lambda operator, *_: _assumed(operator))


_on_cpu = torch.nn.functional.scaled_dot_product_attention


def _attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return (attend_as_cuda if on_gpu(query) else _on_cpu)(query, *args, **kwargs)


_group: Any = vars(torch._C)["_group_tensors_by_device_and_dtype"]


def _grouped(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    """torch's groups of tensors for operators over lists, with the device that Python code sees."""
    groups = _group(lists, with_indices).items()
    return {
        (device_of(next(one for one in found[0][0] if one is not None)), dtype): found for (_, dtype), found in groups
    }


def _assumed(operator: str) -> selfcheck.Verdict:
    return selfcheck.Verdict(operator, "triton", passed=True, detail="assumed on paper", seconds=0.0)


def _starter(recorder: Recorder) -> launch.Starter:
    def start(kernel: Any, _grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        function = getattr(kernel, "fn", kernel)
        name, where = getattr(function, "__name__", "kernel"), getattr(function, "__module__", "")
        scan = scan_seconds(name, args), scan_flops(where, name, args, options)
        recorder.triton(name, (args, options), *scan)

    return start


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Inside, operators that torch decomposes for devices without a kernel of their own stay whole, as on CUDA."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    try:
        for name in _whole_on_cuda():
            library.impl(name, _never)
        yield
    finally:
        library._destroy()


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("fake tensors run no kernels")


@cache
def _whole_on_cuda() -> tuple[str, ...]:
    """Operators with a kernel for CPUs (and CUDA) and a decomposition for other devices."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    listed = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    names = [name for name in listed if name.startswith("aten::") and has(name, "CPU")]
    return tuple(name.removeprefix("aten::") for name in names if not has(name, "CUDA"))


def move(model: nn.Module) -> None:
    """Replace a model's parameters and buffers by fake ones on ``cuda:0``; tied parameters stay tied."""
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in memo:
                with torch.no_grad():
                    moved = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=CUDA)
                memo[id(parameter)] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
                marks = {key: value for key, value in vars(parameter).items() if key not in vars(memo[id(parameter)])}
                vars(memo[id(parameter)]).update(marks)
            module._parameters[name] = memo[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(CUDA)
