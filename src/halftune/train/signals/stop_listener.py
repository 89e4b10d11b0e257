"""Receives signals in a thread; terminates a distributed process that cannot finish its step.

Python runs signal handlers in the main thread, between bytecode instructions. A main thread that waits inside a
collective never runs them.
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

from halftune.core.processes import heartbeat
from halftune.core.processes.failures import record_failure
from halftune.core.processes.process import this_process
from halftune.core.status import NAME, StatusFile, read_status
from halftune.train.parallel.watchdog import current
from halftune.train.run_folder.checkpoints import checkpoints
from halftune.train.signals.interrupt import SIGNALS, Interrupted, is_echo, say

_POLL = 0.2  # seconds between two checks after the first signal
_HANDLER = 1.0  # seconds for the main thread to handle a second signal
_HEAD_START = 3.0  # seconds by which the main process exits first: otherwise its message is lost


class StopListener:
    """A thread that listens from :meth:`start` to :meth:`stop`.

    After the first signal, the process exits if it sends no heartbeat for ``seconds``, or for twice the longest
    interval seen in training, whichever is longer. The error names the last checkpoint. A second signal exits at once.

    Args:
        folder: the run folder.
        seconds: ``distributed.stop_seconds``.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.saved = False

    def start(self) -> None:
        """Start the thread; call it from the main thread after its handlers are set."""
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        _listening.add(self)
        threading.Thread(target=self._listen, name="stop listener", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread."""
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
        """Exit; the error names the last checkpoint."""
        error = Interrupted.stuck(number, seconds, checkpoints(self.folder))
        if (watchdog := current()) is not None:
            watchdog.report_failure(error)  # some may wait where they look for failures
        record_failure(error, error.report())
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
_listening: set[StopListener] = set()


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
