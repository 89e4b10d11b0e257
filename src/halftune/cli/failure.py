"""Reports errors of verbs: a message and an exit code; the traceback of a bug goes to a file or the terminal."""

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
from halftune.core.files import cache_dir
from halftune.core.processes.process import this_process
from halftune.precision.record.remote_files import where_written
from halftune.train.signals.interrupt import SIGNALS, Interrupted

VARIABLE = "HALFTUNE_TRACEBACK"
BUG = 70  # exit code of a bug in halftune, as in sysexits.h
# torch's and flash-attn's messages for operands with mixed or unsupported dtypes
_FORMATS = re.compile(
    r"to have the same dtype|must have the same dtype|only support fp16 and bf16|expected scalar type"
)
_CODE = (f"{os.sep}transformers_modules{os.sep}", f"{os.sep}halftune{os.sep}")


def wants_traceback(asked: bool) -> bool:
    """Whether to print tracebacks: ``--traceback``, or ``HALFTUNE_TRACEBACK=1``."""
    return asked or os.environ.get(VARIABLE, "0") not in ("", "0")


def report_error(error: Exception, verb: str, *, show: bool) -> int:
    """Print an error to standard error and return the exit code.

    Args:
        error: the exception that ended the verb.
        verb: its name.
        show: whether to print the traceback too.
    """
    from halftune.core.processes.failures import record_failure

    known = (
        error
        if isinstance(error, HalftuneError)
        else _of_the_machine(error) or _unguarded(error) or _of_the_model(error)
    )
    if show:
        traceback.print_exception(error)
    if known is None:
        text = _bug(error, shown=show)
        if not record_failure(error, text):
            print(f"halftune {verb}: {text}", file=sys.stderr)
        return BUG
    text = known.report()
    stopped = known.exit_code >= 128  # by a signal: only rank 0 prints it
    summed_up = record_failure(known, text)
    quiet = not this_process().main if stopped else summed_up
    if quiet:
        return known.exit_code
    print(text if "\n" in text else f"halftune {verb}: {text}", file=sys.stderr)
    return known.exit_code


def _of_the_machine(error: Exception) -> HalftuneError | None:
    """The error for a full disk or memory, or a failed compiler; None for other exceptions."""
    torch = sys.modules.get("torch")
    if is_full(error):
        drop_output()  # the full disk may be that of standard output
        what, remedy = "the disk is full", "free space, or set another output or cache folder (HALFTUNE_CACHE)"
        return TrainingError(what, where=str(vars(error).get("filename") or ""), remedy=remedy, code="core.disk_full")
    if isinstance(error, MemoryError):
        what = "out of main memory"
        return TrainingError(what, remedy="see `halftune plan` for an estimate of the need", code="core.out_of_memory")
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(error, dynamo.exc.TorchDynamoException):
        return _of_the_compiler(error)
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        remedy = "reduce training.per_device_train_batch_size or data.max_length; see `halftune plan` for an estimate"
        return TrainingError("out of GPU memory", remedy=remedy, code="train.out_of_memory")
    return None


def _of_the_compiler(error: Exception) -> HalftuneError:
    if (number := _signal_of_compiler(error)) is not None:
        again = "run the same command again: it resumes from the newest checkpoint, if there is one"
        return Interrupted(number, "while torch.compile was compiling", again)
    lines = str(error).strip().splitlines() or ["no message"]
    first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:200]  # skip "backend='inductor' raised:"
    remedy = "set training.torch_compile: false, or fix the compiler (g++, or CXX) and its memory limit"
    what = f"torch.compile failed: {type(error).__name__}: {first}"
    return TrainingError(what, remedy=remedy, code="train.compile_failed")


def _signal_of_compiler(error: BaseException) -> signal.Signals | None:
    """The signal that ended a compiler process of torch.compile, if it was meant for the whole run."""
    waiting, seen = [error], list[BaseException]()
    while waiting:
        each = waiting.pop()
        seen.append(each)
        number = -each.returncode if isinstance(each, subprocess.CalledProcessError) else 0
        if number in SIGNALS:
            return signal.Signals(number)
        if found := re.search(r"died with <Signals\.(SIGINT|SIGTERM|SIGHUP):", str(each)):  # in torch's subprocess
            return signal.Signals[found.group(1)]
        inner = (each.__cause__, each.__context__, vars(each).get("inner_exception"))
        waiting += [one for one in inner if isinstance(one, BaseException) and one not in seen]
    return None


def _unguarded(error: Exception) -> HalftuneError | None:
    """The error for mixed dtypes that the guard would have cast if it were on."""
    loaded = sys.modules.get("halftune.model.attention.register")
    first = (str(error).strip().splitlines() or [""])[0][:200]
    if loaded is None or not _FORMATS.search(first) or not loaded.is_unguarded():
        return None
    model = _of_the_model(error)
    remedy = "set attention.guard: cast (it is off), or fix the lines that `halftune doctor` lists"
    return DtypeContractError(
        first, where=model.where if model is not None else "attention", remedy=remedy, code="precision.mixed_dtypes"
    )


def _of_the_model(error: Exception) -> HalftuneError | None:
    """The error for a checkpoint's remote code; None if halftune's code is closer to the failure."""
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    file, line = next((each for each in reversed(files) if any(name in each[0] for name in _CODE)), ("", 0))
    if "transformers_modules" not in file:
        return None
    first = (str(error).strip().splitlines() or ["no message"])[0][:200]
    what = f"the model's remote code failed: {type(error).__name__}: {first}"
    remedy = "fix the code, or use a working revision"
    return ModelError(what, where=f"{where_written(file)}:{line}", remedy=remedy, code="model.own_code_failed")


def _bug(error: Exception, *, shown: bool) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}halftune{os.sep}" in frame.filename]
    last = (ours or frames)[-1]
    first = (str(error).strip().splitlines() or ["no message"])[0][:200]
    what = f"internal error, a bug in halftune: {type(error).__name__}: {first}"
    where = f"{Path(last.filename).name}:{last.lineno}"
    if shown:
        return f"{where}: {what} · please report it with the traceback above"
    file = _keep(error)
    if file is None:
        traceback.print_exception(error)
        return f"{where}: {what} · please report it with the traceback above"
    return f"{where}: {what} · please report it with {file}, which contains the traceback (--traceback prints it)"


def _keep(error: Exception) -> Path | None:
    """Write the traceback with version and command to a file; None if no folder is writable."""
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
    """Discard buffered output, so that flushing it at exit does not fail."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.fileno() == 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def open_streams() -> None:
    """Make the three standard streams usable, however the process was started.

    A closed stream (``<&-``) is connected to /dev/null: otherwise the next opened file would get its descriptor, and
    libraries would print into it. Invalid bytes, and characters that the terminal does not support, are escaped.
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
