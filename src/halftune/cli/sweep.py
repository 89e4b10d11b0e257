"""`train --sweep`: one recipe with several values of some keys, one run after the other."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.bench.table import aligned
from halftune.cli.overrides import load_from
from halftune.cli.preflight import check_inputs, check_outcome
from halftune.config.load import LoadedConfig
from halftune.config.reading.yaml_source import parse, read_text
from halftune.config.recipe_facts import model_facts
from halftune.config.tree import KeyPath, Tree
from halftune.core.atomic import whole_file, write_text
from halftune.core.errors import ConfigError, HalftuneError, TrainingError
from halftune.core.files import MOST_JSON, json_objects, read_json
from halftune.core.files import read_text as read_file
from halftune.hardware.probe import probe
from halftune.launch.command import processes
from halftune.plan import resolve
from halftune.train.run_folder.lock import check_unlocked, locked
from halftune.train.run_folder.start_or_resume import already_finished
from halftune.train.signals.interrupt import SWEEP as IN_SWEEP

SWEEP, TABLE, PLOT = "sweep.json", "sweep.csv", "sweep.png"
MOST = 1000  # trials
_FOLDER = "training.output_dir="
_INTERRUPTED = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)

Values = dict[str, Any]


@dataclass
class Trial:
    """A run of a sweep.

    Attributes:
        values: dotted key of the recipe → its value.
        loaded: the recipe with these values.
        words: arguments of ``train`` for it.
        state: ``finished``, ``failed``, ``stopped`` or ``waiting``.
        loss: the evaluation loss of the result, else the last training loss; NaN before the first step.
        seconds: of all steps.
    """

    values: Values
    loaded: LoadedConfig
    words: list[str]
    state: str = "waiting"
    loss: float = math.nan
    seconds: float = 0.0

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.loaded.run.training.output_dir)

    def read(self) -> None:
        """Take loss and time from the run's metrics."""
        training = self.loaded.run.training
        lines = _lines(self.folder / "metrics.jsonl")
        seconds, evaluated, trained = (
            [line[name] for line in lines if isinstance(line.get(name), float)]
            for name in ("seconds", training.metric_for_best, "loss")
        )
        self.seconds = sum(seconds)
        self.loss = (evaluated or trained or [math.nan])[-1]
        if training.load_best:
            self.loss = min((loss for loss in evaluated if not math.isnan(loss)), default=self.loss)


def run(args: argparse.Namespace) -> int:
    """Train the missing trials of a sweep, and write its table and plot.

    Raises:
        ConfigError: the sweep or a trial is invalid, or the folder belongs to another sweep.
        HalftuneError: a trial cannot run on this machine.
        TrainingError: trials failed.
    """
    path = Path(args.sweep)
    tree = parse(read_text(path), str(path))
    every = _values(tree)
    folder = Path(load_from(args).run.training.output_dir)
    check_unlocked(folder)
    _check_folder(folder, every)
    trials = [_trial(args, folder, number, values) for number, values in enumerate(every, start=1)]
    for trial in trials:
        try:
            _check(trial)
        except HalftuneError:
            print(f"{trial.folder.name} ({_shown(trial.values)}):", file=sys.stderr)
            raise
    with locked(folder):
        _check_folder(folder, every)  # another sweep may have begun during the checks
        write_text(folder / SWEEP, json.dumps(every, indent=1))
        return _train_all(folder, trials)


def _train_all(folder: Path, trials: list[Trial]) -> int:
    """Train the trials that wait, one after the other; the exit code.

    Raises:
        TrainingError: trials failed.
    """
    for number, trial in enumerate(trials, start=1):
        code = 0
        if trial.state == "waiting":
            print(f"\ntrial {number} of {len(trials)}: {_shown(trial.values)}", flush=True)
            code = _run_trial(trial)
        trial.read()
        if code:
            _report(folder, trials)
            print("\nthe same command goes on")
            return code
    _report(folder, trials)
    if failed := [trial for trial in trials if trial.state == "failed"]:
        what = f"{len(failed)} of {len(trials)} trials failed: {', '.join(one.folder.name for one in failed)}"
        raise TrainingError(what, remedy="the same command tries them again", code="train.trials_failed")
    return 0


