"""One summary of several failures: what came first, not what followed from it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from halftune.core.errors import DataError, TrainingError
from halftune.core.processes.failures import FILE, SUMMARY, PeerLost, Record, from_message, record_failure
from halftune.launch.agent import Agent
from halftune.launch.elastic import interface_of, main, own_address, prepare
from halftune.launch.summary import Failure, summary
from halftune.train.signals.interrupt import Interrupted, format_signal

KILLED = -signal.SIGKILL


def lost(rank: int, time: float, text: str = "another process no longer answers", *, names: bool = False) -> Failure:
    return Failure(rank, 10 + rank, 5, Record(text, time, lost=True, names_rank=names), time)


def test_what_went_wrong_by_itself_comes_first() -> None:
    own = Failure(2, 12, 5, Record("the disk is full", 100.0), 100.0)
    text, code = summary({0: lost(0, 99.0), 2: own, 1: lost(1, 101.0)}, 0)
    assert text.splitlines()[0].startswith("rank 2 on ")
    assert "the disk is full" in text
    assert "rank 0, 1" in text
    assert code == 5


def test_a_killed_process_leaves_nothing_and_is_named() -> None:
    text, code = summary({1: Failure(1, 11, KILLED, None, 100.0), 0: lost(0, 100.2)}, 2)
    assert "rank 1" in text.splitlines()[0]
    assert "SIGKILL" in text
    assert "2 restarts" in text
    assert code == 5


def test_a_failure_before_a_restart_is_told_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    failed = RunResult(WorkerState.FAILED, failures={1: ProcessFailure(1, 11, KILLED, "<N/A>")})
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: failed)
    agent, group = watching(restarts=3)
    for left in (2, 1, 0):
        agent._remaining_restarts = left
        agent._monitor_workers(group)
    said = capsys.readouterr().err.splitlines()  # of the last one by the summary
    assert all(line.startswith("halftune: rank 1 on ") for line in said[::2])
    again = "  restarting from the newest checkpoint ({} of 3 restarts left)"
    assert said[1::2] == [again.format(left) for left in (1, 0)]


def watching(restarts: int) -> tuple[Agent, Any]:
    """An agent between two looks at its processes."""
    agent, group = Agent.__new__(Agent), SimpleNamespace(spec=SimpleNamespace(max_restarts=restarts), workers=[])
    agent._pcontext, agent._worker_group = None, group  # pyright: ignore[reportAttributeAccessIssue]
    agent.ended, agent.killed, agent.said, agent.peer_exit_code, agent._deadline = {}, set(), False, 0, None
    return agent, group


def left_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    """What torch finds in the error file of a process that leaves with an error."""
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    record_failure(error, str(error))
    return str(tmp_path / "error.json")


def test_whoever_asks_a_process_to_end_does_not_want_it_back(tmp_path: Path, monkeypatch, capsys) -> None:
    number, whom = format_signal([(0, "a"), (int(signal.SIGTERM), "b")])
    error = Interrupted.after(number, 7, Path("run/checkpoint-7"), whom)
    assert str(error).startswith("stopped by SIGTERM to rank 1 on b after step 7; saved run/checkpoint-7")
    assert (
        format_signal([(15, "a"), (15, "b")])[1] == format_signal([(15, ""), (0, "b")])[1] == ""
    )  # all of them, or their launcher
    file = left_by(tmp_path, monkeypatch, error)
    ended = {rank: ProcessFailure(rank, 10 + rank, 143, file) for rank in (0, 1)}
    failed = RunResult(WorkerState.FAILED, failures=ended)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: failed)
    agent, group = watching(restarts=2)
    agent._remaining_restarts = 2
    agent._monitor_workers(group)
    assert agent._remaining_restarts == 0
    assert capsys.readouterr().err == "", "the main process has said it"


def test_one_that_was_asked_to_end_counts_before_torch_has_seen_it_end(tmp_path: Path, monkeypatch, capsys) -> None:
    """Rank 1 has lost rank 0, which had just saved after a signal: nothing to start again for."""
    for rank, error in enumerate((Interrupted.after(signal.SIGTERM, 7, Path("checkpoint-7"), ""), lost_rank_0())):
        (tmp_path / str(rank)).mkdir()
        left_by(tmp_path / str(rank), monkeypatch, error)
    files = {10 + rank: tmp_path / str(rank) / "error.json" for rank in (0, 1)}
    failed = RunResult(WorkerState.FAILED, failures={1: ProcessFailure(1, 11, 5, str(files[11]))})
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: failed)
    agent, group = watching(restarts=2)
    group.workers = [SimpleNamespace(id=10 + rank, global_rank=rank) for rank in (0, 1)]
    processes = [SimpleNamespace(pid=10, poll=lambda: None), SimpleNamespace(pid=11, poll=lambda: 5)]
    monkeypatch.setattr(Agent, "_processes", lambda self: processes)
    monkeypatch.setattr(Agent, "_files", lambda self: files)
    monkeypatch.setattr(Agent, "_any_failed", lambda self: False)
    agent._remaining_restarts = 2
    agent._monitor_workers(group)
    assert agent._remaining_restarts == 0
    agent._remaining_restarts = 2
    agent._print_failure(agent._found(group))
    assert "restarting" not in capsys.readouterr().err


def lost_rank_0() -> PeerLost:
    return PeerLost("rank 0 on a is gone or stopped: it gives no sign of life", named=True, code="launch.peer_lost")


def test_a_failure_is_said_while_the_main_process_writes_its_report(tmp_path: Path, monkeypatch, capsys) -> None:
    error = PeerLost("rank 1 on b is gone or stopped: it gives no sign of life", code="launch.peer_lost", named=True)
    file = left_by(tmp_path, monkeypatch, error)
    writing = SimpleNamespace(pid=10, poll=lambda: None)
    agent, group = watching(restarts=0)
    group.workers = [SimpleNamespace(id=10, global_rank=0)]
    agent._remaining_restarts = 0
    monkeypatch.setattr(Agent, "_processes", lambda self: [writing])
    monkeypatch.setattr(Agent, "_files", lambda self: {10: Path(file)})
    agent._print_failure(agent._known_failures(group))
    agent._print_failure(agent._known_failures(group))
    assert capsys.readouterr().err == f"halftune: {error}\n  terminated as a consequence: rank 0\n"
    assert agent.said


@pytest.mark.parametrize(
    ("codes", "reported"), [({0: 143, 1: 143}, True), ({0: 5, 1: 143}, False), ({0: None, 1: 143}, False)]
)
def test_the_main_process_alone_says_what_was_saved(
    monkeypatch: pytest.MonkeyPatch, codes: dict[int, int | None], reported: bool
) -> None:
    """With that exit code; after another one, what happened is still to be said."""
    agent, group = watching(restarts=0)
    group.workers = [SimpleNamespace(id=10 + rank, global_rank=rank) for rank in codes]
    processes = [SimpleNamespace(pid=10 + rank, poll=lambda code=code: code) for rank, code in codes.items()]
    monkeypatch.setattr(Agent, "_processes", lambda self: processes)
    assert agent.has_reported(143) is reported


@pytest.mark.parametrize(("another", "limit", "kills"), [("exited", 0.0, 1), ("exited", 60.0, 0), ("running", 0.0, 0)])
def test_one_that_is_left_after_a_signal_is_ended(
    monkeypatch: pytest.MonkeyPatch, another: str, limit: float, kills: int
) -> None:
    """Long after another one has ended, whatever the system clock says; those of an earlier attempt do not count."""
    agent, _ = watching(restarts=1)
    monkeypatch.setattr("halftune.launch.agent._REPORT", limit)
    looks = iter([None, None, None])
    left = SimpleNamespace(pid=11, poll=lambda: next(looks, 0))
    other = SimpleNamespace(pid=12, poll=lambda: 143 if another == "exited" else next(looks, 0))
    agent.ended, killed = {5: 0.0} | ({12: 0.0} if other.poll() else {}), list[int]()
    monkeypatch.setattr(Agent, "_processes", lambda self: [left, other])
    monkeypatch.setattr(Agent, "kill", lambda self: killed.append(1))
    agent._kill_stragglers()
    assert bool(killed) == bool(kills)


def test_a_stopped_process_that_torchrun_kills_later_is_blamed_by_the_one_that_waited() -> None:
    blamed = "rank 1 on b is gone or stopped: it gives no sign of life"
    text, _ = summary({1: Failure(1, 11, KILLED, None, 130.0, killed=True), 0: lost(0, 100.0, blamed, names=True)}, 0)
    assert text.splitlines() == [blamed, "  terminated as a consequence: rank 0"]


def test_those_that_torchrun_ends_are_never_first() -> None:
    ended = [Failure(rank, rank, -signal.SIGTERM, None, 90.0) for rank in (0, 1)]
    failed = Failure(2, 2, 2, Record("no such file", 100.0), 100.0)
    text, code = summary({0: ended[0], 1: ended[1], 2: failed}, 0)
    assert "no such file" in text
    assert code == 2


def test_a_process_writes_once_what_torchrun_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv(FILE, str(file))
    monkeypatch.delenv(SUMMARY, raising=False)
    assert record_failure(DataError("row 7 is broken", code="data.malformed_row"), "row 7 is broken") is False
    monkeypatch.setenv(SUMMARY, "1")
    assert record_failure(PeerLost("rank 1 is gone", code="launch.peer_lost", named=True), "rank 1 is gone") is True
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    record = from_message(failure.message)
    assert record is not None
    assert (record.text, record.lost, record.names_rank) == ("row 7 is broken", False, False)
    assert json.loads(file.read_text())["message"]["extraInfo"]["timestamp"].isdecimal()
    assert from_message("Signal 9 (SIGKILL) received by PID 1") is None
    assert PeerLost("x", code="launch.peer_lost").exit_code == TrainingError.exit_code


def test_a_port_that_is_taken_is_said_before_anything_starts(capsys: pytest.CaptureFixture) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        assert main([*words, "-m", "halftune", "--version"]) == 2
    assert f"port {port} is in use" in capsys.readouterr().err


def test_addresses_are_those_by_which_machines_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert own_address("no such host.invalid") is None
    for name in ("TORCH_CPP_LOG_LEVEL", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "HALFTUNE_STORE_PORT", SUMMARY):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    args = argparse.Namespace(
        nproc_per_node="2",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:29500",
        local_addr=None,
        node_rank="1",
        rdzv_conf="join_timeout=60",
    )
    prepare(args)
    assert args.local_addr == "127.0.0.1"
    assert args.rdzv_conf == "join_timeout=60,is_host=False"
    assert os.environ["HALFTUNE_STORE_PORT"] == "29501"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
