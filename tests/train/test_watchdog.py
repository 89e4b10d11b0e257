"""Who hangs or is gone is named by those that waited, and one that hangs ends itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from patience import LIMIT, until
from process_group import in_processes
from torch._C._distributed_c10d import TCPStore

from halftune.cli.verbs import train as cli
from halftune.core.processes import heartbeat
from halftune.core.processes.failures import FILE, NAMED, PeerLost
from halftune.train.parallel import barrier as barriers
from halftune.train.parallel import watchdog
from halftune.train.parallel.barrier import barrier
from halftune.train.parallel.rendezvous import join, join_rendezvous, open_store
from halftune.train.parallel.watchdog import Watchdog, is_peer_failure
from halftune.train.signals.interrupt import Interrupted


def told(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"{rank}.json").read_text())["message"]


def waits(folder: Path, rank: int, trouble) -> None:
    """Steps three times with the other process; in the fourth, rank 1 is in trouble."""
    os.environ[FILE] = str(folder / f"{rank}.json")
    os.environ["TORCHELASTIC_RUN_ID"] = "started by a launcher"
    watchdog.BEAT = 0.5
    watch = Watchdog(join_rendezvous(), LIMIT)
    join("cpu", LIMIT)  # so that one which hangs says so first, as in a run
    try:
        for step in range(4):
            heartbeat.tick()
            if step == 3 and rank == 1:
                trouble(watch)
            heartbeat.tick()
            dist.all_reduce(torch.ones(1))
    except OSError as error:
        watch.report_failure(error)
        raise
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
        (folder / f"{rank}.json").write_text(json.dumps({"message": str(watch.find_culprit(error))}))


def hangs_in_python(watch: Watchdog) -> None:
    """The limit counts only here: no step of a busy machine is taken for a hang."""
    other = 1 - watch.rank
    until(lambda: watch.statuses()[other].ticks > heartbeat.ticks, "the other one waits")
    watch.seconds = 0.5
    time.sleep(LIMIT)


def runs_out_of_disk(_: Watchdog) -> None:
    raise OSError("the disk is full")


def is_killed(_: Watchdog) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loses_its_launcher(_: Watchdog) -> None:
    watchdog.os.getppid = lambda: 1  # as whoever adopts orphans
    time.sleep(LIMIT)


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        (hangs_in_python, 5, "hangs at"),
        (loses_its_launcher, -signal.SIGTERM, "exited or is stopped"),
        (is_killed, -signal.SIGKILL, "exited or is stopped"),
        (runs_out_of_disk, 1, "the disk is full"),
    ],
)
def test_the_one_to_blame_is_named(tmp_path: Path, trouble, code: int, said: str) -> None:
    codes = in_processes(2, lambda rank: waits(tmp_path, rank, trouble))
    assert codes == [0, code]
    assert told(tmp_path, 0).startswith("rank 1 on ")
    assert said in told(tmp_path, 0)
    if trouble is hangs_in_python:
        own = told(tmp_path, 1)
        assert "no progress" in own["message"]
        assert own["halftune"]["lost"] is False


def test_a_stop_of_another_rank_is_no_lost_peer() -> None:
    watch = object.__new__(Watchdog)
    watch.store, watch.lock, watch.unreachable = dist.HashStore(), threading.Lock(), False
    watch.rank, watch.world_size = 1, 2
    watch.report_failure(Interrupted.after(signal.SIGTERM, 6, Path("run/checkpoint-6")))
    watch.rank = 0
    (report,) = watch._failure_reports()
    lost = watch._as_peer(*report)
    assert (lost.code, lost.exit_code, NAMED.match(str(lost))) == ("train.interrupted", 128 + signal.SIGTERM, None)


PAUSE = 50.0  # seconds of the processes' own clock that one may be silent for


def _use(clock: Any) -> None:
    """A clock that a test moves, instead of the machine's."""
    own = SimpleNamespace(monotonic=lambda: clock.value, sleep=time.sleep)
    heartbeat.time = barriers.time = own  # pyright: ignore[reportAttributeAccessIssue]


def works_alone(rank: int, clock: Any, looked: Any, announced: int) -> None:
    """Rank 0 works for twice the limit; with nothing announced, it gives signs of life meanwhile."""
    _use(clock)
    watchdog.BEAT = 0.05
    look = barriers._PeerMonitor.check

    def noted(monitor: barriers._PeerMonitor) -> None:
        look(monitor)
        looked.value = max(looked.value, monitor.looked)

    barriers._PeerMonitor.check = noted  # pyright: ignore[reportAttributeAccessIssue]
    join("cpu", LIMIT)
    with Watchdog(join_rendezvous(), PAUSE) as watch:
        barrier(2)
        dist.barrier = lambda: pytest.fail("a collective waits for a fixed time only")
        if rank == 0:
            heartbeat.beat(announced)
            for _ in range(20):
                if not announced:
                    heartbeat.beat()
                sent = watch.beat + 2
                until(lambda sent=sent: watch.beat >= sent, "the sign of life is published")
                for _ in range(2):  # the other one sees it, and then nothing new
                    clock.value += PAUSE / 20
                    until(lambda: looked.value >= clock.value, "the other one has looked")
        barrier(2)
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("announced", [0, int(3 * PAUSE * heartbeat.SLOWEST)])
def test_the_others_wait_as_long_as_one_works(announced: int) -> None:
    clock, looked = multiprocessing.Value("d", 0.0), multiprocessing.Value("d", 0.0)
    assert in_processes(2, lambda rank: works_alone(rank, clock, looked, announced)) == [0, 0]
    assert clock.value == 2 * PAUSE


