"""Self-check of operators on this machine: compares outputs and all gradients with the reference.

A compiler can produce wrong gradients with a correct forward pass, and no version table lists every case, so the check
runs on the training machine. Its verdict is cached by machine, versions and kernel source. On a GPU it runs in a
process of its own: a miscompiled kernel may access memory that is not its own, after which the process that started it
can use the GPU no more (seen on an H200 with Triton 3.6.0).

    python -m halftune_kernels.selfcheck OPERATOR BACKEND DEVICE DTYPE...        prints the verdict as JSON
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock

from halftune_kernels import cases

# ||out - ref|| / ||ref|| against fp64: 2 to 3 times the error of correct kernels, a tenth of that of a wrong one.
BOUNDS: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
DTYPES = tuple(BOUNDS)
SIZES = (64, 128)
# Further cases of kernels that read tiles ahead, with enough for loops: columns, and bounds of rows; a ragged last tile
# of both, and of rows alone.
LOOPS: dict[str, tuple[tuple[int, tuple[int, ...]], ...]] = {
    "adapted_activation": ((2050, (0, 4100)), (2048, (0, 4100)))
}
_ENOUGH = 1e-6  # a reference this small has no relative error
_AT_A_TIME = 8  # processes that check side by side: each compiles on one core and holds half a GiB of the GPU
_LIMIT = 900.0  # seconds of one check, which compiles for up to two minutes on one core


@dataclass(frozen=True)
class Verdict:
    """The result of an operator's self-check.

    Attributes:
        operator: the operator.
        backend: the implementation that ran.
        passed: whether all outputs and gradients were within bounds, finite and deterministic.
        detail: the largest error, or the failure.
        seconds: wall time, compilation included.
        lasting: whether to cache it; False if the failure is not the kernels' (out of memory, no C compiler).
    """

    operator: str
    backend: str
    passed: bool
    detail: str
    seconds: float
    lasting: bool = True


def verdict(
    operator: str, device: torch.device, backend: str = "triton", dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Verdict:
    """Return the cached verdict in ``dtypes``, else run the check and cache its verdict.

    The processes of one machine check once: the others wait for the first one's verdict.
    """
    path = cache_dir() / "selfcheck" / f"{fingerprint(operator, device, backend, dtypes)}.json"
    with ExitStack() as stack:
        if (known := _cached(path)) is not None:
            return known
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(path.with_suffix(".lock"), timeout=2 * _LIMIT))
        except OSError:
            pass  # a cache that cannot be written: each process checks for itself
        if (known := _cached(path)) is not None:
            return known
        if device.type == "cuda":
            found = _check_apart(operator, device, backend, dtypes)
        else:
            found = check(operator, device, backend, SIZES, dtypes)
        if found.lasting:
            _keep(path, found)
    return found


def verdicts(asked: Mapping[str, tuple[torch.dtype, ...]], device: torch.device) -> dict[str, Verdict]:
    """Return the verdicts of several operators' Triton kernels in some dtypes; outstanding checks run side by side."""
    with ThreadPoolExecutor(min(len(asked), os.cpu_count() or 1, _AT_A_TIME) or 1) as pool:
        found = pool.map(lambda one: verdict(one[0], device, dtypes=one[1]), asked.items())
        return dict(zip(asked, found, strict=True))


def _cached(path: Path) -> Verdict | None:
    try:
        return Verdict(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or corrupt: check again
        return None


def _keep(path: Path, found: Verdict) -> None:
    try:
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(found)))
        part.replace(path)
    except OSError:
        pass  # not cached: the next process checks again


