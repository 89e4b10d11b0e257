"""Watchdog of a distributed run: each rank publishes a heartbeat, and a failed or hanging rank is named."""

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

from halftune.core.errors import HalftuneError, TrainingError
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.core.processes.failures import PeerLost, record_failure
from halftune.core.processes.process import this_process
from halftune.train.parallel.rendezvous import Rendezvous, open_store

BEAT = 1.0  # seconds
FAILED = "failed/any"  # store key, set once a rank has failed
_GRACE = 10.0  # seconds for the main thread to detect a lost peer itself
_ANSWER = 8.0  # seconds to wait for the store; torch has no timeout for it
_PHRASES = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "NCCL")
_REMEDY = "run the same command to resume from the newest checkpoint"

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # set by torchrun, accelerate and ours

_T = TypeVar("_T")

log = get_logger(__name__)
_current: Watchdog | None = None  # of this process, while it is in a job of several


def current() -> Watchdog | None:
    """Return the watchdog of this process; None outside a distributed run."""
    return _current


def with_failed_rank(error: BaseException) -> BaseException:
    """Return a :class:`PeerLost` that names the failed rank if a peer caused ``error``; else ``error``.

    Also reports the failure to the other ranks and to the launcher. Call it as soon as the error arises: the report
    at the end of a run takes time.
    """
    if _current is None:
        return error
    error = _current.explain(error)
    heartbeat.beat()  # the report that follows gets a full timeout
    if isinstance(error, HalftuneError) and error.exit_code < 128:  # by a signal: nothing failed
        record_failure(error, error.report())
    return error


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error means that another process no longer responds."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


@dataclass(frozen=True)
class RankStatus:
    """The last status that a rank published.

    Attributes:
        ticks: progress of the rank, see ``heartbeat.tick``.
        beat: number of published statuses; a constant number means that the process exited or is stopped.
        host: machine name.
        where: source line of halftune that the main thread executes.
        main_beats: heartbeats of the main thread; they continue while it works alone.
        extra: seconds that the current operation may take beyond the timeout.
    """

    ticks: int
    beat: int
    host: str
    where: str
    main_beats: int = 0
    extra: float = 0.0


