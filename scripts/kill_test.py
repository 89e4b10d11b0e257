"""Kills training with SIGKILL at random moments, goes on, and compares the end with a run that was never killed.

    python scripts/kill_test.py                     100 kills over the whole matrix
    python scripts/kill_test.py --kills 10 --seed 3
    python scripts/kill_test.py --kills 20 --ways end start

Every case is trained once without a kill. Then its run folder is started again and again, by the verb ``train``, and
each sitting is killed in one of these ways:

    time    at a random time
    save    in the middle of a save: some time after a half-written checkpoint has appeared
    call    at a random one of the system calls that sync, rename, remove …
    start   the same, before the first step: while a run goes on from what the last kill left
    end     the same, from the final save on: the result, that the run is finished, its report

The last sitting may finish. Final weights, the last checkpoint and every number of metrics.jsonl but times and memory
must be bit for bit those of the uninterrupted run, and the report must say that the run is finished.

Sittings are forks of one process that has imported everything, so that a kill costs less than a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import yaml

from halftune.cli.train import train_one
from halftune.config.load import load_config
from halftune.core import log
from halftune.core.errors import HalftuneError
from halftune.train import trainer
from halftune.train.callbacks.loss_plot import LossPlot
from halftune.train.checkpoint_list import folders, newest_valid, step_of
from halftune.train.step import Stepper

UNEQUAL = {"seconds", "eval_seconds", "time", "memory_bytes"}  # of a line of metrics: differ from run to run
KILLS_PER_RUN = 7
LENGTH = 48  # tokens of a row
FINISHED = "finished before it could be killed"
# Ways that count system calls → the last one at which it may happen: some 20 come before the first step, some 30 from
# the final save on.
CALLS = {"call": 80, "start": 20, "end": 24}
WAYS = ("time", "save", *CALLS)
PACE = 0.03  # seconds that a step is made to last, so that random times fall into all of its parts


@dataclass(frozen=True)
class Case:
    """One line of the matrix."""

    precision: str
    adapter: str
    packing: bool
    dropout: float
    accumulation: int
    by_tokens: bool
    load_best: bool

    @property
    def name(self) -> str:
        """E.g. ``bf16-lora-tokens-dropout0.1-x2-best``."""
        rows = "packed" if self.packing else "tokens" if self.by_tokens else "padded"
        parts = [self.precision, "full" if self.adapter == "none" else self.adapter, rows]
        parts += [f"dropout{self.dropout:g}", f"x{self.accumulation}", *(["best"] if self.load_best else [])]
        return "-".join(parts)


def matrix() -> list[Case]:
    """bf16/fp32 × LoRA/full × packed or not.

    Taking turns: dropout (LoRA), accumulation, batches of as many tokens as fit, grouped by length, and the best
    weights as the result with early stopping.
    """
    return [
        Case(
            precision,
            adapter,
            packing,
            dropout=0.1 if adapter == "lora" else 0.0,
            accumulation=1 + number.bit_count() % 2,
            by_tokens=number % 6 == 1,
            load_best=number % 3 == 1,
        )
        for number, (precision, adapter, packing) in enumerate(
            itertools.product(("bf16", "fp32"), ("lora", "none"), (True, False))
        )
    ]


def write_rows(path: Path) -> None:
    """64 prompts of different lengths."""
    numbers = random.Random(7)
    rows = []
    for _ in range(64):
        values = [numbers.randint(1, 99) for _ in range(numbers.randint(2, 6))]
        rows.append({"prompt": f"Add {values}.", "completion": f"{sum(values)}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recipe(case: Case, room: Path, output: Path) -> Any:
    """The loaded configuration of a case."""
    size: dict[str, Any] = {"per_device_train_batch_size": 4 // case.accumulation}
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "precision": case.precision,
        "adapter": {"type": "lora", "rank": 4, "dropout": case.dropout} if case.adapter == "lora" else "none",
        "data": {"train": str(room / "rows.jsonl"), "max_length": LENGTH, "packing": case.packing, "eval_split": 8}
        | ({"group_by_length": True} if case.by_tokens else {}),
        "training": {
            "output_dir": str(output),
            "max_steps": 20,
            **({"tokens_per_batch": 4 * LENGTH // case.accumulation} if case.by_tokens else size),
            "gradient_accumulation_steps": case.accumulation,
            "learning_rate": 1e-3,
            "save_steps": 3,  # neither a multiple of logging_steps nor of an epoch
            "logging_steps": 2,
            "eval_steps": 4,
            "save_total_limit": 2,
            **({"load_best": True, "early_stopping_patience": 3} if case.load_best else {}),
        },
        "logging": {"progress": False},
    }
    path = room / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return load_config(path)


def sitting(loaded: Any, journal: Path, prepare: Callable[[], None]) -> int:
    """Forks a process that trains, and returns its id."""
    child = os.fork()
    if child:
        return child
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 99
    try:
        log.configure()
        slow_down()
        prepare()
        train_one(loaded)
        code = 0
    except HalftuneError as error:
        print(error, flush=True)
        code = error.exit_code
    finally:
        os._exit(code)


def slow_down() -> None:
    """Makes a step last ``PACE`` longer, so that kills do not all fall into the start; draws no plots."""
    LossPlot._draw = lambda *_: None  # type: ignore[method-assign]
    step = Stepper.step

    def slowly(self: Stepper, batches: Any) -> Any:
        time.sleep(PACE)
        return step(self, batches)

    Stepper.step = slowly  # type: ignore[method-assign]


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


def kill_after(child: int, seconds: float) -> bool:
    """Kills a process after a time; false where it had ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(min(0.002, seconds))
    return _kill(child)


