"""torchrun's agent, which starts and monitors a machine's processes, with shorter timeouts after a failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from halftune.core.processes.failures import NAMED, Record, from_message, read
from halftune.launch.deadline import Deadline
from halftune.launch.machines import Machines
from halftune.launch.summary import FAILED, Failure, say, stopped, summary

NOTICE = 10.0  # seconds for the other processes to report after a failure
_REPORT = 60.0  # seconds for a process that has reported to write the run's report and exit
_POLL = 0.1  # seconds
_STUCK = 30.0  # seconds added to every timeout before the launcher counts as stuck
# torchrun's exit barrier waits 300 s for other machines. Our processes exit together, only rank 0 still writes the
# report; a killed launcher would delay the others that long.
_PARTING = 60.0


class Agent(LocalElasticAgent):
    """An agent with shorter shutdown timeouts and fixed ranks; torchrun waits 30 seconds even for a stopped process.

    The timeout is :data:`NOTICE` after a failure, ``--shutdown-timeout`` after a signal, which causes a checkpoint, and
    :data:`NOTICE` after a second signal.

    torchrun orders machines by their addresses as text; this agent by ``--node-rank``, so that rank 0, its log and its
    store are on machine 0.

    Attributes:
        machines: all machines; None for a single one.
        ended: process id → time when its end was noticed, in seconds since the epoch.
        killed: ids of the processes that were killed.
        said: whether the failure of this attempt was printed.
        peer_exit_code: exit code of another machine that failed; 0 if none did.
    """

    latest: Agent | None = None
    machines: ClassVar[Machines | None] = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, exit_barrier_timeout=_PARTING, **options)
        if self.machines is not None:
            self._worker_group.spec.master_addr = self.machines.this.host
        self.ended: dict[int, float] = {}
        self.killed: set[int] = set()
        self.said = self._stopping = self._in_rendezvous = False
        self.peer_exit_code = 0
        self._deadline = Deadline(_STUCK, self._stuck) if self.machines is not None else None
        Agent.latest = self

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self.machines is None:
            super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]  (torch's @prof)
            return
        self._extend(self.machines.this.seconds)
        self._in_rendezvous = True
        with self.machines.waiting():
            super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]
        self._in_rendezvous = False
        worker_group.group_rank = self.machines.this.rank  # pyright: ignore[reportAttributeAccessIssue]

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        number = group_rank if self.machines is None else self.machines.this.rank
        return super()._assign_worker_ranks(store, number, group_world_size, spec)  # pyright: ignore[reportCallIssue]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._extend(0.0)
        self._listen()
        if self.peer_exit_code or self._any_failed():
            began = time.monotonic()
            while self._some_may_exit(worker_group) and time.monotonic() - began < self._failure_timeout():
                self._listen()
                self._print_failure(self._known_failures(worker_group))
                self._extend(0.0)
                time.sleep(_POLL)
            self.kill()
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]  (torch's @prof)
        if result.is_failed():
            # torch reports processes that have exited; one that was just killed may have written a record
            failures = self._found(worker_group) | self.failures(result.failures)
            if stopped(failures):
                self._remaining_restarts = 0  # no restart after a stop signal
            elif self._remaining_restarts:
                self._print_failure(failures)
                self.said = False  # for the next attempt
            elif self.machines is not None and not self.peer_exit_code:
                self.machines.report_failure(*summary(failures, worker_group.spec.max_restarts))
        return result

    def _listen(self) -> None:
        """Stop if another machine failed, since the processes would wait for it."""
        if self.machines is None or self.said or (told := self.machines.peer_failure()) is None:
            return
        self.said, self._remaining_restarts, self.peer_exit_code = True, 0, told[1]
        say(told[0], told[1])

    def _failure_timeout(self) -> float:
        left, files = self._alive(), self._files()
        return _REPORT if all(read(files[pid]) is not None for pid in left) else NOTICE

    def _print_failure(self, failures: Mapping[int, Failure]) -> None:
        """Print the failure of this attempt once."""
        if self.said or not failures:
            return
        most = self._worker_group.spec.max_restarts
        self.said, left = True, 0 if stopped(failures) else self._remaining_restarts
        text, code = summary(failures, 0 if left else most)
        again = f"\n  restarting from the newest checkpoint ({left - 1} of {most} restarts left)" if left else ""
        say(text + again, code)

    def _known_failures(self, worker_group: WorkerGroup) -> dict[int, Failure]:
        """All failures as soon as the root cause is known, though processes may still be running; else empty."""

        def is_root_cause(one: Failure) -> bool:
            if one.record is not None:
                return one.record.is_root_cause
            return one.code < 0 and one.pid not in self.killed

        found = self._found(worker_group)
        return found if any(map(is_root_cause, found.values())) else {}

    def _found(self, worker_group: WorkerGroup) -> dict[int, Failure]:
        """The failures, or records so far, of processes that have not exited with 0, by rank."""
        ranks = {worker.id: worker.global_rank for worker in worker_group.workers}
        found, files = dict[int, Failure](), self._files()
        for process in self._processes():
            record, code = read(files[process.pid]), process.poll()
            if code == 0:
                continue
            seen = self.ended.get(process.pid, time.time())
            rank = ranks[process.pid]
            found[rank] = Failure(rank, process.pid, code or 0, record, seen, killed=code is None and record is None)
        return found

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._shutdown(timeout=int(NOTICE))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # run() calls this after a signal, and again after a second signal
        timeout, self._stopping = int(NOTICE) if self._stopping else timeout, True
        self._extend(timeout)
        threading.Thread(target=self._kill_stragglers, name="kill stragglers", daemon=True).start()
        super()._shutdown(death_sig, timeout)

    def _kill_stragglers(self) -> None:
        """Kill processes that are still running long after another one exited: they are stopped or hang."""
        first = None  # not from ``ended``: the system clock may be set meanwhile
        while left := self._alive():
            if first is None and len(left) < len(self._processes()):
                first = time.monotonic()
            if first is not None and time.monotonic() - first > _REPORT:
                self.kill()
            time.sleep(_POLL)

    def _extend(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.extend(seconds + _STUCK)

    def _stuck(self) -> None:
        """Exit if torch waits for machine 0 without a timeout after the rendezvous or a failure."""
        if not self._in_rendezvous and not self._any_failed():
            return
        assert self.machines is not None
        self._remaining_restarts = 0
        self._print_failure(self._known_failures(self._worker_group))
        if not self.said:
            place = self.machines.this.place
            say(f"machine 0 at {place} does not respond: it exited, or the network failed", FAILED)
        self.kill()
        os._exit(FAILED)

    def has_started(self) -> bool:
        """Whether processes were started."""
        return bool(self._processes())

    def has_reported(self, code: int) -> bool:
        """Whether rank 0 ran here and exited with this code, so that it has printed what was saved."""
        ranks = {worker.id: worker.global_rank for worker in self._worker_group.workers}
        return any(ranks.get(each.pid) == 0 and each.poll() == code for each in self._processes())

    def failures(self, found: Mapping[int, ProcessFailure]) -> dict[int, Failure]:
        """Convert torchrun's failures, by rank, with the times of ends and the records."""

        def one(rank: int, failure: ProcessFailure) -> Failure:
            seen = self.ended.get(failure.pid, float(failure.timestamp))
            record = from_message(failure.message)
            return Failure(rank, failure.pid, failure.exitcode, record, seen, failure.pid in self.killed)

        return {rank: one(rank, failure) for rank, failure in found.items()}

    def kill(self) -> None:
        """Kill the remaining processes with their children."""
        for pid in self._alive():
            self.killed.add(pid)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _any_failed(self) -> bool:
        return any(process.poll() for process in self._processes()) or any(
            record.is_root_cause for record in self._records()
        )

    def _some_may_exit(self, worker_group: WorkerGroup) -> bool:
        """Whether a remaining process is neither stopped nor reported as hanging by a peer."""
        ranks = {worker.id: worker.global_rank for worker in worker_group.workers}
        left = [pid for pid in self._alive() if not _is_stopped(pid)]
        return bool(left) and not {ranks.get(pid) for pid in left} <= self._reported_ranks()

    def _reported_ranks(self) -> set[int]:
        left = (record for record in self._records() if record.names_rank)
        return {int(named[1]) for record in left if (named := NAMED.match(record.text))}

    def _records(self) -> list[Record]:
        return [record for path in self._files().values() if (record := read(path)) is not None]

    def _files(self) -> dict[int, Path]:
        """The error file of each process, by process id."""
        if self._pcontext is None:
            return {}
        return {pid: Path(self._pcontext.error_files[local]) for local, pid in self._pcontext.pids().items()}

    def _alive(self) -> list[int]:
        left = []
        for process in self._processes():
            if process.poll() is None:
                left.append(process.pid)
            else:
                self.ended.setdefault(process.pid, time.time())
        return left

    def _processes(self) -> list[Any]:
        context = self._pcontext
        return (
            [handler.proc for handler in context.subprocess_handlers.values()]
            if isinstance(context, SubprocessContext)
            else []
        )


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return True


def install(machines: Machines | None) -> None:
    """Make torchrun use :class:`Agent` in this process."""
    Agent.machines = machines
    api.LocalElasticAgent = Agent  # pyright: ignore[reportPrivateImportUsage]