def _check_apart(
    operator: str, device: torch.device, backend: str, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Verdict:
    """`check` in a process of its own; one that gives no verdict fails, and that is not cached."""
    begun = time.perf_counter()
    # -P: what lies in the current folder is not imported
    command = [sys.executable, "-P", "-m", __name__, operator, backend, str(device), *map(_name, dtypes)]
    # One thread: the reference is small, and checks side by side that each take all cores wait for one another.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, env=environment, check=False)
        return Verdict(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError) as error:
        why = f"{type(error).__name__}: {error}"
    except (ValueError, TypeError, IndexError):
        why = f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"  # type: ignore[possibly-unbound]
    seconds = round(time.perf_counter() - begun, 2)
    return Verdict(operator, backend, False, f"the check did not finish: {why}", seconds, lasting=False)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Inside, torch's own fp32 products do not round their operands to TF32, as the plan of a run may allow."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@_exact_products()
def check(
    operator: str,
    device: torch.device,
    backend: str,
    sizes: tuple[int, ...] = SIZES,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Verdict:
    """Compare ``backend`` of an operator, forward and backward, with the fp64 reference on the CPU."""
    start, worst = time.perf_counter(), (0.0, "")
    dtypes = tuple(one for one in dtypes if not (one == torch.bfloat16 and _lacks_bfloat16(device)))

    def verdict_of(passed: bool, detail: str, lasting: bool = True) -> Verdict:
        return Verdict(operator, backend, passed, detail, round(time.perf_counter() - start, 2), lasting)

    loops = LOOPS.get(operator, ()) if device.type == "cuda" else ()
    for (size, bounds), dtype in itertools.product([*((size, cases.BOUNDS) for size in sizes), *loops], dtypes):
        try:
            errors = _errors(operator, size, dtype, device, backend, bounds)
        except failures() as error:  # no shared memory, a compiler crash, an illegal access
            lasting = not isinstance(error, (torch.OutOfMemoryError, OSError, subprocess.SubprocessError))
            said = (str(error).splitlines() or [""])[0]
            return verdict_of(False, f"{_name(dtype)}, head size {size}: {type(error).__name__}: {said}", lasting)
        for name, (error, deterministic) in errors.items():
            what, allowed = f"{name} {_name(dtype)}, head size {size}", bound(name, dtype)
            if not deterministic:
                return verdict_of(False, f"{what}: not deterministic")
            what += f": error {error:.1e}, bound {allowed:.0e}"
            if not error <= allowed:
                return verdict_of(False, what)
            worst = max(worst, (error / allowed, what))
    return verdict_of(True, f"worst: {worst[1]}")


def _errors(
    operator: str,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    bounds: tuple[int, ...] = cases.BOUNDS,
) -> dict[str, tuple[float, bool]]:
    """Relative error of each result, and whether two calls give the same; not asked of numbers that are not finite."""
    case = cases.rounded(cases.case(operator, size, bounds), dtype)
    truth = case.call(torch.float64, torch.device("cpu"), "reference")
    first, second = (case.call(dtype, device, backend) for _ in range(2))
    same = {name: torch.equal(value, second[name]) or not bool(value.isfinite().all()) for name, value in first.items()}
    return {name: (relative_error(value, truth[name]), same[name]) for name, value in first.items()}


def bound(name: str, dtype: torch.dtype) -> float:
    """Return the bound of ‖out − ref‖/‖ref‖ for a result of `cases.Case.call`.

    The fast steps are about twenty numbers, which may cancel: their bound is 10 times that of a whole gradient. Errors
    there are at least as large as the numbers.
    """
    return BOUNDS[dtype] * (10 if name == cases.AT_FAST_STEPS else 1)


@functools.cache
def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of kernels that do not compile, fit or run: Triton's own, and those of its C compiler."""
    outside = (RuntimeError, subprocess.SubprocessError, OSError)
    if importlib.util.find_spec("triton") is None:
        return outside
    from triton.errors import TritonError

    return *outside, TritonError


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return ``||value - truth|| / ||truth||`` in fp64; infinite if ``value`` is not finite."""
    value, truth = value.detach().double().cpu(), truth.detach().double().cpu()
    if not bool(value.isfinite().all()):
        return float("inf")
    return float((value - truth).norm() / max(float(truth.norm()), _ENOUGH))


def cache_dir() -> Path:
    """Return ``$HALFTUNE_CACHE/kernels``, else under ``$XDG_CACHE_HOME/halftune``, else ``~/.cache/halftune``."""
    own, base = os.environ.get("HALFTUNE_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(own) if own else Path(base) / "halftune").expanduser() / "kernels"


def fingerprint(operator: str, device: torch.device, backend: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str:
    """Return a hash of machine, versions, dtypes and the operator's source: the key of a verdict."""
    facts = [operator, backend, torch.__version__, _machine(device), *map(_name, dtypes)]
    if backend == "triton":
        import triton

        facts.append(triton.__version__)
    package = Path(__file__).parent
    for folder in (package, package / "scan", package / "ops" / operator):
        facts += [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _machine(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} sm_{properties.major}{properties.minor} cuda {torch.version.cuda}"


def _lacks_bfloat16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    _dtypes = tuple(getattr(torch, name) for name in sys.argv[4:])
    print(json.dumps(asdict(check(sys.argv[1], torch.device(sys.argv[3]), sys.argv[2], SIZES, _dtypes))))
