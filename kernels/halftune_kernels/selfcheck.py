"""Does each operator compute and learn right on this machine: outputs and every gradient against the reference.

A compiler can give wrong gradients with a right forward pass; no version table knows every case. So the check runs
where the training runs. Its verdict is kept on disk per machine, versions and kernel source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from halftune_kernels import cases

# ||out - ref|| / ||ref|| against fp64: 2 to 3 times the level of correct kernels, a tenth of what a wrong one shows.
BOUNDS: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
SIZES = (64, 128)
_ENOUGH = 1e-6  # a reference this small has no relative error


@dataclass(frozen=True)
class Verdict:
    """What the self-check of one operator found.

    Attributes:
        operator: the operator.
        backend: the implementation that ran.
        passed: every output and gradient was within its bound, finite, and the same twice.
        detail: the worst finding, or what failed.
        seconds: wall time, compilation included.
        lasting: false where it says nothing about the kernels: the memory was full, or no C compiler there.
    """

    operator: str
    backend: str
    passed: bool
    detail: str
    seconds: float
    lasting: bool = True


def verdict(operator: str, device: torch.device, backend: str = "triton") -> Verdict:
    """The verdict kept on disk, else that of `check`, which is then kept."""
    path = cache_dir() / "selfcheck" / f"{fingerprint(operator, device, backend)}.json"
    try:
        return Verdict(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or torn by a full disk: check again
        found = check(operator, device, backend)
    if not found.lasting:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(found)))
        part.replace(path)
    except OSError:
        pass  # a read-only home costs the next process some seconds, nothing else
    return found


def check(operator: str, device: torch.device, backend: str, sizes: tuple[int, ...] = SIZES) -> Verdict:
    """Runs ``backend`` of one operator forward and backward in every dtype, against the fp64 reference on the CPU."""
    start, worst, problem, lasting = time.perf_counter(), (0.0, ""), "", True  # the first problem, which is the cause
    dtypes = [dtype for dtype in BOUNDS if not (dtype == torch.bfloat16 and _lacks_bfloat16(device))]
    for size in sizes:
        plain = cases.case(operator, size)
        for dtype in dtypes:
            case = cases.rounded(plain, dtype)
            try:
                truth = case.call(torch.float64, torch.device("cpu"), "reference")
                first, second = (case.call(dtype, device, backend) for _ in range(2))
            except failures() as error:  # no shared memory, a compiler crash, an illegal access
                if not problem:
                    lasting = not isinstance(error, (torch.OutOfMemoryError, OSError, subprocess.SubprocessError))
                    said = (str(error).splitlines() or [""])[0]
                    problem = f"{_name(dtype)}, head size {size}: {type(error).__name__}: {said}"
                break
            for name, value in first.items():
                error, allowed = relative_error(value, truth[name]), bound(name, dtype)
                what = f"{name} {_name(dtype)}, head size {size}: error {error:.1e}, bound {allowed:.0e}"
                worst = max(worst, (error / allowed, what))
                if value.isfinite().all() and not torch.equal(value, second[name]):
                    problem = problem or f"{name} {_name(dtype)}, head size {size}: not the same twice"
                if not error <= allowed:
                    problem = problem or what
    detail = problem or f"worst: {worst[1]}"
    return Verdict(operator, backend, not problem, detail, round(time.perf_counter() - start, 2), lasting)


def bound(name: str, dtype: torch.dtype) -> float:
    """How large ‖out − ref‖/‖ref‖ of a result of `cases.Case.call` may be.

    The fast steps are some twenty numbers, of which one may have little left of what it is summed from: 10 times the
    bound of a whole gradient. What is wrong there is noise of its own size and more.
    """
    return BOUNDS[dtype] * (10 if name == cases.AT_FAST_STEPS else 1)


@functools.cache
def failures() -> tuple[type[Exception], ...]:
    """What an operator raises where its kernels do not compile, fit or run: Triton's errors are no RuntimeErrors, and
    its call of a C compiler, for what starts a kernel, fails in its own ways."""
    outside = (RuntimeError, subprocess.SubprocessError, OSError)
    if importlib.util.find_spec("triton") is None:
        return outside
    from triton.errors import TritonError

    return *outside, TritonError


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """``||value - truth|| / ||truth||`` in fp64; infinite where ``value`` is not finite."""
    value, truth = value.detach().double().cpu(), truth.detach().double().cpu()
    if not bool(value.isfinite().all()):
        return float("inf")
    return float((value - truth).norm() / max(float(truth.norm()), _ENOUGH))


def cache_dir() -> Path:
    """``$HALFTUNE_CACHE/kernels``, else under ``$XDG_CACHE_HOME/halftune``, else under ``~/.cache/halftune``."""
    own, base = os.environ.get("HALFTUNE_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(own) if own else Path(base) / "halftune").expanduser() / "kernels"


def fingerprint(operator: str, device: torch.device, backend: str) -> str:
    """Machine, versions and the operator's source: a verdict of other ones says nothing."""
    facts = [operator, backend, torch.__version__, _machine(device)]
    if backend == "triton":
        import triton

        facts.append(triton.__version__)
    package = Path(__file__).parent
    for path in sorted([*package.glob("*.py"), *(package / "ops" / operator).glob("*.py")]):
        facts.append(hashlib.sha256(path.read_bytes()).hexdigest())
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