class Watchdog:
    """A thread that publishes this rank's status and terminates the process if it hangs.

    Args:
        rendezvous: gives rank and world size.
        seconds: timeout without progress, counted from the first training step.
    """

    def __init__(self, rendezvous: Rendezvous, seconds: float) -> None:
        heartbeat.ticks = 0  # an earlier run in this process has ended
        self.rank, self.world_size, self.seconds = rendezvous.rank, rendezvous.world_size, seconds
        self.store, self.lock, self.beat = open_store(seconds), threading.Lock(), 0
        self.unreachable = False  # the store did not answer
        self.main, self.over = threading.get_ident(), threading.Event()
        self.launcher = os.getppid() if _LAUNCHED in os.environ else None  # a launcher of the user may exit early
        self.alone_since: float | None = None
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.thread.start()

    def __enter__(self) -> Watchdog:
        global _current
        _current = self
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None
        self.over.set()
        # A process that exits inside the store's C++ code is aborted. However slow the store, it has answered by then.
        self.thread.join(_ANSWER + BEAT)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error of the rank that caused ``error``; report an error of this rank to the others."""
        if isinstance(error, PeerLost):
            return error
        if is_peer_failure(error):
            return self.find_culprit(error)
        self.report_failure(error)
        return error

    def find_culprit(self, error: BaseException) -> PeerLost:
        """Name the lost rank: one that reported a failure, else one without heartbeat, else the furthest behind."""
        waited = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        try:
            before, reported = self.statuses(), self._failure_reports()
            if not reported:
                time.sleep(2.5 * BEAT)
                reported = self._failure_reports()
            after = self.statuses()
        except (RuntimeError, OSError):
            if self.unreachable:
                return self._peer_lost("rank 0 does not respond: its machine is down, or the network failed")
            return self._peer_lost("rank 0 exited, and the rendezvous store with it; see its own output")
        if reported:
            return self._as_peer(*reported[0])
        silent = [rank for rank in before if after[rank].beat == before[rank].beat and rank != self.rank]
        if silent:
            status = after[silent[0]]
            return self._peer_lost(f"rank {silent[0]} on {status.host} exited or is stopped: no heartbeat")
        behind = min(after.values(), key=lambda status: status.ticks)
        rank = next(rank for rank, status in after.items() if status is behind)
        if rank != self.rank and behind.ticks < after[self.rank].ticks:
            return self._peer_lost(f"rank {rank} on {behind.host} hangs at {behind.where}: the other ranks timed out")
        return PeerLost(f"another process no longer responds: {waited}", remedy=_REMEDY, code="launch.peer_lost")

    def report_failure(self, error: BaseException) -> None:
        """Publish the error of this rank, so that the other ranks can name its cause."""
        what = str(error).strip() or type(error).__name__
        try:
            code = error.exit_code if isinstance(error, HalftuneError) else 0
            who = "" if code >= 128 else f"rank {self.rank} on {socket.gethostname()}: "  # a signal is meant for all
            said = json.dumps([f"{who}{what}", code])
            self._ask(lambda: (self.store.set(f"failed/{self.rank}", said), self.store.set(FAILED, "")))
        except (RuntimeError, OSError):
            return  # the store is gone: no rank can read it

    def _failure_reports(self) -> list[tuple[str, int]]:
        keys = [f"failed/{rank}" for rank in range(self.world_size) if rank != self.rank]
        return self._ask(lambda: [tuple(json.loads(self.store.get(key))) for key in keys if self.store.check([key])])

    @staticmethod
    def _as_peer(what: str, exit_code: int) -> PeerLost:
        """The error of a peer that reported ``what``; if a signal stopped the peer, this process is stopped too."""
        if exit_code < 128:
            return PeerLost(what, named=True, code="launch.peer_lost")
        lost = PeerLost(what, code="train.interrupted")
        lost.exit_code = exit_code
        return lost

    def statuses(self) -> dict[int, RankStatus]:
        """Return the last status of every rank, by rank; ``ticks`` is -1 if a rank has published none.

        Raises:
            RuntimeError, OSError: the store is gone, or does not respond.
        """
        return self._ask(lambda: {rank: self._status(rank) for rank in range(self.world_size)})

    def _status(self, rank: int) -> RankStatus:
        key = f"watchdog/{rank}"
        if not self.store.check([key]):
            return RankStatus(-1, -1, "?", "?")
        return RankStatus(**json.loads(self.store.get(key)))

    def _ask(self, question: Callable[[], _T]) -> _T:
        """Query the store; raises OSError after :data:`_ANSWER` seconds."""
        if self.unreachable:
            raise OSError("the store does not answer")
        answers: SimpleQueue[_T | RuntimeError | OSError] = SimpleQueue()

        def call() -> None:
            try:
                with self.lock:
                    answers.put(question())
            except (RuntimeError, OSError) as error:
                answers.put(error)

        threading.Thread(target=call, name="watchdog asks", daemon=True).start()
        try:
            answer = answers.get(timeout=_ANSWER)
        except Empty:
            self.unreachable = True
            raise OSError("the store does not answer") from None
        if isinstance(answer, (RuntimeError, OSError)):
            raise answer
        return answer

    def _peer_lost(self, what: str) -> PeerLost:
        return PeerLost(what, remedy=_REMEDY, named=True, code="launch.peer_lost")

    def _run(self) -> None:
        host, listening = socket.gethostname(), True
        while True:
            self.beat += 1
            status = RankStatus(heartbeat.ticks, self.beat, host, self._where(), heartbeat.beats, heartbeat.extension)
            try:
                if listening:
                    text = json.dumps(asdict(status))
                    self._ask(partial(self.store.set, f"watchdog/{self.rank}", text))
            except (RuntimeError, OSError):
                listening = False  # the store is gone; only hangs of this process are still handled
            self._stop_without_launcher()
            if heartbeat.ticks and (silent := heartbeat.silent()) > self.seconds:
                self._exit_if_stuck(silent)
            if self.over.wait(BEAT):
                return

    def _stop_without_launcher(self) -> None:
        """Send SIGTERM to this process if its launcher has exited: it saves a checkpoint and stops."""
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

    def _exit_if_stuck(self, seconds: float) -> None:
        """Exit if this rank hangs; exit :data:`_GRACE` seconds later if it waits for another rank."""
        try:
            statuses = self.statuses()
        except (RuntimeError, OSError):
            statuses = {}
        mine = all(status.ticks >= heartbeat.ticks for status in statuses.values()) and any(
            status.ticks > heartbeat.ticks for status in statuses.values()
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
        if not record_failure(error, error.report()):
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
