"""Kills training with SIGKILL at random moments, goes on, and compares the end with a run that was never killed.

    python scripts/kill_test.py                     100 kills over the whole matrix, one process
    python scripts/kill_test.py --kills 20 --ways end start
    python scripts/kill_test.py --methods           every training method
    python scripts/kill_test.py --methods --commands --kills 22     each launch is a `halftune train` of its own
    python scripts/kill_test.py --processes 2 --kills 20 --case fsdp2-full     one of two: FSDP2 full and LoRA, DDP

Every case is trained once without a kill. Then its run folder is started again and again, and in each launch one
process is killed in one of these ways:

    time    at a random time
    save    in the middle of a save: some time after a half-written checkpoint has appeared
    call    at a random one of the system calls that sync, rename, remove …
    start   the same, before the first step: while a run goes on from what the last kill left
    end     the same, from the final save on: the result, that the run is finished, its report
    answer  while the model samples an answer, before a random token (methods that train on its answers)

Other processes have to end by themselves. After every kill the newest checkpoint must be valid, and no older than
before. The last launch may finish. Final weights, the last checkpoint and every number of metrics.jsonl but times and
memory must be bit for bit those of the uninterrupted run, and the report must say that the run is finished.

Sittings are forks of one process that has imported everything, so that a kill costs less than a second. The cache
does not keep the log-probabilities of a reference for the next run, so that computing them is killed, too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from harness import fork_ranks, no_plots, planned, read_lines
from kill_cases import LENGTH, Tree, alone, of_methods, shared, write_data

from halftune.cli.verbs.train import checked
from halftune.core import log
from halftune.core.errors import HalftuneError
from halftune.train import trainer
from halftune.train.loop import stepper
from halftune.train.rollouts.sampling import Sampling
from halftune.train.run_folder.checkpoints import folders, newest_valid, step_of
from halftune.train.state import TrainState

UNEQUAL = {"seconds", "eval_seconds", "time", "memory_bytes"}  # of a line of metrics: differ from run to run
KILLS_PER_RUN = 7
FINISHED = "finished before it could be killed"
# Ways that count system calls → the last one at which it may happen: some 20 come before the first step, some 30 from
# the final save on. Processes that write less make fewer.
CALLS, CALLS_OF_OTHERS = {"call": 80, "start": 20, "end": 24}, 12
ANSWER = "answer"
WAYS = ("time", "save", *CALLS, ANSWER)
TOKENS = 60  # of a launch's answers, before one of which the process is killed
PACE = 0.03  # seconds that a step is made to last, so that random times fall into all of its parts
PATIENCE = 30.0  # seconds in which processes have to notice that another one is gone; torchrun gives them as many


class Case:
    """One line of a matrix, in a folder of its own."""

    def __init__(self, name: str, sections: Tree, room: Path, processes: int, *, commands: bool = False) -> None:
        self.name, self.folder, self.journal, self.processes = name, room / name, room / f"{name}.log", processes
        self.recipe, self.cache = room / f"{name}.yaml", room / "cache"
        self.command = [sys.executable, "-m", "halftune", "train", "--config", str(self.recipe)] if commands else []
        rest = {
            "learning_rate": 1e-3,
            "save_steps": 3,
            "logging_steps": 2,
            "save_total_limit": 2,
        }
        tree = {
            **sections,
            "model": {"name_or_path": "builtin:qwen2-tiny"},
            "data": {"train": str(room / "conversation.jsonl"), "max_length": LENGTH, **sections["data"]},
            "training": {"output_dir": str(self.folder), **rest, **sections["training"]},
            "logging": {"progress": False},
        }
        self.loaded, self.plan = planned(tree, self.recipe, processes=processes)

    @property
    def ways(self) -> tuple[str, ...]:
        """How it can be killed: a command is not changed on the inside."""
        if self.command:
            return ("time", "save")
        return WAYS if self.loaded.run.method.samples_answers else WAYS[:-1]

    def clear(self) -> None:
        """Removes what its launches have left, and what is known of the reference."""
        for folder in (self.folder, self.cache / "reference"):
            shutil.rmtree(folder, ignore_errors=True)

    def launch(self, prepare: Callable[[], None] = lambda: None, victim: int = 0) -> list[int]:
        """Forks the processes of a launch; ``prepare`` is called in one of them."""

        def work(rank: int) -> int:
            os.environ["HALFTUNE_CACHE"] = str(self.cache)
            if self.command:
                os.execv(self.command[0], self.command)
            log.configure()
            slow_down()
            if rank == victim:
                prepare()
            try:
                if self.processes > 1:
                    trainer.train(self.loaded, self.plan)
                else:
                    with checked(self.loaded) as start_training:
                        if start_training is not None:
                            start_training()
            except HalftuneError as error:
                print(f"rank {rank}: {error}", flush=True)
                return error.exit_code
            return 0

        return fork_ranks(self.processes, work, self.journal)

    def finish(self) -> None:
        """A launch that nobody disturbs.

        Raises:
            SystemExit: it fails.
        """
        codes = wait(self.launch(), 600.0)
        if set(codes) != {0}:
            raise SystemExit(f"{self.name}: the last launch left with {codes}, see {self.journal}")


def slow_down() -> None:
    """Makes a step last ``PACE`` longer, so that kills do not all fall into the start; draws no plots."""
    no_plots()
    step = stepper.start_step

    def slowly(run: TrainState, batches: Any, **options: Any) -> Any:
        time.sleep(PACE)
        return step(run, batches, **options)

    stepper.start_step = slowly


def kill_at_call(number: int, *, in_the_end: bool = False) -> Callable[[], None]:
    """Makes a process kill itself before the ``number``-th of its calls that sync, rename, remove or make a folder.

    Args:
        number: counted from 1.
        in_the_end: counted from the final save on.
    """

    def prepare() -> None:
        left, counting = itertools.count(1), [not in_the_end]

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def instead(*args: Any, **kwargs: Any) -> Any:
                if counting[0] and next(left) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return instead

        save = trainer.save_final

        def last_save(*args: Any) -> None:
            counting[0] = True
            save(*args)

        trainer.save_final = last_save

        for name in ("fsync", "replace", "rename", "rmdir", "unlink", "mkdir", "truncate"):
            setattr(os, name, counted(getattr(os, name)))

    return prepare


def kill_at_token(number: int) -> Callable[[], None]:
    """Makes a process kill itself before it samples the ``number``-th token, counted from 1, of all rows at once."""

    def prepare() -> None:
        left, sample = itertools.count(1), Sampling.__call__

        def sampled(self: Sampling, input_ids: Any, scores: Any) -> Any:
            if next(left) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return sample(self, input_ids, scores)

        Sampling.__call__ = sampled  # type: ignore[method-assign]

    return prepare


def wait(children: Sequence[int], seconds: float) -> list[int | None]:
    """Exit codes of processes; None of those that do not end in time, which are killed."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(children):
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.005)
    return [codes[child] for child in children]


