"""Runs as users start them: by train, accelerate and torchrun, killed, brought back, on two machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from lines import foreign, told
from patience import LIMIT, until
from ports import port
from safetensors.torch import load_file

from halftune.core.status import read_status

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, "-m", "halftune", "train"]
# What a home folder may hold from another project: none of it may reach a run.
STRAY = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2},
    "dynamo_config": {"dynamo_backend": "INDUCTOR"},
}
# Found by every Python that is started with it, before halftune. With GATE, the processes of a run wait in step 9 until
# one of them hears a signal, so that whoever watches from outside is in time however busy the machine is. With HOLD,
# the main process waits in its report until it is killed.
WAITING = f"""
import os

if "RANK" in os.environ:
    import time

    from halftune.core.optional import quick_imports

    with quick_imports():
        from halftune.train.loop import stepper
        from halftune.train.signals.interrupt import Interrupts
        from halftune.train.report.page import Report

    step, hear, end, taken = stepper.start_step, Interrupts._note, Report.on_end, []
    gate, hold = os.environ.get("GATE"), os.environ.get("HOLD")
    latest = time.monotonic() + {LIMIT}

    def stepped(run, batches, **options):
        taken.append(1)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        while gate and first and len(taken) > 8 and not os.path.exists(gate) and time.monotonic() < latest:
            time.sleep(0.01)
        return step(run, batches, **options)

    def heard(self, number, frame):
        if gate:
            open(gate, "a").close()
        hear(self, number, frame)

    def report(self, run, error):
        if run.is_main and hold and not os.path.exists(hold):
            with open(hold, "x") as mark:
                print(os.getpid(), file=mark, flush=True)
                time.sleep({LIMIT})
        end(self, run, error)

    stepper.start_step, Interrupts._note, Report.on_end = stepped, heard, report
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a home in which accelerate finds a configuration."""
    place = tmp_path_factory.mktemp("with space")
    rows = "".join(f'{{"prompt": "{n} and {n}", "completion": "is {2 * n}"}}\n' for n in range(64))
    (place / "rows.jsonl").write_text(rows)
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 4, "dropout": 0.1},
        "data": {"train": str(place / "rows.jsonl"), "max_length": 64, "packing": False},
        "training": {"output_dir": "out", "max_steps": 40, "per_device_train_batch_size": 2, "save_steps": 5},
        "distributed": {"num_processes": 2, "timeout_seconds": LIMIT},
        "logging": {"progress": False},
    }
    (place / "a recipe.yaml").write_text(yaml.safe_dump(tree))
    stray = place / "home" / "accelerate" / "default_config.yaml"
    stray.parent.mkdir(parents=True)
    stray.write_text(yaml.safe_dump(STRAY))
    (place / "waiting").mkdir()
    (place / "waiting" / "sitecustomize.py").write_text(WAITING)
    return place


def waiting(place: Path, **variables: str) -> dict[str, str]:
    """The environment of a run that somebody is going to kill, with GATE or HOLD."""
    path = os.pathsep.join(filter(None, (str(place / "waiting"), os.environ.get("PYTHONPATH"))))
    return environment(place) | {"PYTHONPATH": path} | variables


def gate(place: Path, name: str) -> str:
    """A closed gate for a run."""
    path = place / f"{name}.gate"
    path.unlink(missing_ok=True)
    return str(path)


def environment(place: Path) -> dict[str, str]:
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own}


def arguments(place: Path, name: str, *more: str) -> list[str]:
    own = [f"training.output_dir={place / name}", f"distributed.main_process_port={port()}"]
    return ["--config", str(place / "a recipe.yaml"), *own, *more]


def run(place: Path, words: list[str], **more: str) -> None:
    done = subprocess.run(words, env=environment(place) | more, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def steps(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def start(place: Path, name: str, *more: str) -> subprocess.Popen[str]:
    """`train` of a run that somebody is going to end."""
    words, variables = [*TRAIN, *arguments(place, name, *more)], waiting(place, GATE=gate(place, name))
    return subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for(job: subprocess.Popen[str], there: Callable[[], bool], what: str) -> None:
    """Waits for something that a job does before it ends."""
    until(lambda: there() or job.poll() is not None, what)
    assert job.poll() is None, job.communicate(timeout=LIMIT)[1][-3000:]


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error, for as long as a process lives that has it as its own."""
    _, errors = job.communicate(timeout=LIMIT)
    return job.returncode, errors


