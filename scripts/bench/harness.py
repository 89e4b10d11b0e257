"""What measurements share: recipes and plans, sides in turn, fresh processes, process groups, tables, the machine."""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "measurements"


def planned(
    tree: Mapping[str, Any],
    file: Path,
    hardware: str = "",
    processes: int = 1,
    packages: dict[str, str] | None = None,
) -> tuple[Any, Any]:
    """Writes a recipe to ``file``; the loaded configuration, and its plan for a catalogued machine or this one.

    ``packages``: further ones of the catalogued machine.
    """
    from halftune.config.load import load_config
    from halftune.config.recipe_facts import run_facts
    from halftune.hardware.catalogue import lookup
    from halftune.hardware.probe import probe
    from halftune.plan import resolve

    file.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    loaded = load_config(file)
    machine = lookup(hardware, packages) if hardware else probe()
    return loaded, resolve(loaded.run, machine, run_facts(loaded.run), world_size=processes)


def tiny_model(folder: Path, **changes: Any) -> None:
    """Writes the builtin tiny Qwen2 with other sizes and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from halftune.config.builtin_models import BUILTIN_MODELS
    from halftune.config.sections.model import ModelSection
    from halftune.model.files.architectures import no_progress_bars
    from halftune.model.tokenizer.tokenizer import load_tokenizer

    with no_progress_bars():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**BUILTIN_MODELS["qwen2-tiny"], **changes})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        load_tokenizer(ModelSection(name_or_path="builtin:qwen2-tiny")).save_pretrained(folder)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """What each side returns, round by round: whatever else the machine does falls on all of them."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm + rounds):
        for name, side in sides.items():
            value = side()
            if number >= warm:
                found[name].append(value)
    return found


def ratio(found: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """Median over the rounds of one side's value over another's."""
    return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))


def cpu_seconds(command: Sequence[str], folder: Path) -> float:
    """User and system time of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fresh(*words: object) -> dict[str, Any]:
    """Runs this script as ``--case WORDS`` in a process of its own; the JSON of its last line, or a ``note``."""
    command = [sys.executable, sys.argv[0], "--case", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"note": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def case() -> list[str] | None:
    """In a process that :func:`fresh` started, its words."""
    return sys.argv[2:] if sys.argv[1:2] == ["--case"] else None


def fork_ranks(processes: int, work: Callable[[int], int | None], journal: Path | None = None) -> list[int]:
    """Forks the processes of one run and returns their ids; each calls ``work(rank)`` and leaves with its result."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    children = []
    for rank in range(processes):
        if child := os.fork():
            children.append(child)
            continue
        if processes > 1:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
        code = 1
        try:
            if journal is not None:
                descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
            code = work(rank) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return children


def forked(processes: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(rank)`` returns in each of the forked processes of a run.

    Raises:
        SystemExit: one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = fork_ranks(processes, lambda rank: _answer(Path(folder), rank, work(rank)))
        if sum(os.waitpid(child, 0)[1] for child in children):  # waits for all of them
            raise SystemExit("a process failed")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(processes)]


def _answer(folder: Path, rank: int, value: Any) -> None:
    (folder / str(rank)).write_text(json.dumps(value))


def no_plots() -> None:
    """Training draws no loss plot in this process."""
    from halftune.train.callbacks.loss_plot import LossPlot

    LossPlot._draw = lambda *_: None  # type: ignore[method-assign,assignment]


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(first: str, *numbers: str) -> str:
    """The head of a Markdown table whose first column is text."""
    return f"{row(first, *numbers)}\n|---|{'---:|' * len(numbers)}"


def machine() -> str:
    """This machine and these versions in one line."""
    import torch

    from halftune import __version__
    from halftune.hardware.probe import probe

    hardware = probe()
    device = hardware.devices[0]
    # Ratios differ by instruction set, and one name stands for several processors.
    vectors = "avx512_bf16" if "avx512_bf16" in device.features else torch.backends.cpu.get_cpu_capability()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return (
        f"{device.name} ({vectors}), {hardware.cpu_cores} cores, {hardware.host_memory_bytes / 2**30:.0f} GiB, "
        f"{platform.system()}; Python {platform.python_version()}, {versions}; "
        f"halftune {__version__} at {commit.strip()}"
    )


def replace_section(page: Path, name: str, body: str) -> None:
    """Exchanges what stands between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        SystemExit: the page has no such section.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{page} has no section between {start} and {end}")
    page.write_text(f"{before}{start}\n{body}\n{end}{after}", encoding="utf-8")


def clock() -> float:
    """CPU-seconds of this process, all threads."""
    return time.process_time()
