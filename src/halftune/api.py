"""halftune from Python: load a recipe, plan it, train it, use the result. Checks and locks are those of the commands.

Importing it imports no torch; planning needs none.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halftune.cli.verbs.train import checked, in_order
from halftune.config import load as loading
from halftune.config.load import LoadedConfig
from halftune.config.recipe_facts import model_facts
from halftune.core.atomic import write_text
from halftune.core.errors import ConfigError, HalftuneError
from halftune.core.files import cache_dir
from halftune.core.run_metrics import read_metrics
from halftune.hardware.catalogue import lookup
from halftune.hardware.probe import probe
from halftune.launch.command import processes, world_size
from halftune.plan import Plan, resolve

if TYPE_CHECKING:
    import pandas

    from halftune.infer.session import ChatSession
    from halftune.train.callback import Callback

__all__ = ["HalftuneError", "Plan", "Result", "load_config", "open_result", "plan", "train"]

Recipe = str | os.PathLike[str] | Mapping[str, Any]
Rows = Iterable[Mapping[str, Any]]


def load_config(recipe: Recipe, *overrides: str, rows: Rows | None = None) -> LoadedConfig:
    """Load and validate a recipe.

    Args:
        recipe: a YAML file, or its content as a mapping. In a mapping, ``method.rewards`` may hold functions that are
            defined at the top of a Python file.
        overrides: ``"training.learning_rate=1e-4"`` …, which override the recipe.
        rows: in place of ``data.train``: dicts, or a ``datasets.Dataset``. They are kept in halftune's cache.

    Raises:
        ConfigError: contains every problem found.
    """
    changes = list(overrides)
    if rows is not None:
        lines = "".join(map(_line, itertools.count(), rows))
        if not lines:
            raise ConfigError("there are no rows", where="rows", code="data.empty")
        changes.append(f"data.train={json.dumps(str(_kept(lines, 'rows', '.jsonl')))}")
    if isinstance(recipe, Mapping):
        text = json.dumps(_with_files(recipe), indent=1, ensure_ascii=False)  # JSON is YAML
        recipe = _kept(text, "recipes", ".yaml")
    return loading.load_config(recipe, changes)


def _line(number: int, row: Any) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        what = f"no mapping of texts, numbers and lists: {error}"
        raise ConfigError(what, where=f"rows[{number}]", code="data.malformed_row") from error


def plan(config: LoadedConfig | Recipe, *, hardware: str | None = None) -> Plan:
    """Decide everything about a run, with reasons; ``print`` shows the table of ``halftune plan``.

    Args:
        config: from :func:`load_config`, or what it takes.
        hardware: a machine of the catalogue, as ``t4`` or ``a100x8``; default this one.

    Raises:
        HalftuneError: the machine cannot honour the recipe.
    """
    loaded = config if isinstance(config, LoadedConfig) else load_config(config)
    machine = probe() if hardware is None else lookup(hardware, {})
    return resolve(loaded.run, machine, model_facts(loaded), world_size=world_size(loaded.run, machine))


def train(config: LoadedConfig | Recipe, *, callbacks: Sequence[Callback] = (), show_plan: bool = False) -> Result:
    """Train in this process, after all recipes that this one depends on; resume if its folder holds checkpoints.

    Args:
        config: from :func:`load_config`, or what it takes.
        callbacks: objects of your subclasses of ``halftune.train.callback.Callback``, called after the built-in
            ones.
        show_plan: whether to print the plan first.

    Raises:
        HalftuneError: what ``halftune train`` would end with; earlier checkpoints are intact.
    """
    loaded = config if isinstance(config, LoadedConfig) else load_config(config)
    if (count := processes(loaded.run, probe())) > 1:
        what = f"{count} processes are planned; Python starts none"
        remedy = "use halftune train, or set distributed.num_processes: 1"
        raise ConfigError(what, where="distributed.num_processes", remedy=remedy, code="cli.several_processes")
    for each in in_order(loaded):
        with checked(each, show=show_plan) as start:
            if start is not None:
                start(callbacks=callbacks if each is loaded else ())
    return open_result(loaded.run.training.output_dir)


def open_result(folder: str | os.PathLike[str]) -> Result:
    """The result of a finished run's folder.

    Raises:
        HalftuneError: there is none.
    """
    from halftune.model.result.completed_run import open_run

    return Result(open_run(str(folder)).folder.absolute())


@dataclass
class Result:
    """The result of a run.

    Attributes:
        folder: the run folder: checkpoints, ``metrics.jsonl``, ``report.html``, and the result in ``final``.
    """

    folder: Path
    _session: ChatSession | None = field(default=None, repr=False, compare=False)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every line of ``metrics.jsonl``: a step or an evaluation each."""
        return list(read_metrics(self.folder))

    def frame(self) -> pandas.DataFrame:
        """The metrics as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.metrics)

    def chat(self, text: str, *, base: bool = False) -> str:
        """The answer to one message, by the trained model or by its base; the model is loaded once.

        Raises:
            HalftuneError: this machine cannot run it, or it is a reward model.
        """
        from halftune.infer.session import open_session
        from halftune.model.result.completed_run import open_run

        if self._session is None:
            self._session = open_session(open_run(str(self.folder)))
        return self._session.answer(text, tuned=not base)

    def export(
        self,
        output: str | os.PathLike[str],
        *,
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        force: bool = False,
    ) -> Path:
        """Write a plain model with its tokenizer, an adapter merged into its base and verified.

        Args:
            output: the folder.
            dtype: of the weights; default that of the base checkpoint.
            force: replace an earlier export in ``output``.

        Raises:
            HalftuneError: the merged model's logits differ, or the folder cannot be written.
        """
        from halftune.export.merged import export_run
        from halftune.model.result.completed_run import open_run

        return export_run(open_run(str(self.folder)), Path(output), dtype, force=force).folder


def _kept(text: str, kind: str, ending: str) -> Path:
    """A file of this content in the cache: the same content has the same path, so that a run can resume."""
    path = cache_dir() / kind / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}{ending}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return path


def _with_files(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with the places of reward functions in place of themselves."""
    method = recipe.get("method")
    if not isinstance(method, Mapping) or not isinstance(method.get("rewards"), (list, tuple)):
        return dict(recipe)
    rewards = [_place(one) if callable(one) else one for one in method["rewards"]]
    return {**recipe, "method": {**method, "rewards": rewards}}


def _place(function: Callable[..., Any]) -> dict[str, str]:
    """File and name of a function.

    Raises:
        ConfigError: it is not at the top level of a file.
    """
    name, file = getattr(function, "__qualname__", ""), inspect.getsourcefile(inspect.unwrap(function))
    if not name.isidentifier() or file is None or not os.path.isfile(file):
        what = f"the reward function {name or function!r} is not defined at the top of a file"
        remedy = "write it to a Python file: runs resume with the same functions only"
        raise ConfigError(what, where="method.rewards", remedy=remedy, code="config.bad_reward")
    return {"function": name, "file": os.path.abspath(file)}
