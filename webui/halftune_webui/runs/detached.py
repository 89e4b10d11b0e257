"""Starts processes that belong to no terminal and to no web server, without the board's secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from halftune_webui.runs.started import Process, note_process
from halftune_webui.settings import Settings

KEEPER = "halftune_webui.runs.keeper"
SECRETS = ("HALFTUNE_WEBUI_AUTH",)  # of the board, of no use to a run


def launch(run: Path, settings: Settings) -> None:
    """Starts the keeper of a run whose job has been noted; returns at once.

    Args:
        run: the folder of the run.
        settings: of the board, whose queue goes on afterwards within the same limits.
    """
    keeper = subprocess.Popen(
        [sys.executable, "-m", KEEPER, str(run), settings.to_json()],
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


def environment() -> dict[str, str]:
    """That of the board, without its secrets; what is printed comes at once."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS}
    return {**kept, "PYTHONUNBUFFERED": "1"}
