"""Opens what is evaluated: a run, one of its checkpoints, or a plain model or adapter. Weights are not read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halftune.core.errors import ConfigError, ModelError
from halftune.model.files.result import FINAL
from halftune.model.result.completed_run import CompletedRun
from halftune.train.checkpoint.open_target import open_target


@dataclass(frozen=True)
class Target:
    """A model to evaluate.

    Attributes:
        name: of its column.
        path: of its files; of a checkpoint, whose result is a temporary folder: as given.
        run: the run, or a plain model as if a run had left it.
        trained_here: whether it is a run's result, which has data of its own.
        base: whether its base model is evaluated, too.
    """

    name: str
    path: str
    run: CompletedRun
    trained_here: bool
    base: bool


def open_targets(
    given: Sequence[str], overrides: Sequence[str], scratch: Path, *, base: bool | None
) -> tuple[Target, ...]:
    """Open the models of a command line, each under the plan of its run on this machine.

    Args:
        given: run folders, recipes, checkpoints, model folders, adapter folders or hub ids.
        overrides: ``key=value`` changes to the configuration of each.
        scratch: a folder where the results of checkpoints are written.
        base: whether base models are evaluated too; None: those of adapters.

    Raises:
        ModelError: one is a reward model, or cannot be found or planned.
        ConfigError: a plain model has no base to evaluate.
    """
    names = [_short(one) for one in given]
    found = []
    for number, (one, short) in enumerate(zip(given, names, strict=True)):
        run, trained_here = open_target(one, overrides, scratch / str(number), packed=True, named=True)
        if run.plan.method.head.value == "score":
            what = "the result is a reward model, which scores answers and predicts no tokens"
            remedy = "evaluate a model that was trained with another method"
            raise ModelError(what, where=one, remedy=remedy, code="infer.reward_model")
        if base and not (run.is_adapter or trained_here):
            what, remedy = "a plain model has no base model that is known", "name the base model itself, without --base"
            raise ConfigError(what, where=one, remedy=remedy, code="evaluate.no_base")
        name = one if names.count(short) > 1 else short
        path = one if scratch in run.final.parents else str(run.final)
        found.append(Target(name, path, run, trained_here, run.is_adapter if base is None else base))
    return tuple(found)


def _short(target: str) -> str:
    path = Path(os.path.abspath(os.path.expanduser(target)))
    return (path.parent if path.name == FINAL else path).name