def test_a_wait_for_one_that_gives_no_sign_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, beat = SimpleNamespace(value=0.0), iter(range(1, 99))
    monkeypatch.setattr(barriers, "time", SimpleNamespace(monotonic=lambda: clock.value))

    def statuses() -> dict[int, watchdog.RankStatus]:
        return {0: watchdog.RankStatus(1, next(beat), "here", "there", main_beats=7, extra=extra)}

    def culprit(error: BaseException) -> PeerLost:
        return PeerLost(str(error), code="launch.peer_lost")

    for extra in (0.0, PAUSE):
        clock.value = 0.0
        watch = cast(Watchdog, SimpleNamespace(seconds=PAUSE, statuses=statuses, find_culprit=culprit))
        monitor = barriers._PeerMonitor(cast(Any, SimpleNamespace(store=dist.HashStore())), watch)
        for clock.value in (2.0, PAUSE + extra + 1.0):
            monitor.check()
        clock.value = PAUSE + extra + 4.0
        with pytest.raises(PeerLost, match="waited"):
            monitor.check()


def hangs_alone(folder: Path, rank: int) -> None:
    os.environ[FILE] = str(folder / f"{rank}.json")
    watchdog.BEAT = 0.2
    with Watchdog(join_rendezvous(), LIMIT) as watch:
        barrier(2)
        if rank == 0:
            hangs_in_python(watch)
        try:
            barrier(2)
        except PeerLost as error:
            (folder / f"{rank}.json").write_text(json.dumps({"message": str(error)}))


def test_who_is_awaited_and_gives_no_sign_is_named(tmp_path: Path) -> None:
    assert in_processes(2, lambda rank: hangs_alone(tmp_path, rank)) == [5, 0]
    assert told(tmp_path, 1).startswith("rank 0 on ")
    assert "no progress" in told(tmp_path, 0)["message"]


def loses_the_store(rank: int, waiting: Any, arrived: Any) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    join("cpu", LIMIT)
    with Watchdog(join_rendezvous(), LIMIT):
        barrier(2)
        barriers._wait = gone  # pyright: ignore[reportAttributeAccessIssue]
        if rank == 0:
            assert waiting.wait(LIMIT)
            time.sleep(0.5)  # time for one that does not wait to pass
            arrived.set()
        waiting.set()
        barrier(2)
        assert arrived.is_set(), "it has waited"


def test_processes_meet_without_the_store_which_ends_with_the_launcher() -> None:
    waiting, arrived = multiprocessing.Event(), multiprocessing.Event()
    assert in_processes(2, lambda rank: loses_the_store(rank, waiting, arrived)) == [0, 0]


def passes_and_fails(rank: int) -> None:
    """Rank 0 looks for failures while rank 1 comes to the barrier, passes and fails."""
    watchdog.BEAT = LIMIT  # the end waits so long for the thread
    join("cpu", LIMIT)
    store = join_rendezvous().store
    looks = barriers._PeerMonitor.check

    def looks_late(monitor: barriers._PeerMonitor) -> None:
        store.set("rank 0 waits", "")
        store.wait([watchdog.FAILED])
        monitor.asked = float("-inf")
        looks(monitor)

    with Watchdog(join_rendezvous(), LIMIT) as watch:
        if rank == 0:
            barriers._PeerMonitor.check = looks_late  # pyright: ignore[reportAttributeAccessIssue]
            barrier(2)
        else:
            store.wait(["rank 0 waits"])
            barrier(2)
            watch.report_failure(OSError("the disk is full"))
    assert not watch.thread.is_alive(), "it would still be inside the store when the process exits"


def test_who_fails_behind_a_barrier_has_passed_it() -> None:
    assert in_processes(2, passes_and_fails) == [0, 0]


def test_a_process_takes_its_group_apart_when_it_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_recipes(_: Any) -> list[Any]:
        join("cpu", LIMIT)
        barrier(2)  # as every run has: one that left at once would be missed by another that is still connecting
        return []

    monkeypatch.setattr(cli, "load_from", lambda _: None)
    monkeypatch.setattr(cli, "in_order", no_recipes)

    def work(rank: int) -> None:
        assert cli.run(Namespace(profile=False, print_config=False, sweep=None)) == 0
        assert not dist.is_initialized()

    assert in_processes(2, work) == [0, 0]


def test_only_what_another_process_causes_is_taken_for_its_loss() -> None:
    assert is_peer_failure(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    assert is_peer_failure(dist.DistBackendError("NCCL"))
    assert not is_peer_failure(RuntimeError("shape mismatch"))
    assert not is_peer_failure(ValueError("Timed out waiting"))
    assert not PeerLost("x", code="launch.peer_lost").named


@pytest.mark.parametrize(("own", "met"), [(True, True), (False, False)])
def test_attempts_are_counted_only_in_a_store_that_outlives_them(monkeypatch, own: bool, met: bool) -> None:
    """Machines count apart: one that starts again because another one does has had no failure of its own."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("HALFTUNE_STORE_PORT", raising=False)
    if own:
        monkeypatch.setenv("HALFTUNE_STORE_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    open_store().set("key", "value")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert open_store().check(["key"]) is met
