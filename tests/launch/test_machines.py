"""Machines that do not find each other say so within the limit: who is missing, and what the network answered."""

from __future__ import annotations

import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from lines import foreign, told
from patience import LIMIT, until
from ports import port
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from halftune.core.errors import HalftuneError, PlanError, TrainingError
from halftune.core.processes import wait_for_port as waiting
from halftune.core.processes.wait_for_port import Patience
from halftune.launch import machines
from halftune.launch.agent import Agent
from halftune.launch.elastic import _rendezvous_error, main
from halftune.launch.machines import Machine, Machines, check_main_address, check_own, wait_for_machines
from halftune.train.parallel import rendezvous

ELSEWHERE = "192.0.2.7"  # reserved for documentation (RFC 5737): no machine has it


class Clock:
    """The time of those that wait for a port: it passes only while they sleep, or where a test sets it.

    Attributes:
        now: seconds.
        stands: whether it does not pass in their sleep either.
    """

    def __init__(self) -> None:
        self.now, self.stands = 0.0, False

    def sleep(self, seconds: float) -> None:
        self.now += 0.0 if self.stands else seconds
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    return made


@pytest.fixture(autouse=True)
def _patient_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_ANSWER", LIMIT)


def machine(rank: int, seconds: float = LIMIT) -> Machine:
    return Machine(rank, 2, each=4, host="127.0.0.1", port=port(), seconds=seconds)


def unknown(host: str, *_: object, **_named: object) -> list[Any]:
    """What a network without names answers, and what Python refuses to ask it."""
    host.encode("idna")
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["no-such-machine.invalid", "a" * 64 + ".invalid", "no name"])
def test_an_unknown_name_is_refused_on_every_machine(name: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PlanError, match="cannot resolve host") as refused:
        check_main_address(replace(machine(rank), host=name))
    assert refused.value.where == "distributed.main_process_ip"


@pytest.mark.usefixtures("clock")
def test_a_cluster_makes_names_while_machines_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = socket.getaddrinfo, []

    def later(host, *words, **named):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *words, **named)

    monkeypatch.setattr(socket, "getaddrinfo", later)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    check_main_address(replace(machine(1), host="halftune-machine-0-0.halftune"))
    assert len(asked) == 3


def test_machine_0_must_have_the_address_that_all_look_for() -> None:
    with pytest.raises(PlanError, match=f"does not have the address {ELSEWHERE}") as refused:
        check_main_address(replace(machine(0), host=ELSEWHERE))
    assert "on all machines" in refused.value.remedy
    check_main_address(replace(machine(1), host=ELSEWHERE))  # the others need not
    check_own("127.0.0.1", ["127.0.0.1"])
    for name, address in (("node-a", "127.0.1.1"), ("0.0.0.0", "0.0.0.0")):
        with pytest.raises(PlanError, match=f"{name} resolves to {address}"):
            check_own(name, [address])


@pytest.mark.usefixtures("clock")
def test_a_machine_that_reaches_nobody_says_why_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "EVERY", 0.0)
    one = machine(1, 1.0)
    with pytest.raises(TrainingError, match=r"machine 1 cannot reach machine 0 at 127.*connection refused") as ended:
        wait_for_machines(one)
    assert str(one.port + 1) in ended.value.remedy
    said = capsys.readouterr().err
    assert said.startswith(f"halftune: waiting for machine 0 at 127.0.0.1:{one.port}: connection refused")
    assert "of 1 s)" in said.splitlines()[0]


def test_what_listens_there_and_is_no_store_does_not_hold_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_MARGIN", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(PlanError, match="no halftune rendezvous"):
            wait_for_machines(replace(machine(1, 0.3), port=silent.getsockname()[1]))


@pytest.mark.usefixtures("clock")
def test_machine_0_says_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL", LIMIT / 3)
    with pytest.raises(TrainingError, match=r"machine 1, 2 missed .* 8 of 12 processes are missing"):
        wait_for_machines(replace(machine(0), count=3))


