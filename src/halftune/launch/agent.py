"""torchrun's agent, which starts and watches the processes of a machine, with shorter patience once one has failed."""

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

from halftune.core.failures import NAMED, Record, from_message, read
from halftune.launch.deadline import Deadline
from halftune.launch.machines import Machines
from halftune.launch.summary import FAILED, Failure, say, stopped, summary

NOTICE = 10.0  # seconds in which the others say what they saw of a process that failed
_REPORT = 60.0  # seconds for one that has said it to write the report of the run, and end by itself
_POLL = 0.1  # seconds
_STUCK = 30.0  # seconds more than anything may take that this waits for
# torchrun waits 300 s for machines whose processes have not left yet. Ours leave together, and what rank 0 still writes
# is the report; a launcher that was killed meanwhile would hold the others for as long.
_PARTING = 60.0


class Agent(LocalElasticAgent):
    """torchrun gives every process 30 seconds to end, also one that is stopped or waits where no signal reaches it.

    After a failure this one gives :data:`NOTICE`; after a signal, which asks for a checkpoint, as long as
    ``--shutdown-timeout`` says, and after a second signal :data:`NOTICE` again.

    Among several machines torchrun numbers the processes by the machines' addresses, as text; this one by the machines'
    own numbers, so that rank 0, its log and its store are on machine 0.

    Attributes:
        machines: all of them; None where there is only one.
        ended: process ids by the time when they were seen to have ended, in seconds since the epoch.
        killed: process ids of those that did not end by themselves.
        said: whether it has said how this attempt failed.
        heard: the exit code of another machine, which all end of; 0 where there is none.
    """

    latest: Agent | None = None
    machines: ClassVar[Machines | None] = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, exit_barrier_timeout=_PARTING, **options)
        if self.machines is not None:
            self._worker_group.spec.master_addr = self.machines.this.host
        self.ended: dict[int, float] = {}
        self.killed: set[int] = set()
        self.said = self._told = self._meeting = False
        self.heard = 0
        self._deadline = Deadline(_STUCK, self._stuck) if self.machines is not None else None
        Agent.latest = self

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self.machines is None:
            super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]  (torch's @prof)
            return
        self._extend(self.machines.this.seconds)
        self._meeting = True
        with self.machines.waiting():
            super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]
        self._meeting = False
        worker_group.group_rank = self.machines.this.rank  # pyright: ignore[reportAttributeAccessIssue]

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        number = group_rank if self.machines is None else self.machines.this.rank
        return super()._assign_worker_ranks(store, number, group_world_size, spec)  # pyright: ignore[reportCallIssue]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._extend(0.0)
        self._listen()
        if self.heard or self._somebody_failed():
            began = time.monotonic()
            while self._some_will_end(worker_group) and time.monotonic() - began < self._patience():
                self._listen()
                self._speak(self._settled(worker_group))
                self._extend(0.0)
                time.sleep(_POLL)
            self.kill()
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]  (torch's @prof)
        if result.is_failed():
            failures = self.failures(result.failures)
            if stopped(failures):
                self._remaining_restarts = 0  # whoever asks a process to end does not want it back
            elif self._remaining_restarts:
                self._speak(failures)
                self.said = False  # of the next attempt, which begins now
            elif self.machines is not None and not self.heard:
                self.machines.tell(*summary(failures, worker_group.spec.max_restarts))
        return result

    def _listen(self) -> None:
        """Ends with another machine, whose processes these would wait for."""
        if self.machines is None or self.said or (told := self.machines.heard()) is None:
            return
        self.said, self._remaining_restarts, self.heard = True, 0, told[1]
        say(told[0], told[1])

    def _patience(self) -> float:
        left, files = self._alive(), self._files()
        return _REPORT if all(read(files[pid]) is not None for pid in left) else NOTICE

    def _speak(self, failures: Mapping[int, Failure]) -> None:
        """Says once for each attempt how it failed."""
        if self.said or not failures:
            return
        self.said, left, most = True, self._remaining_restarts, self._worker_group.spec.max_restarts
        text, code = summary(failures, 0 if left else most)
        again = f"\n  starts again from the newest checkpoint, {left - 1} of {most} restarts left" if left else ""
        say(text + again, code)

    def _settled(self, worker_group: WorkerGroup) -> dict[int, Failure]:
        """All that failed or will, as soon as it is known what of: the last of them may still write its report."""
        ranks = {worker.id: worker.global_rank for worker in worker_group.workers}
        found, settled, files = dict[int, Failure](), False, self._files()
        for process in self._processes():
            record, code = read(files[process.pid]), process.poll()
            if code == 0:
                continue
            died = code is not None and code < 0 and process.pid not in self.killed and record is None
            settled |= died or (record is not None and record.settles)
            seen = self.ended.get(process.pid, time.time())
            rank = ranks[process.pid]
            found[rank] = Failure(rank, process.pid, code or 0, record, seen, killed=code is None and record is None)
        return found if settled else {}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._shutdown(timeout=int(NOTICE))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # run() comes here after a signal, and once more where another one came while it waited
        timeout, self._told = int(NOTICE) if self._told else timeout, True
        self._extend(timeout)
        threading.Thread(target=self._end_the_rest, name="end the rest", daemon=True).start()
        super()._shutdown(death_sig, timeout)

    def _end_the_rest(self) -> None:
        """After a signal processes leave together; one that is left long after another is stopped, or hangs."""
        while left := self._alive():
            ended = [self.ended[each.pid] for each in self._processes() if each.pid not in left]
            if ended and time.time() - min(ended) > _REPORT:
                self.kill()
            time.sleep(_POLL)

    def _extend(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.extend(seconds + _STUCK)

    def _stuck(self) -> None:
        """Ends this launcher where torch waits for ever for machine 0, and nobody here waits for it any more."""
        if not self._meeting and not self._somebody_failed():
            return
        assert self.machines is not None
        self._remaining_restarts = 0
        self._speak(self._settled(self._worker_group))
        if not self.said:
            place = self.machines.this.place
            say(f"machine 0 at {place} does not answer: it is gone, or the network to it is cut", FAILED)
        self.kill()
        os._exit(FAILED)

    def has_started(self) -> bool:
        """Whether it has started processes."""
        return bool(self._processes())

    def has_told(self, code: int) -> bool:
        """Whether rank 0 was here and left with this exit code by itself: it has said what was saved."""
        ranks = {worker.id: worker.global_rank for worker in self._worker_group.workers}
        return any(ranks.get(each.pid) == 0 and each.poll() == code for each in self._processes())

    def failures(self, found: Mapping[int, ProcessFailure]) -> dict[int, Failure]:
        """What torchrun found, by rank, and what it did not see: who ended when, and because of whom."""

        def one(rank: int, failure: ProcessFailure) -> Failure:
            seen = self.ended.get(failure.pid, float(failure.timestamp))
            record = from_message(failure.message)
            return Failure(rank, failure.pid, failure.exitcode, record, seen, failure.pid in self.killed)

        return {rank: one(rank, failure) for rank, failure in found.items()}

    def kill(self) -> None:
        """Ends the processes that are left, with all that they have started."""
        for pid in self._alive():
            self.killed.add(pid)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _somebody_failed(self) -> bool:
        return any(process.poll() for process in self._processes()) or any(record.settles for record in self._records())

    def _some_will_end(self, worker_group: WorkerGroup) -> bool:
        """Whether one that is left is neither stopped nor said to hang by one that has waited for it."""
        ranks = {worker.id: worker.global_rank for worker in worker_group.workers}
        left = [pid for pid in self._alive() if not _is_stopped(pid)]
        return bool(left) and not {ranks.get(pid) for pid in left} <= self._blamed()

    def _blamed(self) -> set[int]:
        left = (record for record in self._records() if record.names_rank)
        return {int(named[1]) for record in left if (named := NAMED.match(record.text))}

    def _records(self) -> list[Record]:
        return [record for path in self._files().values() if (record := read(path)) is not None]

    def _files(self) -> dict[int, Path]:
        """Where each process, by its id, says how it fails."""
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
    """Lets torchrun, in this process, start :class:`Agent` in place of its own."""
    Agent.machines = machines
    api.LocalElasticAgent = Agent  # pyright: ignore[reportPrivateImportUsage]
