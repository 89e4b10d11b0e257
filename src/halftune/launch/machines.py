"""Several machines find each other before torchrun waits for them without a word, or say who is missing and why."""

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
from halftune.core.reach import Patience, place, reach

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_ANSWER = 30.0  # seconds
_KEY = "main_process_ip"
_FAILED = "halftune/failed"


@dataclass(frozen=True)
class Machine:
    """This machine among those of a run.

    Attributes:
        rank, count: which machine this is, of how many.
        each: processes on it.
        host, port: where machine 0 waits for the others.
        seconds: how long machines wait for each other.
    """

    rank: int
    count: int
    each: int
    host: str
    port: int
    seconds: float

    @property
    def place(self) -> str:
        """Where machine 0 waits, as it is written in a URL."""
        return place(self.host, self.port)


def find(machine: Machine) -> Patience:
    """Makes sure that machine 0 can be where it is said to be; returns what is left of the time.

    Raises:
        PlanError: nobody knows the name, or machine 0 has not this address.
    """
    patience = Patience(machine.seconds)
    addresses = resolve(machine, patience)
    if machine.rank == 0:
        check_own(machine.host, addresses)
    return patience


class Machines:
    """The machines of a run, which have all been there.

    Args:
        this: this one.
        store: served by machine 0.
    """

    def __init__(self, this: Machine, store: TCPStore) -> None:
        self.this, self._store = this, store

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around torchrun's wait until all are there, at the start and after a failure; says who is not."""
        mine, over = self._key(self.this.rank), threading.Event()
        self._store.set(mine, "1")
        threading.Thread(target=self._say_who, args=[over], daemon=True).start()
        try:
            yield
            self._store.delete_key(mine)
        finally:
            over.set()

    def absent(self) -> list[int]:
        """Numbers of the machines that do not wait for the others, though this one does or did in vain."""
        return [rank for rank in range(self.this.count) if not self._store.check([self._key(rank)])]

    def tell(self, text: str, code: int) -> None:
        """Lets the other machines know what this one ends of, and with which exit code; the first one counts."""
        said = json.dumps({"machine": self.this.rank, "text": text, "code": code})
        with suppress(RuntimeError):  # of the store: machine 0 has left
            self._store.compare_set(_FAILED, "", said)

    def heard(self) -> tuple[str, int] | None:
        """What another machine has told."""
        with suppress(RuntimeError):
            if self._store.check([_FAILED]):
                said = json.loads(self._store.get(_FAILED))
                return None if said["machine"] == self.this.rank else (said["text"], said["code"])
        return None

    def _say_who(self, over: threading.Event) -> None:
        patience = Patience(self.this.seconds)
        try:
            while not over.is_set() and patience.left() > 0 and (absent := self.absent()):
                patience.wait(f"machine {_listed(absent)} to come back to {self.this.place}")
        except RuntimeError:  # of the store: machine 0 has left, as torchrun notices, too
            return

    @staticmethod
    def _key(rank: int) -> str:
        return f"halftune/waits/{rank}"


def gather(machine: Machine) -> Machines:
    """Waits until all machines are there. Torchrun then uses the same store, which machine 0 serves.

    Raises:
        PlanError: the name is unknown, machine 0 has not this address, two machines have one number, their numbers
            differ, a port is taken.
        TrainingError: somebody did not come within the limit; says who, and what the network answered.
    """
    patience = find(machine)
    if machine.rank and (why := reach(machine.host, machine.port, patience, "machine 0")):
        raise TrainingError(
            f"machine {machine.rank} did not reach machine 0 at {machine.place} in {machine.seconds:.0f} s: {why}",
            remedy=f"is machine 0 started, is distributed.{_KEY} its address, are the ports {machine.port} and "
            f"{machine.port + 1} open?",
        )
    store = _connect(machine, server=machine.rank == 0)
    try:
        _claim(store, machine)
        _wait_for_all(store, machine, patience)
    except RuntimeError as error:  # of the store, which lives in machine 0's launcher
        raise _left(machine) from error
    return Machines(machine, store)