def at_once(*works: Callable[[], None]) -> None:
    """Does all of them at the same time."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    until(lambda: not any(thread.is_alive() for thread in threads), "all have ended")


def together(*all_of: Machine, refused: Callable[[], object] = lambda: None) -> list[HalftuneError | Machines]:
    """What each machine ends with: who is there, or an error, after which ``refused`` is called."""
    ends: list[Any] = [None] * len(all_of)

    def go(index: int) -> None:
        try:
            ends[index] = wait_for_machines(all_of[index])
        except HalftuneError as error:
            ends[index] = error
            refused()

    at_once(*(partial(go, index) for index in range(len(all_of))))
    return ends


def test_machines_meet_and_a_number_is_taken_once(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    clock.stands = True
    first = machine(0)
    assert all(isinstance(one, Machines) for one in together(first, replace(first, rank=1)))
    monkeypatch.setattr(machines, "gethostname", iter("abcdef").__next__)
    first = replace(machine(0), count=3)
    over = partial(setattr, clock, "now", 2 * LIMIT)  # for the others, once one of the three has been refused
    ends = together(first, replace(first, rank=1), replace(first, rank=1), refused=over)
    assert sum("duplicate machine_rank 1" in str(one) for one in ends) == 1
    assert sum("2 missed" in str(one) or "exited" in str(one) for one in ends) == 2


def test_a_machine_that_does_not_come_back_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "POLL", 0.02)
    first = machine(0)
    zero, one = together(first, replace(first, rank=1))
    assert isinstance(zero, Machines)
    assert isinstance(one, Machines)
    assert zero.peer_failure() is one.peer_failure() is None
    one.report_failure("rank 1 on b: there are no data", 2)
    zero.report_failure("rank 1 is gone", 5)  # which is what followed from it
    assert zero.peer_failure() == ("rank 1 on b: there are no data", 2)
    assert one.peer_failure() is None, "it has said so itself"
    with zero.waiting(), one.waiting():
        assert zero.absent() == []
    assert not [thread for thread in threading.enumerate() if "_print_missing" in thread.name]
    assert zero.absent() == [0, 1]  # for the next failure
    monkeypatch.setattr(waiting, "EVERY", 0.1)
    said, late = list[str](), RendezvousTimeoutError("The timeout has been exceeded.")

    def something() -> bool:
        said.append(capsys.readouterr().err)
        return said[-1].endswith("\n")

    with suppress(RendezvousTimeoutError), zero.waiting():
        until(something, "a word about machine 1")
        raise late
    assert "".join(said).startswith(f"halftune: waiting for machine 1 to rejoin at 127.0.0.1:{first.port}")
    assert f"machine 1 missed the rendezvous within {LIMIT:.0f} s" in _rendezvous_error(
        late, Namespace(), zero, begun=True
    )


def test_processes_are_numbered_by_machine_not_by_the_order_in_which_torchrun_saw_them() -> None:
    """Torchrun sorts addresses as text: 10.0.0.10 comes before 10.0.0.9."""
    handler = StaticTCPRendezvous("", 0, 0, world_size=2, run_id="", timeout=1)
    spec = WorkerSpec(role="", local_world_size=2, entrypoint="true", rdzv_handler=handler)
    store, found = HashStore(), dict[int, list[int]]()

    def go(rank: int, sorted_as: int) -> None:
        agent = Agent.__new__(Agent)
        agent.machines = Machines(machine(rank), store)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        found[rank] = [worker.global_rank for worker in agent._assign_worker_ranks(store, sorted_as, 2, spec)]

    at_once(partial(go, 0, 1), partial(go, 1, 0))
    assert found == {0: [0, 1], 1: [2, 3]}


def test_machines_of_different_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL", 0.02)
    first = machine(0)
    ends = together(first, replace(first, rank=1, count=3))
    assert any("num_machines 3" in str(one) for one in ends)


def test_a_limit_is_said_in_seconds(clock: Clock) -> None:
    said: list[str] = []
    patience = Patience(600.0, said.append)
    clock.now += 30.0
    patience.wait("somebody")
    assert said == ["waiting for somebody (30 of 600 s)"]
    assert patience.left() == pytest.approx(570.0 - waiting.POLL)


def test_torchruns_end_is_one_sentence(capsys: pytest.CaptureFixture) -> None:
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", "0", "--rdzv-backend", "c10d"]
    assert main([*words, "--rdzv-endpoint", f"{ELSEWHERE}:29500", "-m", "halftune", "--version"]) == 2
    errors = capsys.readouterr().err
    assert (len(told(errors)), foreign(errors)) == (1, [])
