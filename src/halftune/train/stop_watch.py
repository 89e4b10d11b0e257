"""Receives signals in a thread, and ends a process of several that does not reach the end of its step.

Python runs a signal's handler in the main thread, between two of its own instructions: one that waits inside a library
for another process (a collective) never gets there.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from halftune.core import heartbeat
from halftune.core.failures import leave
from halftune.core.process import this_process
from halftune.core.status import NAME, StatusFile, read_status
from halftune.train.checkpoint_list import checkpoints
from halftune.train.interrupt import SIGNALS, Interrupted, is_echo, say
from halftune.train.parallel.watchdog import current

_POLL = 0.2  # seconds between two looks once a signal has come
_HANDLER = 1.0  # seconds for the main thread to answer a second signal itself
_HEAD_START = 3.0  # seconds that the main process has before the others: where one is gone first, its message is lost


class StopWatch:
    """A thread that listens from :meth:`start` to :meth:`stop`.

    After the first signal the process may take ``seconds`` without a sign of life, or twice the longest time between
    two that it has needed so far in training: then it ends, and its last checkpoint is named. A second signal ends it
    at once.

    Args:
        folder: of the run.
        seconds: ``distributed.stop_seconds``.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.saved = False

    def start(self) -> None:
        """Starts the thread; called by the main thread once its handlers are set."""
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        _listening.add(self)
        threading.Thread(target=self._listen, name="stop watch", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread."""
        signal.set_wakeup_fd(self.before)
        _listening.discard(self)
        self.sender.close()  # which ends the thread

    def _listen(self) -> None:
        first, heard = None, 0.0
        with self.receiver:
            while True:
                if select.select([self.receiver], [], [], None if first is None else _POLL)[0]:
                    if not (numbers := self.receiver.recv(64)):
                        return
                    for number in map(signal.Signals, filter(SIGNALS.__contains__, numbers)):
                        if first is None:
                            first, heard = number, time.monotonic()
                        elif not is_echo(number, first, heard):
                            time.sleep(_HANDLER + (0.0 if this_process().main else _HEAD_START))
                            self._end(number, time.monotonic() - heard)
                if first is not None and not self.saved:
                    self._look(first, heard)

    def _look(self, number: signal.Signals, heard: float) -> None:
        limit = max(self.seconds, 2 * heartbeat.longest) + (0.0 if this_process().main else _HEAD_START)
        if min(time.monotonic() - heard, heartbeat.silent()) < limit:
            return
        self._end(number, limit)

    def _end(self, number: signal.Signals, seconds: float) -> NoReturn:
        """Ends the process, with the last checkpoint named."""
        error = Interrupted.stuck(number, seconds, checkpoints(self.folder))
        if (watchdog := current()) is not None:
            watchdog.report_failure(error)  # some may wait where they look for failures
        leave(error, error.report())
        if this_process().main:  # the main process reports for all
            self._write(error)
            say(f"halftune train: {error.report()}\n")
        os._exit(error.exit_code)

    def _write(self, error: Interrupted) -> None:
        path = self.folder / NAME
        with suppress(OSError, ValueError):
            if (status := read_status(path)) is not None:
                ended = {"state": "stopped", "error": str(error), "code": error.code, "seconds_left": None}
                StatusFile(path).tell(**asdict(status) | ended)


# A forked process has the parent's descriptor: without these, what it is told would reach the parent. No signal comes
# to it before.
_listening: set[StopWatch] = set()


def _block_signals() -> None:
    if _listening:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    if _listening:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _reset_in_child() -> None:
    if _listening:
        signal.set_wakeup_fd(-1)
        _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_in_child)