def only(errors: str) -> list[str]:
    """The one line in which the launcher says how the run ended."""
    lines = told(errors)
    assert len(lines) == 1, errors[-3000:]
    return lines


def tell_rank_1(place: Path, name: str, number: signal.Signals, step: int, *more: str) -> tuple[int, str]:
    """Starts `train`, sends one of its processes a signal after a step, waits."""
    job = start(place, name, *more)
    wait_for(job, lambda: steps(place / name) >= step, f"step {step}")
    found = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, timeout=LIMIT)
    victims = [pid for pid in found.stdout.split() if "\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_text()]
    os.kill(int(victims[0]), number)
    return end(job)


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    """By torchrun itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port())]
    run(place, [*torchrun, "-m", "halftune", "train", *arguments(place, "undisturbed")])
    return place / "undisturbed"


def by_accelerate(place: Path, name: str) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    words = [*launch, "--main_process_port", str(port()), "-m", "halftune", "train", *arguments(place, name)]
    run(place, words, ACCELERATE_USE_CPU="true")


def test_a_job_that_is_ended_says_how_and_goes_on_by_accelerate(place: Path, undisturbed: Path) -> None:
    """One run: each launch goes on from what the one before has left."""
    name, folder = "ended", place / "ended"

    # A process is told to end: it is named, and the job is not started again, which is for failures.
    code, said = tell_rank_1(place, name, signal.SIGTERM, 7, "distributed.max_restarts=1")
    assert code == 143, said[-3000:]
    (line,) = only(said)
    assert "stopped by SIGTERM to rank 1 on " in line
    assert foreign(said) == []

    # A process is killed: one summary.
    code, said = tell_rank_1(place, name, signal.SIGKILL, steps(folder) + 2)
    assert code == 5
    (line,) = only(said)
    assert line.startswith("halftune: rank 1 on ")
    assert "was killed by SIGKILL" in line
    assert "Traceback" not in said
    assert "Root Cause" not in said

    by_accelerate(place, name)
    assert same(undisturbed, folder)


def test_processes_whose_launcher_is_killed_save_and_end(place: Path) -> None:
    folder, job = place / "orphans", start(place, "orphans")
    wait_for(job, lambda: steps(folder) >= 2, "two steps")
    job.kill()
    _, said = end(job)
    (line,) = only(said)
    assert "stopped by SIGTERM after step" in line
    assert list(folder.glob("checkpoint-*"))
    assert not (folder / "final").exists()


def test_the_main_process_is_killed_while_it_writes_its_report(place: Path, undisturbed: Path) -> None:
    """By the command that `launch` prints, run as it stands by a shell: it is started again."""
    name, mark = "reporting", place / "mark"
    words = arguments(place, name, "distributed.max_restarts=1")
    ask = [sys.executable, "-m", "halftune", "launch", "--dry-run", *words]
    done = subprocess.run(ask, env=environment(place), capture_output=True, text=True, check=True, timeout=LIMIT)
    variables = waiting(place, HOLD=str(mark))
    job = subprocess.Popen(["sh", "-c", done.stdout], env=variables, stderr=subprocess.PIPE, text=True)
    wait_for(job, lambda: mark.exists() and mark.read_text().endswith("\n"), "the report is begun")
    os.kill(int(mark.read_text()), signal.SIGKILL)
    code, errors = end(job)
    assert code == 0
    (line,) = only(errors)
    assert line.startswith("halftune: rank 0 on ")
    assert "was killed by SIGKILL" in line
    assert (place / name / "finished.json").exists()
    assert (place / name / "report.html").exists()
    status = read_status(place / name / "status.json")
    assert status is not None
    assert status.state == "finished"
    assert same(undisturbed, place / name)


def test_two_machines_come_back_by_themselves_and_end_with_the_weights_of_one(place: Path, undisturbed: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "two_machines.py"), "--kill", "7"]
    words = [*script, *arguments(place, "machines", "distributed.max_restarts=1")]
    variables = waiting(place, GATE=gate(place, "machines"))
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "killing process" in done.stdout
    assert "was killed by SIGKILL" in done.stderr
    assert "0 of 1 restarts left" in done.stderr
    assert "resuming from" in done.stderr
    assert same(undisturbed, place / "machines")
