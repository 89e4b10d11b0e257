"""Tasks of lm-evaluation-harness on a loaded model, under the plan of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets.exceptions import DatasetsError
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.initialization import no_tie_weights

from halftune.core.errors import ConfigError, DataError
from halftune.core.optional import need
from halftune.model.files.load_errors import first_line
from halftune.plan import Plan
from halftune.precision.dtypes import torch_dtype


@dataclass(frozen=True)
class TaskScore:
    """A number of a task.

    Attributes:
        value: as the harness gives it.
        error: its standard error, by the harness; None: it gives none.
        higher: whether a higher one is better.
    """

    value: float
    error: float | None
    higher: bool


class Harness:
    """Tasks by name, found before a model is loaded.

    Args:
        tasks: as of ``lm_eval --tasks``, patterns included.
        include: a folder with further tasks, as of ``lm_eval --include_path``; None: no others.
        limit: documents of each task; None: all.

    Raises:
        MissingPackageError: lm-evaluation-harness is not installed.
        ConfigError: a task does not exist.
        DataError: its data cannot be loaded.
    """

    def __init__(self, tasks: Sequence[str], include: Path | None = None, limit: int | None = None) -> None:
        self._lm_eval: Any = need("lm_eval", why="--tasks", distribution="lm-eval")
        self._models: Any = need("lm_eval.models.huggingface", why="--tasks", distribution="lm-eval")
        manager: Any = need("lm_eval.tasks", why="--tasks", distribution="lm-eval").TaskManager
        self._manager = manager(include_path=None if include is None else str(include))
        known = self._manager.match_tasks
        if unknown := [name for name in tasks if not known([name])]:
            what = f"lm-evaluation-harness has no task {unknown[0]!r}"
            remedy = "`lm-eval ls tasks` lists them; --include-path finds your own"
            raise ConfigError(what, where="--tasks", remedy=remedy, code="evaluate.unknown_task")
        self.tasks, self.limit = known(list(tasks)), limit
        try:  # before a model is loaded
            self._manager.load(self.tasks)
        except (OSError, ValueError, DatasetsError) as error:
            what = f"the data of a task cannot be loaded: {first_line(error)}"
            remedy = "load it once while online (HF_HUB_OFFLINE unset), or correct the task's YAML file"
            raise DataError(what, where="--tasks", remedy=remedy, code="evaluate.task_data") from error

    def scores(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, plan: Plan, rows: int
    ) -> dict[str, TaskScore]:
        """Scores by ``task/metric``, with the filter where the harness has several.

        Args:
            model: on its device, in evaluation mode.
            tokenizer: its tokenizer.
            plan: gives autocast's dtype.
            rows: of a forward pass.
        """
        causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        compute = torch_dtype(plan.precision.compute.value) if plan.precision.autocast.value else None
        with no_tie_weights():  # they are tied already, and trained copies by the adapter
            wrapped = self._models.HFLM(
                pretrained=causal,
                tokenizer=tokenizer,
                batch_size=rows,
                mixed_precision_dtype=compute,  # of the harness's own autocast, which switches off one around it
                softmax_dtype=torch.float32,  # as of each loss here; the harness's choice is that of the logits
            )
        found = self._lm_eval.simple_evaluate(
            model=wrapped, tasks=self.tasks, task_manager=self._manager, limit=self.limit, log_samples=False
        )
        return scores(found["results"], found["higher_is_better"])


def scores(results: dict[str, dict[str, Any]], higher: dict[str, dict[str, Any]]) -> dict[str, TaskScore]:
    """The numbers of ``results``: values have keys ``metric,filter``, their errors ``metric_stderr,filter``."""
    found = {}
    for task, numbers in results.items():
        for key, value in numbers.items():
            metric, comma, by = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = numbers.get(f"{metric}_stderr,{by}")
            name = f"{task}/{metric}" if by == "none" else f"{task}/{metric}/{by}"
            known = error if isinstance(error, int | float) else None
            found[name] = TaskScore(float(value), known, higher.get(task, {}).get(metric) is not False)
    return found