def one_kill(case: Case, way: str, seconds: float, numbers: random.Random) -> str:
    """A launch in which one process is killed; says where it was, by what it has left."""
    victim = numbers.randrange(case.processes)
    if way == ANSWER:
        children = case.launch(kill_at_token(numbers.randint(1, TOKENS)), victim)
    elif way in CALLS:
        last = CALLS_OF_OTHERS if victim else CALLS[way]
        prepare = kill_at_call(numbers.randint(1, last), in_the_end=way == "end")
        children = case.launch(prepare, victim)
    else:
        children = case.launch()
        until, nth, seen = time.monotonic() + numbers.uniform(0.2, 0.8) * seconds, numbers.randint(1, 2), set[str]()
        while time.monotonic() < until if way == "time" else len(seen) < nth:
            seen |= {path.name for path in case.folder.glob(".checkpoint-*.writing")}
            if os.waitid(os.P_PID, children[victim], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.0003)
        if way == "save":
            time.sleep(numbers.uniform(0.0, 0.015))
        os.kill(children[victim], signal.SIGKILL)
    os.waitid(os.P_PID, children[victim], os.WEXITED | os.WNOWAIT)
    codes = wait(children, PATIENCE)
    if codes[victim] != -signal.SIGKILL:
        if set(codes) != {0}:
            raise SystemExit(f"nobody was killed and the processes left with {codes}, see {case.journal}")
        return FINISHED
    noticed = "" if None not in codes else ", another process had to be ended"
    return f"{way}{f', rank {victim}' if case.processes > 1 else ''}: {_place(case.folder)}{noticed}"


