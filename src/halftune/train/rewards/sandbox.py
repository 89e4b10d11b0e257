"""Runs Python code in a process of its own, with limits of time and memory; where Linux allows it, without network,
without a place to write to, and without the user's files.

It is no security boundary: the kernel is shared, and names, sizes and times of files can be seen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from halftune.core.errors import TrainingError

_CHILD = Path(__file__).with_name("sandboxed.py")
_OUTPUT = 1 << 20  # bytes
_START = 1.0  # seconds for the start of Python


def run_python(code: str, seconds: float, memory_mib: int) -> str:
    """What the code prints, up to 1 MiB, whether or not it ends well.

    Processes that it starts end with it. It has an empty folder, no input, and none of this process's environment.

    Args:
        code: of a program.
        seconds: of CPU time; twice as many by the clock, and one second for the start.
        memory_mib: address space in MiB.
    """
    with _folder() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_CHILD), str(seconds), str(memory_mib), str(_OUTPUT)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(code.encode(errors="replace"), timeout=2 * seconds + _START)
        finally:
            _end(process)
        output.seek(0)
        return output.read(_OUTPUT).decode(errors="replace")


@contextmanager
def _folder() -> Iterator[str]:
    """A new folder, removed afterwards with what a program has left in it."""
    made = tempfile.TemporaryDirectory(prefix="halftune-code-", ignore_cleanup_errors=True)
    try:
        yield made.name
    finally:
        try:
            made.cleanup()
        except RecursionError:  # folders nested deeper than Python removes
            subprocess.run(["rm", "-rf", made.name], check=False, stderr=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@cache
def _found() -> str:
    """What a program finds on this system.

    Raises:
        TrainingError: programs do not run.
    """
    with tempfile.NamedTemporaryFile() as file:
        code = f"""
import os, socket
print("runs")
if [name for _, name in socket.if_nameindex()] == ["lo"] and os.getpid() < 9:
    print("isolated")
try:
    open({file.name!r})
except OSError:
    print("without files")
"""
        found = run_python(code, 5, 512)
    if "runs" not in found:
        what, remedy = "Python does not run under the limits of code in answers", "remove passes_tests"
        raise TrainingError(what, where=sys.executable, remedy=remedy, code="train.reward_failed")
    return found


def isolates() -> bool:
    """Whether programs have no network and end with all processes that they started, on this system."""
    return "isolated" in _found()


def hides_files() -> bool:
    """Whether programs read the files of Python and of the system only."""
    return "without files" in _found()
