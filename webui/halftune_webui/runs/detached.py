"""Starts processes that belong to no terminal and to no web server, without the web UI's secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from halftune_webui.runs.started import Process, note_process
from halftune_webui.settings import Settings

SUPERVISOR = "halftune_webui.runs.supervisor"
SECRETS = ("HALFTUNE_WEBUI_AUTH",)  # of the web UI, of no use to a run


def launch(run: Path, settings: Settings) -> None:
    """Starts the supervisor of a run whose job has been noted; returns at once.

    Args:
        run: the folder of the run.
        settings: of the web UI, whose queue goes on afterwards within the same limits.
    """
    supervisor = subprocess.Popen(
        [sys.executable, "-m", SUPERVISOR, str(run), settings.to_json()],
        stdin=subprocess.PIPE,  # closed once it has been noted: the supervisor's own, fuller note comes later
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=environment(),
    )
    note_process(run, Process.of(supervisor.pid))
    assert supervisor.stdin is not None
    supervisor.stdin.close()


def environment() -> dict[str, str]:
    """That of the web UI, without its secrets; what is printed comes at once."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return {**kept, "PYTHONUNBUFFERED": "1"}