def _place(folder: Path) -> str:
    if any(folder.glob(".checkpoint-*.writing")):
        return "a checkpoint half-written"
    if (folder / ".final.writing").exists():
        return "the result half-written"
    if (folder / "finished.json").exists():
        return "finished, in the report"
    if (folder / "final").exists():
        return "the result written, the run not finished"
    return "between saves" if folders(folder) else "before the first save"


def outcome(folder: Path) -> dict[str, Any]:
    """What must be equal: bytes of the final weights and of the newest checkpoint's tensors, and the metrics."""
    newest = newest_valid(folder)
    assert newest is not None
    files = [*sorted((folder / "final").glob("*.safetensors")), *sorted(newest.glob("*.safetensors"))]
    found: dict[str, Any] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    found["report.html"] = ">finished</b>" in (folder / "report.html").read_text(encoding="utf-8")
    lines = read_lines(folder / "metrics.jsonl")
    found["metrics.jsonl"] = [{k: v for k, v in line.items() if k not in UNEQUAL} for line in lines]
    return found


def kill_and_compare(
    case: Case, whole: Path, order: Sequence[str], seconds: float, numbers: random.Random
) -> Iterator[str]:
    """Kills one run in these ways and lets it finish; yields where each kill fell, then nothing if all is equal.

    Raises:
        SystemExit: says what differs or broke.
    """
    case.clear()
    known = -1
    for way in order:
        place = one_kill(case, way, seconds, numbers)
        yield place
        if place == FINISHED:
            break
        newest = newest_valid(case.folder) if folders(case.folder) else None
        now = -1 if newest is None else step_of(newest)
        if now < known:
            raise SystemExit(f"{case.name}: the newest valid checkpoint was {known} and is {now} after a kill")
        known = now
    case.finish()
    expected, found = outcome(whole), outcome(case.folder)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            where = f"{case.folder} and {case.journal}"
            raise SystemExit(f"{case.name}: {name} is not that of the uninterrupted run, see {where}")


def main() -> None:
    """Runs the matrix until enough kills have been made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1, help="of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", action="store_true", help="the training methods")
    parser.add_argument("--commands", action="store_true", help="no forks; kills at random times and in saves")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of killing; all by default")
    parser.add_argument("--per-run", type=int, default=KILLS_PER_RUN, help=f"kills of a run (default {KILLS_PER_RUN})")
    parser.add_argument("--case", action="append", help="these cases only")
    parser.add_argument("--room", type=Path, help="keep everything in this folder (a temporary one by default)")
    asked = parser.parse_args()
    numbers, began = random.Random(asked.seed), time.monotonic()
    room = asked.room or Path(tempfile.mkdtemp(prefix="kill-test-"))
    room.mkdir(parents=True, exist_ok=True)
    write_data(room, numbers)
    matrix = of_methods(room) if asked.methods else alone() if asked.processes == 1 else shared()
    names = asked.case or numbers.sample(list(matrix), len(matrix))
    places, killed, lengths = Counter[str](), 0, dict[str, float]()
    for name in itertools.cycle(names):
        if killed >= asked.kills:
            break
        if name not in lengths:
            started = time.monotonic()
            whole = Case(f"{name}-whole", matrix[name], room, asked.processes, commands=asked.commands)
            whole.clear()
            whole.finish()
            lengths[name] = time.monotonic() - started
        case = Case(name, matrix[name], room, asked.processes, commands=asked.commands)
        ways = [way for way in asked.ways if way in case.ways]
        order = [ways[turn % len(ways)] for turn in range(min(asked.per_run, asked.kills - killed))]
        numbers.shuffle(order)
        order.sort(key="end".__eq__)  # behind the end there is nothing left to kill
        found = Counter(kill_and_compare(case, room / f"{name}-whole", order, lengths[name], numbers))
        places += found
        killed += found.total() - found[FINISHED]
        print(f"{killed:4d} kills · {time.monotonic() - began:5.0f} s · {name}: bit-identical", flush=True)
    for place, count in sorted(places.items()):
        print(f"{count:4d}  {place}")
    if asked.room is None:
        shutil.rmtree(room)


if __name__ == "__main__":
    main()
