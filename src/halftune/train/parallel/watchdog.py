"""Signs of life: what every process last did, for whoever must say which one is gone or hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from halftune.core import heartbeat
from halftune.core.errors import HalftuneError, TrainingError
from halftune.core.failures import PeerLost, leave
from halftune.core.log import get_logger
from halftune.core.process import this_process
from halftune.train.parallel.rendezvous import Rendezvous, open_store

BEAT = 1.0  # seconds
FAILED = "failed/any"  # key that is there once a process has failed
_GRACE = 10.0  # for the main thread to notice by itself that it waits in vain
_ANSWER = 8.0  # seconds after which the store will not answer any more: torch has no limit for that
_PHRASES = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "NCCL")
_REMEDY = "run the same command to resume from the newest checkpoint"

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # set by torchrun, accelerate and ours

_T = TypeVar("_T")

log = get_logger(__name__)
_ticks = 0
_current: Watchdog | None = None  # of this process, while it is in a job of several


def tick() -> None:
    """Called where training moves on, by all processes equally often: who has fewer is behind. Also a sign of life."""
    global _ticks
    _ticks += 1
    heartbeat.beat()


def current() -> Watchdog | None:
    """The watchdog of this process, while it is in a job of several."""
    return _current


def explained(error: BaseException) -> BaseException:
    """An error with the process in it that was lost, where that is what happened; else as it is.

    Asked where an error arises: what this process then still has to do, such as a report, may take a while, and until
    then others, and its launcher, know already.
    """
    if _current is None:
        return error
    error = _current.explain(error)
    heartbeat.beat()  # what comes now, such as the report, has its own time
    if isinstance(error, HalftuneError) and error.exit_code < 128:  # by a signal: nothing failed
        leave(error, error.report())
    return error


def lost_somebody(error: BaseException) -> bool:
    """Whether an error only says that another process no longer answers."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


@dataclass(frozen=True)
class Sign:
    """What a process said last.

    Attributes:
        ticks: how far it has come.
        beat: counts its messages; one that stands still is gone or stopped.
        host, where: machine, and the line of ours that its main thread is at.
        signs: how many signs of life its main thread has given; it may work alone.
        extra: seconds beyond the limit that its present piece of work may take.
    """

    ticks: int
    beat: int
    host: str
    where: str
    signs: int = 0
    extra: float = 0.0


