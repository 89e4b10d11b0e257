"""How a verb fails: one sentence and an exit code; the traceback of a bug goes into a file, or to the terminal."""

from __future__ import annotations

import io
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from halftune import __version__
from halftune.core.atomic import is_full
from halftune.core.errors import DtypeContractError, HalftuneError, ModelError, TrainingError
from halftune.core.failures import leave
from halftune.core.launcher import this_process
from halftune.core.paths import cache_dir
from halftune.precision.trace.sources import where_written
from halftune.train.interrupt import SIGNALS, Interrupted

VARIABLE = "HALFTUNE_TRACEBACK"
BUG = 70  # the exit code of an error that is ours, as in sysexits.h
# torch's and flash-attn's words for operands of several formats, or of one that is too wide
_FORMATS = re.compile(
    r"to have the same dtype|must have the same dtype|only support fp16 and bf16|expected scalar type"
)
_CODE = (f"{os.sep}transformers_modules{os.sep}", f"{os.sep}halftune{os.sep}")


def wants_traceback(asked: bool) -> bool:
    """Whether errors show where in the code they were raised: ``--traceback``, or ``HALFTUNE_TRACEBACK=1``."""
    return asked or os.environ.get(VARIABLE, "0") not in ("", "0")


def tell(error: Exception, verb: str, *, show: bool) -> int:
    """Writes what went wrong to standard error and returns the exit code.

    Args:
        error: what ended the verb.
        verb: its name.
        show: print the traceback, too.
    """
    known = (
        error
        if isinstance(error, HalftuneError)
        else _of_the_machine(error) or _unguarded(error) or _of_the_model(error)
    )
    if show:
        traceback.print_exception(error)
    if known is None:
        text = _bug(error, shown=show)
        if not leave(error, text):
            print(f"halftune {verb}: {text}", file=sys.stderr)
        return BUG
    text = str(known)
    stopped = known.exit_code >= 128  # by a signal: nothing to sum up, and the main process speaks for all
    summed_up = leave(known, text)
    quiet = not this_process().main if stopped else summed_up
    if quiet:
        return known.exit_code
    print(text if "\n" in text else f"halftune {verb}: {text}", file=sys.stderr)
    return known.exit_code


def _of_the_machine(error: Exception) -> HalftuneError | None:
    """The sentence for what is nobody's bug: a full disk, no memory; None for everything else."""
    torch = sys.modules.get("torch")
    if is_full(error):
        drop_output()  # it may be standard output that is full: what is left in its buffer cannot be written
        return TrainingError(
            "the disk is full", where=str(vars(error).get("filename") or ""), remedy="free space, or write elsewhere"
        )
    if isinstance(error, MemoryError):
        return TrainingError("the main memory is full", remedy="`halftune plan` estimates what a run needs")
    if "torch._dynamo" in sys.modules and isinstance(error, sys.modules["torch._dynamo"].exc.TorchDynamoException):
        if (number := _signal_of_compiler(error)) is not None:
            again = "the same command goes on from the last checkpoint, or starts again where there is none"
            return Interrupted(number, "while torch.compile was building", again)
        lines = str(error).strip().splitlines() or ["no message"]
        first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:200]  # "backend='inductor' raised:" says nothing
        remedy = "training.torch_compile: false, or a compiler that works (g++, or CXX; building takes memory, too)"
        return TrainingError(f"torch.compile fails: {type(error).__name__}: {first}", remedy=remedy)
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        remedy = "a smaller training.per_device_train_batch_size or data.max_length; `halftune plan` estimates the need"
        return TrainingError("the memory of the GPU is full", remedy=remedy)
    return None


def _signal_of_compiler(error: BaseException) -> signal.Signals | None:
    """The signal that ended a compiler which torch.compile had started, where somebody meant the whole run by it."""
    waiting, seen = [error], list[BaseException]()
    while waiting:
        each = waiting.pop()
        seen.append(each)
        number = -each.returncode if isinstance(each, subprocess.CalledProcessError) else 0
        if number in SIGNALS:
            return signal.Signals(number)
        if found := re.search(r"died with <Signals\.(SIGINT|SIGTERM|SIGHUP):", str(each)):  # in a process of torch's
            return signal.Signals[found.group(1)]
        inner = (each.__cause__, each.__context__, vars(each).get("inner_exception"))
        waiting += [one for one in inner if isinstance(one, BaseException) and one not in seen]
    return None


def _unguarded(error: Exception) -> HalftuneError | None:
    """The sentence for formats that the guard would have brought together, were it not switched off."""
    loaded = sys.modules.get("halftune.model.patch")
    first = (str(error).strip().splitlines() or [""])[0][:200]
    if loaded is None or not _FORMATS.search(first) or not loaded.is_unguarded():
        return None
    model = _of_the_model(error)
    remedy = (
        "the guard is off: attention.guard: cast brings what goes into attention into one format; `halftune doctor` "
        "names the line that promotes"
    )
    return DtypeContractError(first, where=model.where if model is not None else "attention", remedy=remedy)


def _of_the_model(error: Exception) -> HalftuneError | None:
    """The sentence for Python that comes with a checkpoint; None where the last code before libraries' is ours."""
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    file, line = next((each for each in reversed(files) if any(name in each[0] for name in _CODE)), ("", 0))
    if "transformers_modules" not in file:
        return None
    first = (str(error).strip().splitlines() or ["no message"])[0][:200]
    what = f"the model's own code fails: {type(error).__name__}: {first}"
    return ModelError(what, where=f"{where_written(file)}:{line}", remedy="mend it, or take a revision that runs")


def _bug(error: Exception, *, shown: bool) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}halftune{os.sep}" in frame.filename]
    last = (ours or frames)[-1]
    first = (str(error).strip().splitlines() or ["no message"])[0][:200]
    what = f"an error in halftune itself, not in your input: {type(error).__name__}: {first}"
    where = f"{Path(last.filename).name}:{last.lineno}"
    if shown:
        return f"{where}: {what} · please report it with the traceback above"
    file = _keep(error)
    if file is None:
        traceback.print_exception(error)
        return f"{where}: {what} · please report it with the traceback above"
    return f"{where}: {what} · please report it with {file}, which holds the traceback (--traceback prints it)"


def _keep(error: Exception) -> Path | None:
    """Writes the traceback with what is needed to understand it; None where no folder can be written."""
    said = [f"halftune {__version__} · Python {platform.python_version()} · {platform.platform()}"]
    said += [
        f"command: {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        "",
        "".join(traceback.format_exception(error)),
    ]
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (_own_folder, lambda: Path(tempfile.gettempdir()) / "halftune-errors"):
        try:
            file = folder() / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(said), encoding="utf-8", errors="backslashreplace")
        except (OSError, HalftuneError):
            continue
        return file
    return None


def _own_folder() -> Path:
    return cache_dir() / "errors"


def drop_output() -> None:
    """Sends what is still to be printed nowhere, so that Python does not stumble over it when it ends."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.fileno() == 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def open_streams() -> None:
    """Makes the three standard streams usable, however the process was started.

    A stream that was closed (``<&-``) reads and writes nothing; left closed, the first file that is opened would take
    its number, and whatever a library prints would go into it. Bytes that are no text, and characters that the
    terminal has not, are shown as their code instead of ending the verb.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, "r", encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
