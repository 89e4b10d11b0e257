"""Runs Triton kernels on the CPU: Triton's interpreter, made right for bfloat16 and for rounding to float8.

Triton 3.6 to 3.9 keep bfloat16 as raw uint16 in the interpreter: products are garbage and stores truncate, in silence.
Here every operation widens to fp32 and rounds back to nearest even. `mend` asserts itself on a dot and a store, because
it touches private names.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
_mended = False


# modules of ours that define kernels or parts of them, or know them
_KERNEL_FILES = ("triton", "kernels", "delta_kernels", "chunk_kernels", "chunk_launch")


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Inside, kernels that are defined are interpreted ones and may call Triton's own functions (tl.sum, tl.cumsum)."""
    mend()
    with _switched_on():
        yield


@contextlib.contextmanager
def _switched_on() -> Iterator[None]:
    swapped = []
    for module in (tl, tl.standard):
        for name, value in vars(module).copy().items():
            if isinstance(value, JITFunction):
                swapped.append((module, name, value))
                setattr(module, name, interpreter.InterpretedFunction(value.fn))
    kept = {key: _forget(key) for key in list(sys.modules) if _is_ours(key)}
    os.environ["TRITON_INTERPRET"] = "1"
    patches, call = _patch_language(), interpreter.InterpretedFunction.__call__
    interpreter.InterpretedFunction.__call__ = _call_patched
    try:
        yield
    finally:
        interpreter.InterpretedFunction.__call__ = call
        patches.restore()
        del os.environ["TRITON_INTERPRET"]
        for key in [key for key in sys.modules if _is_ours(key)]:
            _forget(key)
        for key, module in kept.items():
            sys.modules[key] = module
            package, _, name = key.rpartition(".")
            setattr(sys.modules[package], name, module)
        for module, name, value in swapped:
            setattr(module, name, value)


def _patch_language() -> Any:
    """What the interpreter does to Triton's language at every call of a function inside a kernel, done once instead."""
    languages = {"tl": tl, "core": tl.core}
    return interpreter._patch_lang(FunctionType((lambda: None).__code__, languages))


def _call_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def _forget(key: str) -> ModuleType:
    """Takes a module out of the imported ones, and off its package, where ``from … import`` would find it."""
    package, _, name = key.rpartition(".")
    vars(sys.modules[package]).pop(name, None)
    return sys.modules.pop(key)


def _is_ours(module: str) -> bool:
    return module.startswith("halftune_kernels.") and module.split(".")[-1] in _KERNEL_FILES


def mend() -> None:
    """Makes the interpreter right for bfloat16, once per process."""
    global _mended
    if not _mended:
        _mend_casts()
        _mend_arithmetic()
        _mend_products()
        _mend_reductions()
        _mended = True
        _assert_mended()


def _is_bf16(x: Any) -> bool:
    return x.dtype.scalar == tl.bfloat16


def _widen(data: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(data).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(data: Any) -> np.ndarray:
    """fp32 to bfloat16 bits, to nearest, ties to even."""
    wide = np.ascontiguousarray(data, dtype=np.float32)
    bits = wide.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _value(x: Any) -> np.ndarray:
    return _widen(x.data) if _is_bf16(x) else x.data


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _mend_casts() -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def cast(original: Callable[..., Any]) -> Callable[..., Any]:
        def cast_impl(self: Any, source: Any, target: Any) -> Any:
            came, wanted = source.dtype.scalar, target.scalar
            if wanted == tl.bfloat16 != came:
                return handle(_narrow(source.data.astype(np.float32)), wanted)
            if came == tl.bfloat16 != wanted:
                return handle(_widen(source.data).astype(interpreter._get_np_dtype(wanted)), wanted)
            return original(self, source, target)

        return cast_impl

    def fp_to_fp(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
            came, wanted = source.dtype.scalar, target.scalar
            widths = came.primitive_bitwidth, wanted.primitive_bitwidth
            if tl.bfloat16 in (came, wanted) and came != wanted and min(widths) >= 16:
                return self.cast_impl(source, target)
            if wanted == tl.float8e4nv and came == tl.float32:  # Triton's drops the carry of rounding up
                given = torch.from_numpy(np.ascontiguousarray(source.data))
                return handle(given.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), wanted)
            return original(self, source, target, rounding)

        return create_fp_to_fp

    _replace(builder, "cast_impl", cast)
    _replace(builder, "create_fp_to_fp", fp_to_fp)
    if not hasattr(builder, "get_bf16"):  # up to 3.8 a bfloat16 tensor times a number raised AttributeError
        builder.get_bf16 = lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)  # type: ignore[attr-defined]


