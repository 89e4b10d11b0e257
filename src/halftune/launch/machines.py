"""The rendezvous of several machines before torchrun's, with progress messages and reasons for failures."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from socket import gethostname
from typing import TYPE_CHECKING

from halftune.core.errors import PlanError, TrainingError
from halftune.core.processes.wait_for_port import Patience, place, wait_for_port

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_ANSWER = 30.0  # seconds
_KEY = "main_process_ip"
_FAILED = "halftune/failed"


@dataclass(frozen=True)
class Machine:
    """One of the machines of a run.

    Attributes:
        rank, count: its rank, and the number of machines.
        each: processes per machine.
        host, port: address of machine 0.
        seconds: timeout of the rendezvous.
    """

    rank: int
    count: int
    each: int
    host: str
    port: int
    seconds: float

    @property
    def place(self) -> str:
        """Address of machine 0, as in a URL."""
        return place(self.host, self.port)


def check_main_address(machine: Machine) -> Patience:
    """Check the address of machine 0; returns the remaining timeout.

    Raises:
        PlanError: the name cannot be resolved, or machine 0 does not have this address.
    """
    patience = Patience(machine.seconds)
    addresses = resolve(machine, patience)
    if machine.rank == 0:
        check_own(machine.host, addresses)
    return patience


class Machines:
    """The machines of a run after the rendezvous.

    Args:
        this: this machine.
        store: served by machine 0.
    """

    def __init__(self, this: Machine, store: TCPStore) -> None:
        self.this, self._store = this, store

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, torchrun's rendezvous; prints progress messages with the missing machines."""
        mine, over = self._key(self.this.rank), threading.Event()
        self._store.set(mine, "1")
        watching = threading.Thread(target=self._print_missing, args=[over], daemon=True)
        watching.start()
        try:
            yield
            self._store.delete_key(mine)
        finally:
            over.set()
            watching.join(_ANSWER)  # a thread in the store's client at exit would abort the process

    def absent(self) -> list[int]:
        """Return the ranks of the machines that have not joined the rendezvous."""
        return [rank for rank in range(self.this.count) if not self._store.check([self._key(rank)])]

    def report_failure(self, text: str, code: int) -> None:
        """Report this machine's failure and exit code to the others; only the first report counts."""
        said = json.dumps({"machine": self.this.rank, "text": text, "code": code})
        with suppress(RuntimeError):  # the store is gone with machine 0
            self._store.compare_set(_FAILED, "", said)

    def peer_failure(self) -> tuple[str, int] | None:
        """Return the failure that another machine has reported; None if there is none."""
        with suppress(RuntimeError):
            if self._store.check([_FAILED]):
                said = json.loads(self._store.get(_FAILED))
                return None if said["machine"] == self.this.rank else (said["text"], said["code"])
        return None

    def _print_missing(self, over: threading.Event) -> None:
        patience = Patience(self.this.seconds)
        try:
            while not over.is_set() and patience.left() > 0 and (absent := self.absent()):
                patience.wait(f"machine {_listed(absent)} to rejoin at {self.this.place}")
        except RuntimeError:  # the store is gone with machine 0; torchrun reports it
            return

    @staticmethod
    def _key(rank: int) -> str:
        return f"halftune/waits/{rank}"


def wait_for_machines(machine: Machine) -> Machines:
    """Wait for all machines. Torchrun then uses the same store, on machine 0.

    Raises:
        PlanError: unknown host name, wrong address of machine 0, duplicate ranks, different numbers of machines, or a
            port in use.
        TrainingError: a machine missed the timeout; names it with the network error.
    """
    patience = check_main_address(machine)
    if machine.rank and (why := wait_for_port(machine.host, machine.port, patience, "machine 0")):
        raise TrainingError(
            f"machine {machine.rank} cannot reach machine 0 at {machine.place} ({machine.seconds:.0f} s): {why}",
            remedy=f"check that machine 0 is running, distributed.{_KEY} is its address, and ports {machine.port} and "
            f"{machine.port + 1} are open",
            code="launch.main_unreachable",
        )
    store = _connect(machine, server=machine.rank == 0)
    try:
        _claim(store, machine)
        _wait_for_all(store, machine, patience)
    except RuntimeError as error:  # of the store, which lives in machine 0's launcher
        raise _left(machine) from error
    return Machines(machine, store)