def resolve(machine: Machine, patience: Patience) -> list[str]:
    """Addresses of machine 0.

    Raises:
        PlanError: nobody has this name. In a Kubernetes cluster, where a name appears with its pod: not within the
            limit.
    """
    while True:
        try:
            found = socket.getaddrinfo(machine.host, machine.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name at all, such as one of 64 letters
            if "KUBERNETES_SERVICE_HOST" in os.environ and patience.left() > 0:
                patience.wait(f"the name {machine.host}, which the cluster does not know yet")
                continue
            why = error.strerror if isinstance(error, OSError) else "no host name"
            raise PlanError(
                f"this machine knows no machine {machine.host!r} ({why})",
                where=f"distributed.{_KEY}",
                remedy="the address of machine 0, or a name that all machines know",
            ) from error
        return list(dict.fromkeys(str(one[4][0]) for one in found))


def check_own(host: str, addresses: list[str]) -> None:
    """Makes sure that this machine, number 0, has the address at which the others look for it.

    Raises:
        PlanError: it has not; says which ones it has.
    """
    kinds = [ipaddress.ip_address(one.partition("%")[0]) for one in addresses]
    literal = host in addresses or host == "localhost"  # as somebody writes who tries two machines on one
    outside = [one for one, kind in zip(addresses, kinds, strict=True) if not kind.is_loopback or literal]
    if any(_is_own(one) for one in outside) and not any(kind.is_unspecified for kind in kinds):
        return
    if not outside or kinds[0].is_unspecified:
        what = f"{host} is {addresses[0]} on this machine, number 0, where no other machine reaches it"
    else:
        meant = host if host in addresses else f"{host} ({', '.join(addresses)})"
        what = f"this machine, number 0, does not have the address {meant}"
    remedy = f"it has {own_addresses()}: give all machines one of these, or this one its own distributed.machine_rank"
    raise PlanError(what, where=f"distributed.{_KEY}", remedy=remedy)


def own_addresses() -> str:
    """Addresses by which other machines may reach this one, with their interfaces."""
    import psutil

    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                kind = ipaddress.ip_address(entry.address.partition("%")[0])
                if not kind.is_loopback and not kind.is_link_local:
                    found.append(f"{entry.address} ({name})")
    return ", ".join(found) or "none but those that only itself reaches"


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _connect(machine: Machine, *, server: bool) -> TCPStore:
    from halftune.train.parallel.meeting import connect

    seconds = min(machine.seconds, _ANSWER)
    try:  # torchrun opens the same one in this process, therefore multi_tenant
        return connect(machine.host, machine.port, seconds, is_master=server, multi_tenant=True)
    except RuntimeError as error:
        if server:
            what, remedy = f"port {machine.port} is in use on this machine", "another distributed.main_process_port"
        elif reach(machine.host, machine.port, Patience(0.0), "machine 0"):
            raise _left(machine) from error
        else:
            what, remedy = f"what listens at {machine.place} is no halftune", "are address and port those of machine 0?"
        raise PlanError(what, where="distributed.main_process_port", remedy=remedy) from error


def _left(machine: Machine) -> TrainingError:
    what = f"machine 0 at {machine.place} has left while machine {machine.rank} waited for the others"
    return TrainingError(what, remedy="its own output says why")


def _claim(store: TCPStore, machine: Machine) -> None:
    """Takes this machine's number.

    Raises:
        PlanError: another one, that waits too, has it.
    """
    key = f"halftune/machine/{machine.rank}"
    mine = json.dumps({"host": gethostname(), "process": os.getpid(), "count": machine.count})
    holder = store.compare_set(key, "", mine).decode()
    if holder == mine:
        return
    other = json.loads(holder)
    if not store.check(["halftune/begun"]):
        raise PlanError(
            f"machine {machine.rank} is here already: {other['host']} (process {other['process']})",
            where="distributed.machine_rank",
            remedy=f"each machine has its own, from 0 to {machine.count - 1}",
        )
    store.set(key, mine)  # takes the place of one that is gone (distributed.max_restarts)


def _wait_for_all(store: TCPStore, machine: Machine, patience: Patience) -> None:
    while missing := _missing(store, machine):
        listed = _listed(missing)
        if patience.left() <= 0:
            processes = len(missing) * machine.each
            raise TrainingError(
                f"machine {listed} did not come to {machine.place} within {machine.seconds:.0f} s: {processes} of "
                f"{machine.count * machine.each} processes are missing",
                remedy="start the same command there with this distributed.machine_rank; it says what it waits for",
            )
        patience.wait(f"machine {listed} to come to {machine.place}")
    store.set("halftune/begun", "1")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _missing(store: TCPStore, machine: Machine) -> list[int]:
    """Numbers of the machines that are not there.

    Raises:
        PlanError: one that is there was started for another number of machines.
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
                f"machine {rank} ({other['host']}) was started for {other['count']} machines, this one, number "
                f"{machine.rank}, for {machine.count}",
                where="distributed.num_machines",
                remedy="make them the same",
            )
    return missing