class Watchdog:
    """A thread that gives signs of life, and ends this process where it hangs.

    Args:
        rendezvous: whom to tell.
        seconds: how long a process may stand still once it has begun to train.
    """

    def __init__(self, rendezvous: Rendezvous, seconds: float) -> None:
        global _ticks
        _ticks = 0  # a run before this one is over
        self.rank, self.world_size, self.seconds = rendezvous.rank, rendezvous.world_size, seconds
        self.store, self.lock, self.beat, self.cut = open_store(seconds), threading.Lock(), 0, False
        self.main, self.over = threading.get_ident(), threading.Event()
        self.launcher = os.getppid() if _LAUNCHED in os.environ else None  # one of the user's own may leave
        self.alone_since: float | None = None
        self.thread = threading.Thread(target=self._beats, name="watchdog", daemon=True)
        self.thread.start()

    def __enter__(self) -> Watchdog:
        global _current
        _current = self
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None
        self.over.set()

    def explain(self, error: BaseException) -> BaseException:
        """Tells the others what went wrong here; returns who is to blame where that is another one."""
        if isinstance(error, PeerLost):
            return error
        if lost_somebody(error):
            return self.find_culprit(error)
        self.report_failure(error)
        return error

    def find_culprit(self, error: BaseException) -> PeerLost:
        """Who is to blame where another process was lost: one without a sign of life, else the one furthest behind."""
        waited = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        try:
            before, reported = self.signs(), self._failure_reports()
            if not reported:
                time.sleep(2.5 * BEAT)
                reported = self._failure_reports()
            after = self.signs()
        except (RuntimeError, OSError):
            if self.cut:
                return self._lost("rank 0 does not answer: its machine is gone, or the network to it is cut")
            return self._lost("rank 0 is gone, and with it the store that all meet at; its own output says why")
        if reported:
            return self._as_peer(*reported[0])
        silent = [rank for rank in before if after[rank].beat == before[rank].beat and rank != self.rank]
        if silent:
            sign = after[silent[0]]
            return self._lost(f"rank {silent[0]} on {sign.host} is gone or stopped: it gives no sign of life")
        behind = min(after.values(), key=lambda sign: sign.ticks)
        rank = next(rank for rank, sign in after.items() if sign is behind)
        if rank != self.rank and behind.ticks < after[self.rank].ticks:
            return self._lost(f"rank {rank} on {behind.host} hangs at {behind.where}: the other ranks timed out")
        return PeerLost(f"another process no longer answers: {waited}", remedy=_REMEDY, code="launch.peer_lost")

    def report_failure(self, error: BaseException) -> None:
        """Tells the others what went wrong here, before they only see that this process is gone."""
        what = str(error).strip() or type(error).__name__
        try:
            code = error.exit_code if isinstance(error, HalftuneError) else 0
            said = json.dumps([f"rank {self.rank} on {socket.gethostname()}: {what}", code])
            self._ask(lambda: (self.store.set(f"failed/{self.rank}", said), self.store.set(FAILED, "")))
        except (RuntimeError, OSError):
            return  # the store is gone, and with it those that would read

    def _failure_reports(self) -> list[tuple[str, int]]:
        keys = [f"failed/{rank}" for rank in range(self.world_size) if rank != self.rank]
        return self._ask(lambda: [tuple(json.loads(self.store.get(key))) for key in keys if self.store.check([key])])

    @staticmethod
    def _as_peer(what: str, exit_code: int) -> PeerLost:
        """The error of a peer that reported ``what``; if a signal stopped the peer, this process is stopped too."""
        lost = PeerLost(what, named=True, code="launch.peer_lost")
        if exit_code >= 128:
            lost.exit_code = exit_code
        return lost

    def signs(self) -> dict[int, Sign]:
        """Everybody's last sign; of one that never gave any, an empty one.

        Raises:
            RuntimeError, OSError: the store is gone, or does not answer.
        """
        return self._ask(lambda: {rank: self._sign(rank) for rank in range(self.world_size)})

    def _sign(self, rank: int) -> Sign:
        key = f"watchdog/{rank}"
        return Sign(**json.loads(self.store.get(key))) if self.store.check([key]) else Sign(-1, -1, "?", "?")

    def _ask(self, question: Callable[[], _T]) -> _T:
        """What the store answers, within :data:`_ANSWER`."""
        if self.cut:
            raise OSError("the store does not answer")
        answers: SimpleQueue[_T | RuntimeError | OSError] = SimpleQueue()

        def go() -> None:
            try:
                with self.lock:
                    answers.put(question())
            except (RuntimeError, OSError) as error:
                answers.put(error)

        threading.Thread(target=go, name="watchdog asks", daemon=True).start()
        try:
            answer = answers.get(timeout=_ANSWER)
        except Empty:
            self.cut = True
            raise OSError("the store does not answer") from None
        if isinstance(answer, (RuntimeError, OSError)):
            raise answer
        return answer

    def _lost(self, what: str) -> PeerLost:
        return PeerLost(what, remedy=_REMEDY, named=True, code="launch.peer_lost")

    def _beats(self) -> None:
        host, listening = socket.gethostname(), True
        while True:
            self.beat += 1
            sign = Sign(_ticks, self.beat, host, self._where(), heartbeat.beats, heartbeat.extension)
            try:
                if listening:
                    text = json.dumps(asdict(sign))
                    self._ask(partial(self.store.set, f"watchdog/{self.rank}", text))
            except (RuntimeError, OSError):
                listening = False  # the store is gone; what is left is to end this process where it hangs
            self._end_alone()
            if _ticks and (silent := heartbeat.silent()) > self.seconds:
                self._end(silent)
            if self.over.wait(BEAT):
                return

    def _end_alone(self) -> None:
        """Ends this process once its launcher is gone, which nobody could stop any more: as by SIGTERM, with a save."""
        if self.launcher in (None, os.getppid()):
            return
        now = time.monotonic()
        if self.alone_since is None:
            self.alone_since = now
            if this_process().local_rank == 0:
                log.warning("the launcher of this node's processes exited: they save a checkpoint and stop")
            os.kill(os.getpid(), signal.SIGTERM)
        elif now - self.alone_since > self.seconds:
            os._exit(128 + signal.SIGTERM)

    def _end(self, seconds: float) -> None:
        """Ends the process where it is the one that hangs; later, where it waits and nothing tells it so."""
        try:
            signs = self.signs()
        except (RuntimeError, OSError):
            signs = {}
        mine = all(sign.ticks >= _ticks for sign in signs.values()) and any(
            sign.ticks > _ticks for sign in signs.values()
        )
        if not mine and seconds < self.seconds + _GRACE:
            return
        where = self._where()
        error: TrainingError = TrainingError(
            f"hangs at {where}: no progress for {seconds:.0f} s", remedy=_REMEDY, code="train.no_progress"
        )
        if not mine:
            error = PeerLost(
                f"waited {seconds:.0f} s at {where} for another process", remedy=_REMEDY, code="launch.peer_lost"
            )
        else:
            self.report_failure(error)
        if not leave(error, error.report()):
            print(f"halftune: rank {self.rank}: {error.report()}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    def _where(self) -> str:
        frame: Any = sys._current_frames().get(self.main)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if "halftune" in path.parts:
                return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return "an unknown place"
