"""`train --sweep`: values of trials, what is refused, and a sweep that is stopped and goes on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT, until

from halftune.cli import sweep, train_main
from halftune.cli.sweep import SWEEP, TABLE, Trial, _run_trial, _values
from halftune.config.load import load_config
from halftune.config.reading.yaml_source import parse
from halftune.core.errors import ConfigError
from halftune.plan.duration import Pace, pace_of
from halftune.train.run_folder.lock import locked

RECIPE = {
    "model": {"name_or_path": "builtin:qwen2-tiny"},
    "data": {"train": "builtin:number-formats", "max_length": 64},
    "training": {"output_dir": "all", "max_steps": 2, "per_device_train_batch_size": 1, "save_steps": 1},
}


def values(text: str) -> list[dict[str, Any]]:
    return _values(parse(text, "sweep.yaml"))


def test_a_grid_holds_every_combination() -> None:
    found = values("keys: {adapter.rank: [4, 8], precision: [bf16, fp32, auto]}")
    assert len({json.dumps(one) for one in found}) == len(found) == 6


def test_random_values_are_in_range_and_the_same_for_a_seed() -> None:
    text = "keys: {a: {min: 1.0e-5, max: 1.0e-1, log: true}, b: {min: 2, max: 64, log: true}, "
    text += "c: {min: 0, max: 3}, d: [x, y]}"
    found = values(f"samples: 200\nseed: 3\n{text}")
    assert found == values(f"samples: 200\nseed: 3\n{text}") != values(f"samples: 200\nseed: 4\n{text}")
    below = [one["a"] < 1e-3 for one in found]  # the middle of the logarithms
    assert 60 < sum(below) < 140
    assert all(1e-5 <= one["a"] <= 1e-1 and isinstance(one["b"], int) and 2 <= one["b"] <= 64 for one in found)
    assert {one["c"] for one in found} == {0, 1, 2, 3}
    assert {one["d"] for one in found} == {"x", "y"}


@pytest.mark.parametrize(
    "text",
    [
        "samples: 3",
        "keys: {}",
        "keys: [a]",
        "keys: {a: 1}",
        "keys: {a: []}",
        "keys: {a: {min: 1, max: 2}}",
        "samples: 2\nkeys: {a: {min: 2, max: 1}}",
        "samples: 2\nkeys: {a: {min: 0, max: 1, log: true}}",
        "samples: 2\nkeys: {a: {min: x, max: y}}",
        "samples: 0\nkeys: {a: [1]}",
        "samples: true\nkeys: {a: [1]}",
        "seeds: 1\nkeys: {a: [1]}",
        f"keys: {{a: {list(range(40))}, b: {list(range(40))}}}",
        f"keys: {{{', '.join(f'{key}: {list(range(100))}' for key in 'abcdefgh')}}}",  # 10^16, counted, not listed
    ],
)
def test_what_is_no_sweep(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        values(text)
    assert refused.value.code == "config.bad_sweep"


@pytest.mark.parametrize(
    ("sweep", "more", "code"),
    [
        ("keys: {adapter.bogus: [1]}", (), "config.unknown_key"),
        ("keys: {training.learning_rate: [1.0e-3, fast]}", (), "config.invalid_value"),
        ("keys: {adapter.rank: [4]}", ("--print-config",), "cli.option_conflict"),
    ],
)
def test_nothing_begins_if_a_trial_cannot(
    sweep: str, more: tuple[str, ...], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(json.dumps(RECIPE))
    Path("sweep.yaml").write_text(sweep)
    monkeypatch.setattr(sys, "argv", ["train", "--config", "recipe.yaml", "--sweep", "sweep.yaml", *more])
    assert train_main() == 2
    assert f"[{code}]" in capsys.readouterr().err
    assert not Path("all").exists()


@pytest.mark.parametrize("taken", ["all", "all/trial-002"])  # by a sweep, or by a run that survived one
def test_a_folder_in_use(taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(json.dumps(RECIPE))
    Path("sweep.yaml").write_text("keys: {adapter.rank: [4, 8]}")
    monkeypatch.setattr(sys, "argv", ["train", "--config", "recipe.yaml", "--sweep", "sweep.yaml"])
    Path("all").mkdir()
    with locked(Path(taken)):
        assert train_main() == 2
    assert "[train.folder_locked]" in capsys.readouterr().err
    assert not Path("all", SWEEP).exists()


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({}, 3.0),
        ({"load_best": True}, 2.0),
        ({"metric_for_best": "eval_loss_b"}, 5.0),
        ({"metric_for_best": "eval_loss_b", "load_best": True}, 4.0),
    ],
)
def test_the_loss_is_that_of_the_result(options: dict[str, Any], loss: float, tmp_path: Path) -> None:
    sources = [{"path": "builtin:number-formats-test", "name": name} for name in "ab"]
    recipe = {**RECIPE, "data": {**RECIPE["data"], "eval": sources}}
    recipe["training"] = {**RECIPE["training"], "output_dir": str(tmp_path), "eval_steps": 1, **options}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    losses = [
        {"loss": 9.0},
        {"eval_loss": 2.0, "eval_loss_b": 4.0},
        {"loss": 8.0},
        {"eval_loss": 3.0, "eval_loss_b": 5.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in losses))
    trial = Trial({}, load_config(tmp_path / "recipe.yaml"), [])
    trial.read()
    assert trial.loss == loss


def test_lines_that_are_no_metrics_are_left_out(tmp_path: Path) -> None:
    recipe = {**RECIPE, "training": {**RECIPE["training"], "output_dir": str(tmp_path)}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    lines = ['{"loss": 2.5, "seconds": 0.5}', "[" * 100_000, '{"seconds": "x", "loss": "y"}', "3", "\ufffd", '{"lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    trial = Trial({}, load_config(tmp_path / "recipe.yaml"), [])
    trial.read()
    assert (trial.loss, trial.seconds) == (2.5, 0.5)
    assert pace_of([*lines, '{"seconds": "x", "tokens": 3}', '{"seconds": 1, "tokens": NaN}']) is None
    assert pace_of([*lines, '{"seconds": 0.5, "tokens": 10, "epoch": "a", "step": []}']) == Pace(20.0, 10, None)


def test_a_signal_ends_the_sweep_also_where_its_trial_still_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on = list[signal.Signals]()

    class Child:
        """A trial that was done when the signal came."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def send_signal(self, number: signal.Signals) -> None:
            passed_on.append(number)

        def wait(self) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sweep.subprocess, "Popen", Child)
    nothing: Any = None
    trial = Trial({}, nothing, [])
    assert (_run_trial(trial), trial.state, passed_on) == (143, "finished", [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) == before


# In the processes of a sweep: the third step begins when the signal has come, however quick the machine is.
SITE = """
import importlib.util, sys, time


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "halftune.train.loop.stepper":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader.exec_module = lambda module, load=spec.loader.exec_module: (load(module), wait_in(module))
        return spec


def wait_in(stepper):
    from halftune.train.signals.interrupt import Interrupts

    step, note, taken, received = stepper.start_step, Interrupts._note, [], []
    Interrupts._note = lambda *arguments: (note(*arguments), received.append(1))

    def waiting(*arguments, **options):
        taken.append(1)
        while len(taken) == 3 and not received:
            time.sleep(0.01)
        return step(*arguments, **options)

    stepper.start_step = waiting


sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    training = {**RECIPE["training"], "max_steps": 40, "save_steps": 20, "logging_steps": 1}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**RECIPE, "training": training}))
    (tmp_path / "sweep.yaml").write_text("keys: {training.learning_rate: [1.0e-3, 1.0e-30]}")
    command = [sys.executable, "-m", "halftune", "train", "--config", "recipe.yaml", "--sweep", "sweep.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    first = tmp_path / "all" / "trial-001"
    catch = partial(signal.signal, number, signal.SIG_DFL)  # a shell's background jobs ignore SIGINT
    (site := tmp_path / "site").mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    found = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(command, cwd=tmp_path, env=environment | {"PYTHONPATH": found}, preexec_fn=catch)
    try:
        until(lambda: len(steps(first)) == 2 or child.poll() is not None, "the first trial takes two steps")
        child.send_signal(number)
        assert child.wait(LIMIT) == 128 + number
    finally:
        child.kill()
    assert states(tmp_path) == {"trial-001": "stopped", "trial-002": "waiting"}
    assert steps(first) in ([1, 2], [1, 2, 3])  # the signal may come before the third step begins
    if number == signal.SIGINT:
        return  # what follows has one way
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert list(states(tmp_path).items()) == [("trial-001", "finished"), ("trial-002", "finished")]  # the better first
    assert steps(first) == list(range(1, 41))
    written = (first / "final" / "adapter_model.safetensors").stat().st_mtime_ns
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (first / "final" / "adapter_model.safetensors").stat().st_mtime_ns == written
    (tmp_path / "sweep.yaml").write_text("keys: {training.learning_rate: [1.0e-3]}")
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == 2  # another sweep


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []  # not one that is being written
    return [json.loads(line)["step"] for line in lines]


def states(folder: Path) -> dict[str, str]:
    with (folder / "all" / TABLE).open() as table:
        return {row["trial"]: row["state"] for row in csv.DictReader(table)}
