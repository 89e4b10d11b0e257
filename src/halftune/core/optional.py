"""Imports of optional packages, and of large ones: faster, and interruptible by Ctrl-C."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import logging
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

from halftune.core.errors import MissingPackageError

UNUSED = ("bitsandbytes", "torchao")  # which few runs need, and many packages look for
# Loggers that warn at every import, of kernels that are not installed and of old calls.
_TALKATIVE = (*UNUSED, "torch.utils._pytree", "matplotlib")


@contextmanager
def quick_imports(needed: Collection[str] = ()) -> Iterator[None]:
    """Disable garbage collection while importing, and exclude the imported objects from later collections.

    Modules, classes and functions live until exit. Scanning them takes a sixth of the import time of torch and
    transformers, and slows every full collection afterwards.

    An exception raised by Ctrl-C inside an import may be swallowed (by a callback of the garbage collector or of an
    extension module) or leave a partial module. Nothing can be lost yet, so the process exits at once.

    Inside, bitsandbytes and torchao count as not installed: peft and transformers would import them for optional
    classes. They are imported later, if a plan needs them, and then warn of no kernels that they lack.

    Args:
        needed: names of those that are imported nevertheless. transformers remembers which packages are not installed,
            and refuses to quantise with them.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    enabled = gc.isenabled()
    gc.disable()
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    if main and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        with without(*(name for name in UNUSED if name not in needed)):
            yield
    finally:
        if main and before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """Inside, optional modules that are not imported yet count as not installed."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyright: ignore[reportArgumentType, reportCallIssue]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _leave(number: int, _frame: object) -> None:
    with suppress(OSError):  # closed terminal
        os.write(2, b"interrupted\n")
    os._exit(128 + number)


# distribution → halftune's extra that installs it; others are installed by name
_EXTRAS = {
    "math-verify": "maths",
    "rouge-score": "metrics",
    "sacrebleu": "metrics",
    "flash-linear-attention": "fla",
    "tensorboard": "tensorboard",
    **{name: name for name in ("wandb", "mlflow", "swanlab", "trackio")},
    "gradio": "webui",
    "gguf": "gguf",
    "soundfile": "audio",
    "soxr": "audio",
    "av": "video",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "galore-torch": "galore",
    "apollo-torch": "apollo",
    "torch-optimi": "optimi",
    "schedulefree": "schedulefree",
}
_BUILT_WITH_TORCH = ("flash-attn", "causal-conv1d", "mamba-ssm")  # their setup.py imports the installed torch


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def extra_line(extra: str) -> str:
    """Return the command that installs an extra's packages, beside a checkout and beside a wheel."""
    from packaging.requirements import Requirement  # 7 ms that few runs need

    found = map(Requirement, importlib.metadata.requires("halftune") or ())
    asked = [one for one in found if one.marker is not None and one.marker.evaluate({"extra": extra})]
    return "pip install " + " ".join(f'"{one.name}{one.specifier}"' for one in asked)


def pip_line(distribution: str) -> str:
    """Return the command that installs a distribution."""
    if distribution in _BUILT_WITH_TORCH:
        return f"pip install {distribution} --no-build-isolation"
    if distribution == "torchvision":  # each of its releases needs one of torch, which pip would replace
        return f"pip install torchvision torch=={str(version_of('torch')).partition('+')[0]}"
    return extra_line(_EXTRAS[distribution]) if distribution in _EXTRAS else f"pip install {distribution}"


def need(module: str, *, why: str, distribution: str | None = None) -> ModuleType:
    """Import an optional module.

    Raises:
        MissingPackageError: it is not installed; the remedy is the pip command.
    """
    distribution = distribution or module.replace("_", "-")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{why} requires package {distribution}"
        raise MissingPackageError(what, remedy=pip_line(distribution), code="core.package_missing") from error
