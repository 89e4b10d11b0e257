"""Limits on CPU time and memory for untrusted code in this process, and on the time of a wait."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")

_STATM = "/proc/self/statm"  # Linux only; memory is not limited on other systems
_PAGE = resource.getpagesize()


def within(seconds: float, call: Callable[[], T]) -> T:
    """``call()`` in a thread, for calls whose own limits count from byte to byte, or that have none (DNS).

    Raises:
        TimeoutError: it takes longer; the thread is left to itself.
    """
    made: Future[T] = Future()

    def work() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # whatever it is, it belongs to the thread that asked
            made.set_exception(error)

    threading.Thread(target=work, name="halftune-within", daemon=True).start()
    return made.result(seconds)


class OutOfTime(Exception):
    """The CPU time limit was exceeded."""


class Limits:
    """Interrupts a block after ``seconds`` of CPU time of this process, or if it allocates ``memory`` more bytes.

    A nested block shares the outer block's limits. Outside the main thread there are no limits, since both apply to the
    whole process.

    Raises:
        OutOfTime: the time limit was exceeded.
        MemoryError: the memory limit was exceeded.
    """

    _held = False

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds, self._memory = seconds, memory
        self._inner, self._kept, self._started = False, 0, 0.0

    def __enter__(self) -> Limits:
        self._inner = Limits._held or threading.current_thread() is not threading.main_thread()
        if not self._inner:
            Limits._held = True
            self._handler = signal.signal(signal.SIGVTALRM, _end)
            self._before = resource.getrlimit(resource.RLIMIT_AS)
            self._limit_memory()
            self._start_timer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._inner:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._handler)
            resource.setrlimit(resource.RLIMIT_AS, self._before)
            Limits._held = False

    def renew(self, kept: int) -> None:
        """Restart the time limit; ``kept`` allocated bytes no longer count towards the memory limit.

        The limit may be shorter by a hundredth: the timer restarts only after that time, since a system call is slow.
        """
        if self._inner:
            return
        if time.monotonic() - self._started > self._seconds / 100:
            self._start_timer()
        self._kept += kept
        if self._kept > self._memory // 8:  # not on every call: reading the memory use is slow
            self._limit_memory()

    def _start_timer(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)
        self._started = time.monotonic()

    def _limit_memory(self) -> None:
        self._kept = 0
        try:
            file = os.open(_STATM, os.O_RDONLY)
        except OSError:
            return
        try:
            taken = int(os.read(file, 64).split()[0]) * _PAGE
        finally:
            os.close(file)
        soft, hard = self._before
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([taken + self._memory, *limits]), hard))


def _end(number: int, frame: FrameType | None) -> None:
    raise OutOfTime("out of CPU time")
