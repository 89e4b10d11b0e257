"""Where the processes of a run meet: one store of small values, and the process group made from it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from halftune.core.errors import PlanError
from halftune.core.log import get_logger
from halftune.core.processes.failures import PeerLost
from halftune.core.processes.process import this_process
from halftune.core.processes.wait_for_port import Patience, place, wait_for_port

log = get_logger(__name__)

_PORT = "HALFTUNE_STORE_PORT"  # a fixed port of the run's own; else the launcher's store is used
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
_POLL = 0.05  # seconds
_MARGIN = 1.0  # seconds, for torch to say itself what went wrong
_ANSWER = 5.0  # seconds at least that a store has to answer in which has been reached


@dataclass(frozen=True)
class Rendezvous:
    """The store that all processes of one attempt share.

    Attributes:
        store: of this process's main thread; a thread opens another one.
        rank, world_size: which process this is, of how many.
    """

    store: Store
    rank: int
    world_size: int

    def tell(self, topic: str, value: Any) -> None:
        """Writes this process's JSON-able value under a topic."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))

    def ask(self, topic: str, seconds: float) -> list[Any]:
        """Everybody's value under a topic, by rank; waits for those that have not written.

        Raises:
            PeerLost: some did not within the time; names the first.
        """
        deadline, found = time.monotonic() + seconds, []
        for rank in range(self.world_size):
            self._wait(f"{topic}/{rank}", lambda: time.monotonic() < deadline, rank, seconds)
            found.append(json.loads(self.store.get(f"{topic}/{rank}")))
        return found

    def wait(self, topic: str, patient: Callable[[], bool]) -> None:
        """Waits until everybody has written under a topic, as long as ``patient`` says so."""
        for rank in range(self.world_size):
            self._wait(f"{topic}/{rank}", patient, rank, 0.0)

    def _wait(self, key: str, patient: Callable[[], bool], rank: int, seconds: float) -> None:
        while not self.store.check([key]):  # a wait of the store's own prints a page where it ends
            if not patient():
                within = f" within {seconds:.0f} s" if seconds else ""
                what = f"rank {rank} missed the rendezvous{within}"
                raise PeerLost(
                    what,
                    remedy="is it started, and do the machines reach each other?",
                    named=True,
                    code="launch.rank_missing",
                )
            time.sleep(_POLL)


_met: Rendezvous | None = None


def join_rendezvous(seconds: float = 300.0) -> Rendezvous:
    """The rendezvous of this process, by what its launcher has set; made once.

    Args:
        seconds: how long to look for the store.

    Raises:
        PlanError: rank 0 cannot serve the store, as its port is taken.
        PeerLost: the store was not reached within the time.
    """
    global _met
    if _met is None:
        store = open_store(seconds, server=True)
        process = this_process()
        _met = Rendezvous(store, process.rank, process.world_size)
    return _met


def open_store(seconds: float = 300.0, *, server: bool = False) -> Store:
    """A connection to the store: the launcher's, or on a port of the run's own that rank 0 serves.

    Raises:
        PlanError: no launcher has started this process, or rank 0 cannot serve the store.
        PeerLost: the store was not reached within the time.
    """
    process = this_process()
    if process.world_size == 1:
        remedy = "start it with `halftune train` or torchrun"
        what = "the run was planned for several processes, but no launcher has started them"
        raise PlanError(what, remedy=remedy, code="launch.process_count_differs")
    own, rank = os.environ.get(_PORT), process.rank
    agents = own is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = server and not agents and rank == 0
    host, port = os.environ["MASTER_ADDR"], int(own or os.environ["MASTER_PORT"])
    here = socket.gethostname()
    say = log.warning if process.local_rank == 0 else log.debug  # once for each machine
    patience = Patience(seconds, say)
    if not serves and (why := wait_for_port(host, port, patience, "rank 0")):
        what = f"rank {rank} on {here} did not reach rank 0 at {place(host, port)} in {seconds:.0f} s: {why}"
        raise PeerLost(
            what,
            remedy="is rank 0 started, and is that port open between the machines?",
            named=True,
            code="launch.main_unreachable",
        )
    try:
        store = connect(host, port, max(patience.left(), _ANSWER), is_master=serves)
    except dist.DistNetworkError as error:
        if not serves:
            what = f"rank {rank} on {here} lost rank 0's store: {_first(error)}"
            raise PeerLost(what, named=True, code="launch.peer_lost") from error
        what = f"rank 0 cannot serve the others at port {port} of {here}: {_first(error)}"
        raise PlanError(what, remedy="another distributed.main_process_port", code="launch.port_taken") from error
    store.set_timeout(timedelta(seconds=300))  # of a question to it
    # The launcher's store outlives an attempt. Rank 0's own does not, and machines count their attempts apart: one that
    # starts again because another one does has had no failure of its own.
    attempt = "0" if own else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"halftune/{attempt}", store)


def connect(host: str, port: int, seconds: float, **options: bool) -> TCPStore:
    """A connection to a store; torch itself waits forever if another program listens there and does not answer.

    Raises:
        dist.DistNetworkError: there is no answer, or no connection; or the port of one to be served is taken.
    """
    made: SimpleQueue[TCPStore | RuntimeError] = SimpleQueue()

    def go() -> None:
        try:
            made.put(TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=seconds), **options))
        except RuntimeError as error:
            made.put(error)

    threading.Thread(target=go, daemon=True).start()
    try:
        store = made.get(timeout=seconds + _MARGIN)
    except Empty as error:
        raise dist.DistNetworkError(f"what listens at {place(host, port)} does not answer") from error
    if isinstance(store, RuntimeError):
        raise store
    return store


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160]


def part() -> None:
    """Takes the process group apart, where there is one: at the end of a process, when all have done their work."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join(kind: str, seconds: float) -> None:
    """Makes the process group of all processes.

    Args:
        kind: torch's name of the device type.
        seconds: after which waiting for another process is an error.
    """
    if dist.is_initialized():
        return
    rendezvous = join_rendezvous()
    dist.init_process_group(
        _BACKENDS.get(kind, "gloo"),
        store=PrefixStore("group", rendezvous.store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(seconds=seconds),
    )
