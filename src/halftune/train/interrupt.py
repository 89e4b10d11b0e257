"""Ctrl-C and friends: the first asks for the end of the current step and a checkpoint, the second leaves at once."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from halftune.core.errors import TrainingError

# A scheduler that signals every process of a job reaches one of several twice: by itself and through its launcher.
ECHO = 5.0  # seconds


class Interrupted(TrainingError):
    """A signal ended the run; ``exit_code`` is 128 + its number (130, 143, 129)."""

    def __init__(self, number: signal.Signals, what: str, remedy: str) -> None:
        super().__init__(f"stopped by {number.name} {what}", remedy=remedy)
        self.exit_code = 128 + number

    @classmethod
    def before(cls, number: signal.Signals) -> Interrupted:
        """Training had not begun."""
        return cls(number, "before training went on", "nothing was lost; the same command starts again")

    @classmethod
    def after(cls, number: signal.Signals, step: int, checkpoint: Path) -> Interrupted:
        """Training had begun: ``checkpoint`` holds everything up to ``step``."""
        return cls(number, f"after step {step}; saved {checkpoint}", "the same command goes on from there")


class Interrupts:
    """Inside ``with``, SIGINT, SIGTERM and SIGHUP do not end the process as they would.

    Before training has begun, the first one leaves ``with`` as :class:`Interrupted`; after :meth:`only_note` it is only
    written down, and whoever steps looks. The second one leaves the process at once, wherever it is; where there is a
    launcher, the same one again within :data:`ECHO` is not a second one. A signal that was ignored from the beginning
    (nohup, a shell's background job) stays ignored.

    Attributes:
        received: the first signal that came, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._noting = self._left = False
        self._since = 0.0
        self._process = os.getpid()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signals can be caught there only
            for number in self.SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # whatever a library has made of it on the way
        left = self._left and error is not None and not isinstance(error, Interrupted)
        if left and self.received is not None:
            raise Interrupted.before(self.received) from None

    def only_note(self) -> None:
        """From here on the first signal is only noted: training has begun, and a step is worth finishing."""
        self._noting = True

    def _note(self, number: int, _frame: FrameType | None) -> None:
        forked = os.getpid() != self._process  # and has nothing to save
        if (
            number == self.received
            and not forked
            and "TORCHELASTIC_RUN_ID" in os.environ
            and time.monotonic() - self._since < ECHO
        ):
            return
        if self.received is not None or forked:
            _show_cursor()
            os._exit(128 + number)
        self.received, self._since = signal.Signals(number), time.monotonic()
        if not self._noting:
            self._left = True
            raise _Now(f"stopped by {self.received.name} before training went on")
        if os.environ.get("RANK", "0") == "0":
            _say(f"\n{self.received.name}: saving after this step; a second one leaves at once\n")


class _Now(KeyboardInterrupt):
    """Leaves whatever is going on; no library swallows it by catching Exception."""


def _say(text: str) -> None:
    # Straight to the descriptor: a handler may interrupt a write of sys.stderr, which must not be entered twice.
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
        _say("\x1b[?25h\n")