def resolve(machine: Machine, patience: Patience) -> list[str]:
    """Return the addresses of machine 0.

    Raises:
        PlanError: the name cannot be resolved; in a Kubernetes cluster, where names appear with their pods, not within
            the timeout.
    """
    while True:
        try:
            found = socket.getaddrinfo(machine.host, machine.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: invalid, such as 64 letters
            if "KUBERNETES_SERVICE_HOST" in os.environ and patience.left() > 0:
                patience.wait(f"host {machine.host} to be resolvable in the cluster")
                continue
            why = error.strerror if isinstance(error, OSError) else "invalid host name"
            raise PlanError(
                f"cannot resolve host {machine.host!r} ({why})",
                where=f"distributed.{_KEY}",
                remedy="set an address of machine 0, or a name that all machines can resolve",
                code="launch.bad_main_address",
            ) from error
        return list(dict.fromkeys(str(one[4][0]) for one in found))


def check_own(host: str, addresses: list[str]) -> None:
    """Check that this machine, machine 0, has the address configured for it.

    Raises:
        PlanError: it does not; lists its addresses.
    """
    kinds = {one: ipaddress.ip_address(one.partition("%")[0]) for one in addresses}
    literal = host in kinds or host == "localhost"  # for tests on one machine
    outside = [one for one, kind in kinds.items() if literal or not kind.is_loopback]
    everywhere = any(kind.is_unspecified for kind in kinds.values())
    if not everywhere and any(map(_is_own, outside)):
        return
    if not outside or kinds[addresses[0]].is_unspecified:
        what = f"{host} resolves to {addresses[0]} on machine 0, which other machines cannot reach"
    else:
        meant = host if host in addresses else f"{host} ({', '.join(addresses)})"
        what = f"machine 0 does not have the address {meant}"
    remedy = f"use one of {own_addresses()} on all machines, or set distributed.machine_rank on this one"
    raise PlanError(what, where=f"distributed.{_KEY}", remedy=remedy, code="launch.bad_main_address")


def own_addresses() -> str:
    """Return the addresses of this machine that others may reach, with their interfaces."""
    import psutil

    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                kind = ipaddress.ip_address(entry.address.partition("%")[0])
                if not kind.is_loopback and not kind.is_link_local:
                    found.append(f"{entry.address} ({name})")
    return ", ".join(found) or "no address that others can reach"


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _connect(machine: Machine, *, server: bool) -> TCPStore:
    from halftune.train.parallel.rendezvous import connect

    seconds = min(machine.seconds, _ANSWER)
    try:  # torchrun opens the same one in this process, therefore multi_tenant
        return connect(machine.host, machine.port, seconds, is_master=server, multi_tenant=True)
    except RuntimeError as error:
        if server:
            what, remedy = f"port {machine.port} is in use on this machine", "another distributed.main_process_port"
        elif wait_for_port(machine.host, machine.port, Patience(0.0), "machine 0"):
            raise _left(machine) from error
        else:
            what, remedy = f"no halftune rendezvous at {machine.place}", "check the address and port of machine 0"
        raise PlanError(what, where="distributed.main_process_port", remedy=remedy, code="launch.port_taken") from error


def _left(machine: Machine) -> TrainingError:
    what = f"machine 0 at {machine.place} exited during the rendezvous (this is machine {machine.rank})"
    return TrainingError(what, remedy="see its own output", code="launch.peer_lost")


def _claim(store: TCPStore, machine: Machine) -> None:
    """Register this machine's rank.

    Raises:
        PlanError: another waiting machine has this rank.
    """
    key = f"halftune/machine/{machine.rank}"
    mine = json.dumps({"host": gethostname(), "process": os.getpid(), "count": machine.count})
    holder = store.compare_set(key, "", mine).decode()
    if holder == mine:
        return
    other = json.loads(holder)
    if not store.check(["halftune/begun"]):
        raise PlanError(
            f"duplicate machine_rank {machine.rank}: already used by {other['host']} (process {other['process']})",
            where="distributed.machine_rank",
            remedy=f"set a different rank on each machine, from 0 to {machine.count - 1}",
            code="launch.rank_taken",
        )
    store.set(key, mine)  # replaces one that exited (distributed.max_restarts)


def _wait_for_all(store: TCPStore, machine: Machine, patience: Patience) -> None:
    while missing := _missing(store, machine):
        listed = _listed(missing)
        if patience.left() <= 0:
            processes = len(missing) * machine.each
            raise TrainingError(
                f"machine {listed} missed the rendezvous at {machine.place} ({machine.seconds:.0f} s): {processes} of "
                f"{machine.count * machine.each} processes are missing",
                remedy="start the same command there with its distributed.machine_rank",
                code="launch.rank_missing",
            )
        patience.wait(f"machine {listed} to join at {machine.place}")
    store.set("halftune/begun", "1")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _missing(store: TCPStore, machine: Machine) -> list[int]:
    """Ranks of the machines that have not joined.

    Raises:
        PlanError: a machine was started with another number of machines.
    """
    missing = []
    for rank in range(machine.count):
        key = f"halftune/machine/{rank}"
        if not store.check([key]):
            missing.append(rank)
            continue
        other = json.loads(store.get(key))
        if other["count"] != machine.count:
            raise PlanError(
                f"machine {rank} ({other['host']}) has num_machines {other['count']}, machine {machine.rank} has "
                f"{machine.count}",
                where="distributed.num_machines",
                remedy="set the same number on all machines",
                code="launch.settings_differ",
            )
    return missing