def _run_trial(trial: Trial) -> int:
    """Train a trial and set its state; the exit code of an interruption, else 0."""
    ended, signalled = _train(trial)
    code = signalled or (ended if ended in _INTERRUPTED else 0)
    trial.state = "finished" if ended == 0 else "stopped" if code else "failed"
    return code


def _values(tree: Tree) -> list[Values]:
    """The values of each trial: all combinations, or ``samples`` random ones.

    Raises:
        ConfigError: the file is not a sweep.
    """
    given, samples = tree.values, tree.values.get("samples")
    keys = _keys(tree)
    for key, one in keys.items():
        _check_range(tree, key, one, random_values=samples is not None)
    if (samples or math.prod(map(len, keys.values()))) > MOST:
        raise _wrong(tree, ("keys",), f"more than {MOST:,} trials", "use samples: 20")
    if samples is None:
        return [dict(zip(keys, one, strict=True)) for one in itertools.product(*keys.values())]
    draw = random.Random(given.get("seed", 0))
    return [{key: _drawn(one, draw) for key, one in keys.items()} for _ in range(samples)]


def _keys(tree: Tree) -> dict[str, Any]:
    """The keys to change: each a list or a range.

    Raises:
        ConfigError: there are none, or another value of the file is invalid.
    """
    given = tree.values
    for key in given.keys() - {"keys", "samples", "seed"}:
        raise _wrong(tree, (key,), "unknown key", "a sweep has keys, samples and seed")
    keys = given.get("keys")
    if not isinstance(keys, dict) or not keys:
        raise _wrong(tree, ("keys",) if "keys" in given else (), "names no keys to change", "see docs/how-to/sweep.md")
    for name, least in (("samples", 1), ("seed", 0)):
        value = given.get(name, 1)
        if type(value) is not int or value < least:
            raise _wrong(tree, (name,), f"expected a whole number, got {value!r}", "")
    return keys


def _check_range(tree: Tree, key: str, values: Any, *, random_values: bool) -> None:
    path = ("keys", key)
    if values == []:
        raise _wrong(tree, path, "an empty list", "list the values to try")
    if isinstance(values, list):
        return
    if not isinstance(values, dict) or not {"min", "max"} <= values.keys() <= {"min", "max", "log"}:
        raise _wrong(tree, path, "expected a list of values", "with samples, {min: …, max: …, log: true} works too")
    if not random_values:
        raise _wrong(tree, path, "a range needs random values", "set samples, or list the values to try")
    if not _is_range(values["min"], values["max"], log=values.get("log")):
        raise _wrong(tree, path, "expected numbers with min below max, above 0 with log", "")


def _is_range(low: Any, high: Any, *, log: Any) -> bool:
    return _is_number(low) and _is_number(high) and low < high and not (log and low <= 0)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _drawn(one: Any, draw: random.Random) -> Any:
    """A value of a list, or of a range: whole if both ends are; others with 4 significant digits."""
    if isinstance(one, list):
        return draw.choice(one)
    low, high = one["min"], one["max"]
    if one.get("log"):
        value = math.exp(draw.uniform(math.log(low), math.log(high)))
        return round(value) if isinstance(low, int) and isinstance(high, int) else float(f"{value:.4g}")
    if isinstance(low, int) and isinstance(high, int):
        return draw.randint(low, high)
    return float(f"{draw.uniform(low, high):.4g}")


def _wrong(tree: Tree, path: KeyPath, what: str, remedy: str) -> ConfigError:
    return ConfigError([tree.problem(path, what, remedy, code="config.bad_sweep")])


def _check_folder(folder: Path, every: list[Values]) -> None:
    """Refuse a folder with another sweep."""
    try:
        before = read_json(folder / SWEEP, MOST_JSON)
    except (OSError, ValueError):
        return
    if before != json.loads(json.dumps(every)):
        remedy = "use another training.output_dir, or the sweep file as it was"
        raise ConfigError("holds another sweep", where=str(folder), remedy=remedy, code="config.another_sweep")


