"""The program beside each run: starts it, notes how it ended, then starts the next one that waits.

It belongs to no terminal and to no web server, so a run and the queue go on whatever becomes of both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from halftune.core.files import open_file
from halftune_webui.runs.detached import environment
from halftune_webui.runs.started import ANSWER, CONSOLE, Process, folder_of, note_exit, note_process, read_started
from halftune_webui.runs.waiting import waiting

QUEUE = "halftune_webui.runs.queue"  # a program of its own: what it imports is not held while the run lasts
_KILLS = Path("/sys/fs/cgroup/memory.events")


def supervise(run: Path) -> None:
    """Starts what the notes say, waits, notes the exit code."""
    job = read_started(run)
    assert job is not None, "a supervisor is launched after note_job"
    before = _memory_kills()
    with ExitStack() as files:
        console = files.enter_context(open_file(folder_of(run) / CONSOLE, "ab", root=run, buffering=0))
        out = console
        if "--json" in job.command:  # the answer is for the page, not for the log
            out = files.enter_context(open_file(folder_of(run) / ANSWER, "wb", root=run))
        console.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} · {' '.join(job.command)}\n".encode())
        child = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=console,
            start_new_session=True,
            cwd=job.cwd,
            env=environment(),
        )
    note_process(run, Process.of(os.getpid()), Process.of(child.pid))
    code = child.wait()
    note_exit(run, code, time.time(), out_of_memory=code == -signal.SIGKILL and _memory_kills() > before)


def _memory_kills() -> int:
    """How often the system has ended a process of this container for want of memory."""
    try:
        lines = _KILLS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration, IndexError):
        return 0


if __name__ == "__main__":
    sys.stdin.read()
    supervise(Path(sys.argv[1]))
    if waiting(Path(json.loads(sys.argv[2])["runs"])):
        os.execv(sys.executable, [sys.executable, "-m", QUEUE, sys.argv[2]])
