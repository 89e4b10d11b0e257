"""A small process beside each run: starts it, notes how it ended, then starts the next one that waits.

It belongs to no terminal and to no web server, so a run and the queue go on whatever becomes of both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from halftune_webui.runs.started import CONSOLE, Process, folder_of, note_exit, note_process, read_started
from halftune_webui.settings import Settings

SECRETS = ("HALFTUNE_WEBUI_AUTH",)  # of the board, of no use to a run
_KILLS = Path("/sys/fs/cgroup/memory.events")


def launch(run: Path, settings: Settings) -> None:
    """Starts the keeper of a run whose job has been noted; returns at once.

    Args:
        run: the folder of the run.
        settings: of the board, whose queue goes on afterwards within the same limits.
    """
    command = [sys.executable, "-m", "halftune_webui.runs.keeper", str(run), settings.to_json()]
    keeper = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # closed once it has been noted: the keeper's own, fuller note comes later
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=environment(),
    )
    note_process(run, Process.of(keeper.pid))
    assert keeper.stdin is not None
    keeper.stdin.close()


def keep(run: Path, settings: Settings) -> int:
    """Starts what the notes say, waits, notes the exit code; then the next of the queue."""
    job = read_started(run)
    assert job is not None, "launch is called after note_job"
    before = _memory_kills()
    with (folder_of(run) / CONSOLE).open("ab", buffering=0) as console:
        console.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} · {' '.join(job.command)}\n".encode())
        child = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=job.cwd,
            env=environment(),
        )
    note_process(run, Process.of(os.getpid()), Process.of(child.pid))
    code = child.wait()
    note_exit(run, code, time.time(), out_of_memory=code == -signal.SIGKILL and _memory_kills() > before)
    from halftune_webui.runs.queue import start_next

    start_next(settings)
    return 0


def environment() -> dict[str, str]:
    """That of the board, without its secrets; what is printed comes at once."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _memory_kills() -> int:
    """How often the system has ended a process of this container for want of memory."""
    try:
        lines = _KILLS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration, IndexError):
        return 0


if __name__ == "__main__":
    sys.stdin.read()
    sys.exit(keep(Path(sys.argv[1]), Settings.from_json(sys.argv[2])))
