"""Kills one of several processes with SIGKILL at random moments, goes on, and compares the end with an undisturbed run.

    python scripts/kill_ranks.py                    20 kills: FSDP2 full and LoRA, DDP
    python scripts/kill_ranks.py --kills 3 --case fsdp2-full --seed 3

A random rank is killed at a random time, in the middle of a save, or before one of its own system calls that write,
sync and rename a checkpoint; the others have to end by themselves. After every kill the newest checkpoint must be
valid in every byte, and no older than before. The last sitting may finish: final weights, the last checkpoint and the
metrics must be bit for bit those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import yaml
from kill_test import kill_at_call, outcome, slow_down, write_rows

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.core import log
from halftune.core.errors import HalftuneError
from halftune.hardware.probe import probe
from halftune.plan import resolve
from halftune.train.checkpoint_list import folders, newest_valid, step_of
from halftune.train.trainer import train

CASES: dict[str, dict[str, Any]] = {
    "fsdp2-full": {"adapter": "none", "distributed": {"strategy": "fsdp2"}},
    "fsdp2-lora": {"adapter": {"type": "lora", "rank": 4, "dropout": 0.1}, "distributed": {"strategy": "fsdp2"}},
    "ddp-full": {"adapter": "none", "distributed": {"strategy": "ddp"}},
}
KILLS_PER_RUN = 7
PATIENCE = 30.0  # seconds in which processes have to notice that another one is gone; torchrun gives them as many
FINISHED = "finished before it could be killed"


def recipe(case: str, room: Path, output: Path, processes: int) -> tuple[Any, Any]:
    """The loaded configuration and the plan of a case."""
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "data": {"train": str(room / "rows.jsonl"), "max_length": 48, "packing": True},
        "training": {
            "output_dir": str(output),
            "max_steps": 16,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "save_steps": 3,
            "logging_steps": 2,
            "save_total_limit": 2,
        },
        "logging": {"progress": False},
        **CASES[case],
    }
    path = room / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    loaded = load_config(path)
    return loaded, resolve(loaded.run, probe(), read_model_facts(loaded.run.model), world_size=processes)


def sitting(loaded: Any, plan: Any, journal: Path, prepare: Callable[[int], None]) -> list[int]:
    """Forks the processes of a run, rank by rank, and returns their ids."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return [_fork(rank, port, loaded, plan, journal, prepare) for rank in range(plan.batch.world_size)]