def kill_in_save(child: int, folder: Path, nth: int, pause: float) -> bool:
    """Kills a process ``pause`` seconds after its ``nth`` half-written checkpoint has appeared."""
    seen: set[str] = set()
    while not os.waitpid(child, os.WNOHANG)[0]:
        seen |= {path.name for path in folder.glob(".checkpoint-*.writing")}
        if len(seen) >= nth:
            time.sleep(pause)
            return _kill(child)
        time.sleep(0.0002)
    return False


def _kill(child: int) -> bool:
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def outcome(folder: Path) -> dict[str, Any]:
    """What must be equal: bytes of the final weights and of the newest checkpoint's tensors, and the metrics."""
    newest = newest_valid(folder)
    assert newest is not None
    files = [*sorted((folder / "final").glob("*.safetensors")), *sorted(newest.glob("*.safetensors"))]
    found: dict[str, Any] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found["report.html"] = ">finished</b>" in (folder / "report.html").read_text(encoding="utf-8")
    found["metrics.jsonl"] = [{k: v for k, v in line.items() if k not in UNEQUAL} for line in lines]
    return found


def kill_and_compare(
    case: Case, room: Path, kills: int, seconds: float, numbers: random.Random, ways: Sequence[str]
) -> Iterator[str]:
    """Kills one run ``kills`` times and lets it finish; yields where each kill fell, then nothing if all is equal.

    The ways take turns, shuffled, but that those of the end come last: behind it there is nothing left to kill.

    Raises:
        SystemExit: says what differs or broke.
    """
    folder = room / case.name
    shutil.rmtree(folder, ignore_errors=True)
    loaded = recipe(case, room, folder)
    journal, known = room / f"{case.name}.log", -1
    order = [ways[turn % len(ways)] for turn in range(kills)]
    numbers.shuffle(order)
    for way in sorted(order, key="end".__eq__):
        place = _one_kill(loaded, way, journal, folder, seconds, numbers)
        yield place
        if place == FINISHED:
            break
        newest = newest_valid(folder) if folders(folder) else None
        now = -1 if newest is None else step_of(newest)
        if now < known:
            raise SystemExit(f"{case.name}: the newest valid checkpoint was {known} and is {now} after a kill")
        known = now
    child = sitting(loaded, journal, lambda: None)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise SystemExit(f"{case.name}: the last sitting left with {code}, see {journal}")
    whole, parts = outcome(room / f"{case.name}-whole"), outcome(folder)
    for name in sorted(whole.keys() | parts.keys()):
        if whole.get(name) != parts.get(name):
            raise SystemExit(f"{case.name}: {name} is not that of the uninterrupted run, see {folder} and {journal}")


def _one_kill(loaded: Any, way: str, journal: Path, folder: Path, seconds: float, numbers: random.Random) -> str:
    """A sitting that ends in a kill; where it finished first, it is taken as not killed."""
    if way in CALLS:
        child = sitting(loaded, journal, kill_at_call(numbers.randint(1, CALLS[way]), in_the_end=way == "end"))
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    else:
        child = sitting(loaded, journal, lambda: None)
        if way == "time":
            killed = kill_after(child, numbers.uniform(0.2, 0.8) * seconds)
        else:
            killed = kill_in_save(child, folder, numbers.randint(1, 2), numbers.uniform(0.0, 0.015))
    return f"{way}: {_place(folder)}" if killed else FINISHED


def _place(folder: Path) -> str:
    """Where a run was when it was killed, by what it has left."""
    if any(folder.glob(".checkpoint-*.writing")):
        return "a checkpoint half-written"
    if (folder / ".final.writing").exists():
        return "the result half-written"
    if (folder / "finished.json").exists():
        return "finished, in the report"
    if (folder / "final").exists():
        return "the result written, the run not finished"
    return "between saves" if folders(folder) else "before the first save"


def main() -> None:
    """Runs the matrix until enough kills have been made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of killing; all by default")
    parser.add_argument("--room", type=Path, help="keep everything in this folder (a temporary one by default)")
    options = parser.parse_args()
    numbers, began = random.Random(options.seed), time.monotonic()
    room = options.room or Path(tempfile.mkdtemp(prefix="kill-test-"))
    room.mkdir(parents=True, exist_ok=True)
    write_rows(room / "rows.jsonl")
    cases, places, killed = matrix(), Counter[str](), 0
    numbers.shuffle(cases)
    whole: dict[str, float] = {}  # name of a case → seconds of its uninterrupted run
    for case in itertools.cycle(cases):
        if killed >= options.kills:
            break
        if case.name not in whole:
            shutil.rmtree(room / f"{case.name}-whole", ignore_errors=True)
            loaded = recipe(case, room, room / f"{case.name}-whole")
            started = time.monotonic()
            child = sitting(loaded, room / f"{case.name}-whole.log", lambda: None)
            if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                raise SystemExit(f"{case.name}: the uninterrupted run left with {code}")
            whole[case.name] = time.monotonic() - started
        kills = min(KILLS_PER_RUN, options.kills - killed)
        found = Counter(kill_and_compare(case, room, kills, whole[case.name], numbers, options.ways))
        places += found
        killed += found.total() - found[FINISHED]
        print(f"{killed:4d} kills · {time.monotonic() - began:5.0f} s · {case.name}: bit-identical", flush=True)
    for place, count in sorted(places.items()):
        print(f"{count:4d}  {place}")
    if options.room is None:
        shutil.rmtree(room)
    sys.exit(0)


if __name__ == "__main__":
    main()
