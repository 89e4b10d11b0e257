"""A barrier in the store: processes wait for one that works alone, as long as it gives signs of life.

A collective ends after a fixed time, whatever another process still writes, verifies or generates; and torch's own
barrier must be told a device.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from halftune.core.processes import heartbeat
from halftune.core.processes.failures import PeerLost
from halftune.train.parallel import watchdog
from halftune.train.parallel.rendezvous import Rendezvous, join_rendezvous
from halftune.train.parallel.watchdog import FAILED, Watchdog

_POLL = (0.001, 0.05)  # seconds between two looks, at first and at most
_DEAD = 20.0  # seconds without a beat after which a process is taken for gone, where no launcher says so
_passed = 0  # barriers of this process
_store_lost = False  # whether the rendezvous store exited


def barrier(processes: int) -> None:
    """Wait until all processes have reached this point.

    Args:
        processes: the world size.

    Raises:
        PeerLost: a rank failed, or no awaited rank sent a heartbeat for ``distributed.timeout_seconds`` (longer while
            one reads or writes a large file); names the rank.
    """
    global _store_lost
    if processes == 1:
        return
    watch = watchdog.current()
    if watch is not None and not _store_lost:  # without a watchdog, the collective reports a lost process
        try:
            return _wait(processes, watch)
        except (RuntimeError, OSError):
            _store_lost = True  # the launcher that serves it exited: the processes save and stop
    dist.barrier()


def _wait(processes: int, watch: Watchdog) -> None:
    global _passed
    rendezvous, key = join_rendezvous(), f"barrier/{_passed}"
    heartbeat.tick()
    if rendezvous.store.add(key, 1) == processes:
        rendezvous.store.set(f"{key}/all", "")
    others = _PeerMonitor(rendezvous, watch)
    pause = _POLL[0]
    while not rendezvous.store.check([f"{key}/all"]):
        heartbeat.wait()
        try:
            others.check()
        except PeerLost:
            if rendezvous.store.check([f"{key}/all"]):  # it came here, and ended afterwards
                break
            raise
        time.sleep(pause)
        pause = min(2 * pause, _POLL[1])
    heartbeat.beat()
    if rendezvous.rank == 0 and _passed:  # all have left the one before
        for done in (f"barrier/{_passed - 1}", f"barrier/{_passed - 1}/all"):
            rendezvous.store.delete_key(done)
    _passed += 1


class _PeerMonitor:
    """Checks periodically that the awaited ranks are alive.

    Args:
        rendezvous: its store says whether a rank has failed.
        watch: gives the last status of each rank.
    """

    def __init__(self, rendezvous: Rendezvous, watch: Watchdog) -> None:
        self.rendezvous, self.watch = rendezvous, watch
        self.seen: list[int] = []
        self.beats: dict[int, tuple[int, float]] = {}  # of each rank the latest, and when it was new
        self.since = self.asked = self.looked = time.monotonic()

    def check(self) -> None:
        """Raise if a rank was lost.

        Raises:
            PeerLost: as :func:`barrier`.
        """
        now = time.monotonic()
        if now - self.asked < watchdog.BEAT:
            return
        self.asked = now
        if self.rendezvous.store.check([FAILED]):
            raise self.watch.find_culprit(RuntimeError("another process has failed"))
        if now - self.looked < self.watch.seconds / 50:  # asks for the sign of every process
            return
        self.looked = now
        statuses = self.watch.statuses()
        for rank, status in statuses.items():
            if self.beats.get(rank, (-1, 0.0))[0] != status.beat:
                self.beats[rank] = (status.beat, now)
            elif now - self.beats[rank][1] > _DEAD + status.extra:  # a library may stop the beat while it writes
                raise self.watch.find_culprit(RuntimeError(f"rank {rank} is gone or stopped"))
        if (seen := [status.main_beats for status in statuses.values()]) != self.seen:
            self.seen, self.since = seen, now
        elif now - self.since > self.watch.seconds + max(status.extra for status in statuses.values()):
            raise self.watch.find_culprit(RuntimeError(f"waited {now - self.since:.0f} s"))