def _fork(rank: int, port: int, loaded: Any, plan: Any, journal: Path, prepare: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan.batch.world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    code = 99
    try:
        log.configure()
        slow_down()
        prepare(rank)
        train(loaded, plan)
        code = 0
    except HalftuneError as error:
        print(f"rank {rank}: {error}", flush=True)
        code = error.exit_code
    except RuntimeError:
        traceback.print_exc()  # what a lost process looks like where nobody sums up
        code = 5
    finally:
        os._exit(code)


def wait(children: Sequence[int], seconds: float) -> list[int | None]:
    """Exit codes of processes; None of those that do not end in time, which are killed."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(children) and time.monotonic() < deadline:
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in set(children) - codes.keys():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        codes[child] = None
    return [codes[child] for child in children]


def one_kill(loaded: Any, plan: Any, journal: Path, seconds: float, numbers: random.Random) -> str:
    """A sitting in which one process is killed; says which, when, and whether the others noticed."""
    folder = Path(loaded.run.training.output_dir)
    victim, way = numbers.randrange(plan.batch.world_size), numbers.choice(("time", "save", "call"))
    if way == "call":
        prepare = kill_at_call(numbers.randint(1, 60 if victim == 0 else 12))
        children = sitting(loaded, plan, journal, lambda rank: prepare() if rank == victim else None)
    else:
        children = sitting(loaded, plan, journal, lambda rank: None)
        until = time.monotonic() + numbers.uniform(0.2, 0.9) * seconds
        pause, nth, seen = numbers.uniform(0.0, 0.03), numbers.randint(1, 2), set[str]()
        while time.monotonic() < until if way == "time" else len(seen) < nth:
            seen |= {path.name for path in folder.glob(".checkpoint-*.writing")}
            if os.waitid(os.P_PID, children[victim], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.0005)
        if way == "save":
            time.sleep(pause)
        os.kill(children[victim], signal.SIGKILL)
    os.waitid(os.P_PID, children[victim], os.WEXITED | os.WNOWAIT)
    codes = wait(children, PATIENCE)
    if codes[victim] != -signal.SIGKILL:
        if set(codes) != {0}:
            raise SystemExit(f"nobody was killed and the processes left with {codes}, see {journal}")
        return FINISHED
    noticed = "the others noticed" if None not in codes else "another one had to be ended"
    left = ", a checkpoint half-written" if any(folder.glob(".checkpoint-*.writing")) else ""
    return f"rank {victim} by {way}: {noticed}{left}"


def whole(case: str, room: Path, processes: int) -> float:
    """Trains a case without a kill; returns how long it took."""
    folder = room / f"{case}-whole"
    loaded, plan = recipe(case, room, folder, processes)
    began = time.monotonic()
    codes = wait(sitting(loaded, plan, room / f"{folder.name}.log", lambda rank: None), 600.0)
    if set(codes) != {0}:
        raise SystemExit(f"{case}: the undisturbed run left with {codes}, see {room / folder.name}.log")
    return time.monotonic() - began


def kill_and_compare(
    case: str, room: Path, kills: int, seconds: float, processes: int, numbers: random.Random
) -> Counter[str]:
    """Kills one run so often and lets it finish; returns where the kills fell.

    Raises:
        SystemExit: says what is broken or differs.
    """
    folder, journal, known, places = room / case, room / f"{case}.log", -1, Counter[str]()
    shutil.rmtree(folder, ignore_errors=True)
    loaded, plan = recipe(case, room, folder, processes)
    for _ in range(kills):
        place = one_kill(loaded, plan, journal, seconds, numbers)
        places[place] += 1
        if place == FINISHED:
            break
        newest = newest_valid(folder) if folders(folder) else None
        now = -1 if newest is None else step_of(newest)
        if now < known or (folders(folder) and newest != folders(folder)[-1]):
            raise SystemExit(f"{case}: the newest checkpoint is not valid after a kill ({place}), see {folder}")
        known = now
    codes = wait(sitting(loaded, plan, journal, lambda rank: None), 600.0)
    if set(codes) != {0}:
        raise SystemExit(f"{case}: the last sitting left with {codes}, see {journal}")
    expected, found = outcome(room / f"{case}-whole"), outcome(folder)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise SystemExit(f"{case}: {name} is not that of the undisturbed run, see {folder} and {journal}")
    return places


def main() -> None:
    """Goes through the cases until enough kills have been made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=CASES, action="append", help="these cases only")
    parser.add_argument("--room", type=Path, help="keep everything in this folder (a temporary one by default)")
    options = parser.parse_args()
    numbers, began = random.Random(options.seed), time.monotonic()
    room = options.room or Path(tempfile.mkdtemp(prefix="kill-ranks-"))
    room.mkdir(parents=True, exist_ok=True)
    write_rows(room / "rows.jsonl")
    places, killed, lengths = Counter[str](), 0, dict[str, float]()
    for case in itertools.cycle(options.case or list(CASES)):
        if killed >= options.kills:
            break
        if case not in lengths:
            lengths[case] = whole(case, room, options.processes)
        kills = min(KILLS_PER_RUN, options.kills - killed)
        found = kill_and_compare(case, room, kills, lengths[case], options.processes, numbers)
        places += found
        killed += found.total() - found[FINISHED]
        print(f"{killed:4d} kills · {time.monotonic() - began:5.0f} s · {case}: bit-identical", flush=True)
    for place, count in sorted(places.items()):
        print(f"{count:4d}  {place}")
    if options.room is None:
        shutil.rmtree(room)
    sys.exit(0)


if __name__ == "__main__":
    main()
