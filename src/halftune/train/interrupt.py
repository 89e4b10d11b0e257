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

from halftune.core import heartbeat
from halftune.core.errors import TrainingError
from halftune.core.process import this_process

if TYPE_CHECKING:
    from halftune.train.stop_watch import StopWatch

# A scheduler that signals every process of a job reaches one of several twice: by itself and through its launcher.
ECHO = 5.0  # seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(TrainingError):
    """A signal ended the run; ``exit_code`` is 128 + its number (130, 143, 129)."""

    def __init__(self, number: signal.Signals, what: str, remedy: str) -> None:
        super().__init__(f"stopped by {number.name} {what}", code="train.interrupted", remedy=remedy)
        self.exit_code = 128 + number

    @classmethod
    def before(cls, number: signal.Signals, whom: str = "") -> Interrupted:
        """Training had not begun; ``whom`` as from :func:`format_signal`."""
        return cls(number, f"{whom}before the first step", "run the same command to start again; nothing was lost")

    @classmethod
    def after(cls, number: signal.Signals, step: int, checkpoint: Path, whom: str = "") -> Interrupted:
        """Training had begun: ``checkpoint`` holds everything up to ``step``."""
        return cls(number, f"{whom}after step {step}; saved {checkpoint}", "run the same command to resume")

    @classmethod
    def stuck(cls, number: signal.Signals, seconds: float, checkpoints: Sequence[Path]) -> Interrupted:
        """The step did not come to its end: what is left are ``checkpoints``, oldest first."""
        last = f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
        again = f"run the same command to {'resume' if checkpoints else 'start again'}"
        return cls(number, f"without a save: the step did not end within {seconds:.0f} s; {last}", again)


def format_signal(answers: Sequence[tuple[int, str]]) -> tuple[signal.Signals, str]:
    """The signal that came, and to whom, where that was not every process.

    Args:
        answers: :meth:`Interrupts.answer` of each process, by rank; at least one has received a signal.
    """
    reached = [(rank, number, host) for rank, (number, host) in enumerate(answers) if number]
    number = signal.Signals(reached[0][1])
    if len(reached) == len(answers) or not all(host for *_, host in reached):
        return number, ""
    return number, "to " + ", ".join(f"rank {rank} on {host}" for rank, _, host in reached) + " "


def is_echo(number: int, first: int | None, since: float) -> bool:
    """Whether a signal is the first one again, by another way, and no second one.

    Args:
        number: the signal that came now.
        first, since: the one that came first, and when (``time.monotonic()``).
    """
    return number == first and "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - since < ECHO


class Interrupts:
    """Inside ``with``, SIGINT, SIGTERM and SIGHUP do not end the process as they would.

    Before training has begun, the first one leaves ``with`` as :class:`Interrupted`; after :meth:`only_note` it is only
    written down, and whoever steps looks. The second one leaves the process at once, wherever it is; where there is a
    launcher, the same one again within :data:`ECHO` is not a second one. A signal that was ignored from the beginning
    (nohup, a shell's background job) stays ignored.

    Args:
        watch: listens, too, where processes wait for each other.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self, watch: StopWatch | None = None) -> None:
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
        # whatever a library has made of it on the way
        left = self._left and error is not None and not isinstance(error, Interrupted)
        if left and self.received is not None:
            raise Interrupted.before(self.received) from None

    def only_note(self) -> None:
        """From here on the first signal is only noted: training has begun, and a step is worth finishing."""
        heartbeat.forget()
        self._noting = True

    def over(self) -> None:
        """Training has ended and what is to be saved is saved: only the report is still to be written."""
        if self.watch is not None:
            self.watch.saved = True

    def answer(self) -> tuple[int, str]:
        """The first signal that came, or 0, and the name of this machine; no name where the launcher is gone.

        Then all processes send the signal to themselves, each in its own time.
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
            raise _Now(f"stopped by {self.received.name} before the first step")
        if this_process().main:
            say(f"\n{self.received.name}: saving after this step; a second signal exits at once\n")


class _Now(KeyboardInterrupt):
    """Leaves whatever is going on; no library swallows it by catching Exception."""


def say(text: str) -> None:
    """Writes to standard error from a handler, which may have interrupted a write of sys.stderr: past it."""
    try:
        os.write(2, text.encode())
    except OSError:
        _leave_terminal()


def _leave_terminal() -> None:
    """Every write to a terminal that was closed (SIGHUP) fails, and with the last word the exit code would go."""
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
