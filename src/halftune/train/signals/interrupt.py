"""Ctrl-C and friends: the first asks for the end of the current step and a checkpoint, the second leaves at once."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from halftune.core.errors import TrainingError
from halftune.core.processes import heartbeat
from halftune.core.processes.process import this_process

if TYPE_CHECKING:
    from halftune.train.signals.stop_listener import StopListener

# A scheduler that signals every process of a job reaches one of several twice: by itself and through its launcher.
ECHO = 5.0  # seconds
SWEEP = "HALFTUNE_SWEEP"  # set for the runs of a sweep, which passes signals on
_LAUNCHERS = frozenset({"TORCHELASTIC_RUN_ID", SWEEP})
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(TrainingError):
    """A signal ended the run; ``exit_code`` is 128 + its number (130, 143, 129)."""

    def __init__(self, number: signal.Signals, what: str, remedy: str) -> None:
        super().__init__(f"stopped by {number.name} {what}", code="train.interrupted", remedy=remedy)
        self.exit_code = 128 + number

    @classmethod
    def before(cls, number: signal.Signals, receivers: str = "") -> Interrupted:
        """Training had not begun; ``receivers`` as from :func:`format_signal`."""
        return cls(number, f"{receivers}before the first step", "run the same command to start again; nothing was lost")

    @classmethod
    def after(cls, number: signal.Signals, step: int, checkpoint: Path, receivers: str = "") -> Interrupted:
        """Training had begun: ``checkpoint`` holds everything up to ``step``."""
        return cls(number, f"{receivers}after step {step}; saved {checkpoint}", "run the same command to resume")

    @classmethod
    def stuck(cls, number: signal.Signals, seconds: float, checkpoints: Sequence[Path]) -> Interrupted:
        """The step did not finish in time; ``checkpoints`` of the run, oldest first."""
        last = f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        again = f"run the same command to {'resume' if checkpoints else 'start again'}"
        return cls(number, f"without a save: the step did not end within {seconds:.0f} s; {last}", again)


def format_signal(answers: Sequence[tuple[int, str]]) -> tuple[signal.Signals, str]:
    """Return the signal, and the ranks that received it; the ranks are empty if all did.

    Args:
        answers: :meth:`Interrupts.answer` of each process, by rank; at least one has received a signal.
    """
    reached = [(rank, number, host) for rank, (number, host) in enumerate(answers) if number]
    number = signal.Signals(reached[0][1])
    if len(reached) == len(answers) or not all(host for *_, host in reached):
        return number, ""
    return number, "to " + ", ".join(f"rank {rank} on {host}" for rank, _, host in reached) + " "


def is_echo(number: int, first: int | None, since: float) -> bool:
    """Whether a signal repeats the first one through the launcher.

    Args:
        number: the signal that came now.
        first, since: the one that came first, and when (``time.monotonic()``).
    """
    return number == first and not _LAUNCHERS.isdisjoint(os.environ) and time.monotonic() - since < ECHO


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP inside ``with``.

    Before training, the first signal raises :class:`Interrupted`. After :meth:`defer_signals` it is stored in
    ``received``, and the training loop checks it after each step. The second signal exits at once. Under a launcher, a
    repetition within :data:`ECHO` seconds is not a second signal. A signal that was ignored at the start (nohup, a
    background job of a shell) stays ignored.

    Args:
        watch: listens in a thread as well; for several processes.

    Attributes:
        received: the first signal, or None.
    """

    def __init__(self, watch: StopListener | None = None) -> None:
        self.watch = watch
        self.received: signal.Signals | None = None
        self._noting = self._left = False
        self._since = 0.0
        self._process, self._parent = os.getpid(), os.getppid()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signals can be caught there only
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            if self.watch is not None:
                self.watch.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.watch is not None and threading.current_thread() is threading.main_thread():
            self.watch.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # a library may have replaced the exception
        left = self._left and error is not None and not isinstance(error, Interrupted)
        if left and self.received is not None:
            raise Interrupted.before(self.received) from None

    def defer_signals(self) -> None:
        """From now on, store the first signal; the loop finishes its step and saves."""
        heartbeat.forget()
        self._noting = True

    def mark_saved(self) -> None:
        """Note that training has ended and everything is saved; only the report is still to be written."""
        if self.watch is not None:
            self.watch.saved = True

    def answer(self) -> tuple[int, str]:
        """Return the number of the first signal (0: none) and this machine's name (empty if the launcher exited).

        After an exit of the launcher, each process sends the signal to itself.
        """
        return int(self.received or 0), socket.gethostname() if os.getppid() == self._parent else ""

    def _note(self, number: int, _frame: FrameType | None) -> None:
        forked = os.getpid() != self._process  # and has nothing to save
        if not forked and is_echo(number, self.received, self._since):
            return
        if self.received is not None or forked:
            _show_cursor()
            os._exit(128 + number)
        self.received, self._since = signal.Signals(number), time.monotonic()
        if not self._noting:
            self._left = True
            raise _StopNow(f"stopped by {self.received.name} before the first step")
        if this_process().main:
            say(f"\n{self.received.name}: saving after this step; a second signal exits at once\n")


class _StopNow(KeyboardInterrupt):
    """Stops the current operation; ``except Exception`` in a library does not catch it."""


def say(text: str) -> None:
    """Write to file descriptor 2 from a signal handler: sys.stderr may be in the middle of a write."""
    try:
        os.write(2, text.encode())
    except OSError:
        _leave_terminal()


def _leave_terminal() -> None:
    """Redirect output to /dev/null after the terminal closed (SIGHUP): a failing write would change the exit code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):  # not a file or a pipe, which go on to be written
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _show_cursor() -> None:
    """A progress bar hides the cursor."""
    if sys.__stderr__ is not None and sys.__stderr__.isatty():
        say("\x1b[?25h\n")