def _mend_arithmetic() -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def binary(original: Callable[..., Any]) -> Callable[..., Any]:
        def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
            if not (_is_bf16(left) or _is_bf16(right)):
                return original(self, left, right, operation)
            out = operation(_value(left), _value(right))
            return handle(out, tl.int1) if operation in _COMPARISONS else handle(_narrow(out), tl.bfloat16)

        return binary_op

    def unary(original: Callable[..., Any]) -> Callable[..., Any]:
        def unary_op(self: Any, x: Any, operation: Any) -> Any:
            return handle(_narrow(operation(_value(x))), tl.bfloat16) if _is_bf16(x) else original(self, x, operation)

        return unary_op

    def ternary(original: Callable[..., Any]) -> Callable[..., Any]:
        def ternary_op(self: Any, a: Any, b: Any, c: Any, operation: Any) -> Any:
            if operation is np.clip and _is_bf16(a):
                return handle(_narrow(operation(_value(a), _value(b), _value(c))), tl.bfloat16)
            return original(self, a, b, c, operation)

        return ternary_op

    for name, make in (("binary_op", binary), ("unary_op", unary), ("ternary_op", ternary)):
        _replace(builder, name, make)


def _mend_products() -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def fma(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            if not _is_bf16(z):
                return original(self, x, y, z)
            return handle(_narrow(_value(x).astype(np.float64) * _value(y) + _value(z)), tl.bfloat16)

        return create_fma

    def dot(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *precision: Any) -> Any:
            a, b = (handle(_value(x), tl.float32) if _is_bf16(x) else x for x in (a, b))
            return original(self, a, b, accumulator, *precision)

        return create_dot

    _replace(builder, "create_fma", fma)
    _replace(builder, "create_dot", dot)


def _mend_reductions() -> None:
    def apply(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_impl(self: Any, inputs: Any) -> Any:
            if not any(_is_bf16(x) for x in inputs):
                return original(self, inputs)
            wide = tuple(self.to_tensor(_widen(x.handle.data), tl.float32) if _is_bf16(x) else x for x in inputs)
            found = original(self, wide)
            found = found if isinstance(found, (tuple, list)) else (found,)
            back = tuple(
                self.to_tensor(_narrow(np.asarray(out.handle.data)), x.dtype)
                if _is_bf16(x) and out.dtype.scalar == tl.float32
                else out
                for out, x in zip(found, inputs, strict=False)
            )
            return back[0] if len(back) == 1 else back

        return apply_impl

    _replace(interpreter.ReduceOps, "apply_impl", apply)


def _assert_mended() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    out, total = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(16, dtype=torch.bfloat16)
    with _switched_on():
        triton.jit(_probe)[(1,)](a, b, out, total)
    expected = ((a.float() @ b.float()).bfloat16() * a + b).float()
    assert (out.float() - expected).norm() < 8e-3 * expected.norm(), "the interpreter is still wrong for bfloat16"
    assert torch.equal(total, (a.float() @ b.float()).bfloat16().amax(1)), "its reductions are wrong for bfloat16"


def _probe(a, b, out, total):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    product = tl.dot(x, y).to(tl.bfloat16)
    tl.store(out + at, product * x + y)
    tl.store(total + tl.arange(0, 16), tl.max(product, 1))