def _trial(args: argparse.Namespace, folder: Path, number: int, values: Values) -> Trial:
    """A trial and its recipe.

    Raises:
        ConfigError: the recipe is not valid with these values.
    """
    changes = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    changes.append(f"{_FOLDER}{json.dumps(str(folder / f'trial-{number:03}'))}")
    overrides, given = ([one for one in words if not one.startswith(_FOLDER)] for words in (args.overrides, args.set))
    made = argparse.Namespace(**{**vars(args), "overrides": overrides, "set": [*given, *changes]})
    words = ["--config", args.config, *overrides]
    for one in made.set:
        words += ["--set", one]
    return Trial(values, load_from(made), words)


def _check(trial: Trial) -> None:
    """Check before the first trial what would stop this one, and whether it is finished.

    Raises:
        HalftuneError: it cannot run.
    """
    check_unlocked(trial.folder)  # its run may have survived a sweep that was killed
    if already_finished(trial.loaded):
        trial.state = "finished"
        return
    facts, hardware = model_facts(trial.loaded), probe()
    plan = resolve(trial.loaded.run, hardware, facts, world_size=processes(trial.loaded.run, hardware))
    check_outcome(trial.loaded, plan.memory)
    check_inputs(trial.loaded, facts)


def _train(trial: Trial) -> tuple[int, int]:
    """Train in a process of its own; its exit code, and 128 + the number of a signal that came meanwhile, else 0.

    The signal is passed on, so that the run ends with a checkpoint. The process has a process group of its own: one
    signal from a terminal reaches it once.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        if child is not None:
            child.send_signal(number)

    kinds = [signal.Signals(code - 128) for code in _INTERRUPTED]
    before = {kind: found for kind in kinds if (found := signal.getsignal(kind)) != signal.SIG_IGN}
    for kind in before:
        signal.signal(kind, pass_on)
    try:
        words = [sys.executable, "-m", "halftune", "train", *trial.words]
        child = subprocess.Popen(words, env={**os.environ, IN_SWEEP: "1"}, process_group=0)
        if received:  # while it was starting
            child.send_signal(received[0])
        code = child.wait()
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    return 128 - code if code < 0 else code, 128 + received[0] if received else 0


def _report(folder: Path, trials: list[Trial]) -> None:
    """Print the trials, the best first, and write them as a table and a plot."""
    order = sorted(trials, key=lambda trial: (math.isnan(trial.loss), trial.loss))
    known = [trial for trial in order if not math.isnan(trial.loss)]
    keys = list(trials[0].values)
    rows = [_row(trial) for trial in order]
    header = ["trial", *keys, "loss", "seconds", "state"]
    with whole_file(folder / TABLE) as beside, beside.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([header, *rows])
    print("", *aligned([header, *rows]), sep="\n")
    if known:
        _draw(folder / PLOT, known, keys)
    if best := next((trial for trial in known if trial.state == "finished"), None):
        print(f"\nbest: {best.folder} ({_shown(best.values)})")
    print(f"table: {folder / TABLE}")


def _row(trial: Trial) -> list[str]:
    loss = "" if math.isnan(trial.loss) else f"{trial.loss:.4f}"
    return [trial.folder.name, *map(_word, trial.values.values()), loss, f"{trial.seconds:.1f}", trial.state]


def _draw(path: Path, trials: list[Trial], keys: list[str]) -> None:
    """A panel per key: the loss over its values."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 3.5 * len(keys), 3.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    panels[0].set_ylabel("loss")
    for axes, key in zip(panels, keys, strict=True):
        values = [trial.values[key] for trial in trials]
        numbers = all(map(_is_number, values))
        places = values if numbers else [_word(value) for value in values]
        axes.plot(places, [trial.loss for trial in trials], "o", markersize=5)
        if numbers and min(values) > 0 and max(values) >= 10 * min(values):
            axes.set_xscale("log")
        axes.set_xlabel(key, parse_math=False)
    with whole_file(path) as beside:
        figure.savefig(beside, format="png")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    try:
        return list(json_objects(read_file(path).splitlines()))
    except OSError:
        return []


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shown(values: Values) -> str:
    return ", ".join(f"{key}={_word(value)}" for key, value in values.items())
