"""Several processes that train, forked from the test's own: no start of Python, no import."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from patience import LIMIT
from torch._C._distributed_c10d import TCPStore

from halftune.train.callbacks.loss_plot import LossPlot
from halftune.train.trainer import train

Recipe = tuple[Any, Any]  # a loaded config and its plan


def in_processes(world_size: int, work: Callable[[int], None]) -> list[int]:
    """Runs ``work(rank)`` in so many processes that can meet; returns their exit codes.

    As a launcher does, the test's own process serves the store at which they meet, so that its port is free for sure;
    it does so after the fork, which knows no threads.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    children = [
        context.Process(target=_child, args=(rank, world_size, pipe, work)) for rank, (pipe, _) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, end in pipes:
        end.send(store.port)
    for child in children:
        child.join(2 * LIMIT)  # some train many runs
        if child.is_alive():
            child.kill()
            child.join()
    return [child.exitcode for child in children]


def _child(rank: int, world_size: int, pipe: Connection, work: Callable[[int], None]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": pipe.recv()}
    names |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test may have trained alone in the parent
    try:
        work(rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def train_all(recipes: Sequence[Recipe]) -> Callable[[int], None]:
    """Work that trains one recipe after the other, without drawings."""

    def work(_rank: int) -> None:
        LossPlot._draw = lambda *_: None  # type: ignore[method-assign,assignment]
        for loaded, plan in recipes:
            train(loaded, plan)

    return work


def curve(folder: str | Path, name: str = "loss") -> list[float]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
