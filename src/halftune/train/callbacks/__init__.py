"""Everything periodic in a run, one file each. This table names them; nothing is imported until a run chooses it.

In: a run's state at every event.
Out: files and lines; a reason to stop.
Imported by: `train.checkpoint`, `train.trainer`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from halftune.core.table import load

if TYPE_CHECKING:
    from halftune.config.run import RunConfig
    from halftune.plan import Plan
    from halftune.train.callback import Callback

CALLBACKS: dict[str, str] = {
    "progress_bar": "halftune.train.callbacks.status:ProgressBar",
    "progress_lines": "halftune.train.callbacks.status:ProgressLines",
    "nonfinite": "halftune.train.loop.nonfinite:NonFiniteWatch",
    "dtype_guard": "halftune.train.callbacks.dtype_guard:DtypeGuard",
    "environment": "halftune.train.callbacks.environment:Environment",
    "metrics": "halftune.train.callbacks.metrics:MetricsFile",
    "samples": "halftune.train.callbacks.samples:Samples",
    "rollouts": "halftune.train.callbacks.rollouts:RolloutsFile",
    "tensorboard": "halftune.train.callbacks.trackers.tensorboard:TensorBoard",
    "wandb": "halftune.train.callbacks.trackers.wandb:WeightsAndBiases",
    "mlflow": "halftune.train.callbacks.trackers.accelerate:MLflow",
    "swanlab": "halftune.train.callbacks.trackers.accelerate:SwanLab",
    "trackio": "halftune.train.callbacks.trackers.accelerate:Trackio",
    "early_stopping": "halftune.train.callbacks.early_stopping:EarlyStopping",
    "high_loss": "halftune.train.callbacks.high_loss:HighLoss",
    "profile": "halftune.train.callbacks.profile.profile:Profile",
    "adapter_effect": "halftune.train.callbacks.adapter_effect:AdapterEffect",
    "loss_plot": "halftune.train.callbacks.loss_plot:LossPlot",
    "report": "halftune.train.report.page:Report",
    "status": "halftune.train.callbacks.status:StatusLine",
}


def build(config: RunConfig, plan: Plan) -> list[Callback]:
    """The callbacks of a run, in the order in which they are called: what reads files comes after what writes them."""
    return [load(CALLBACKS, name, kind="callback")(**arguments) for name, arguments in chosen(config, plan).items()]


def chosen(config: RunConfig, plan: Plan) -> dict[str, dict]:
    """Name of each callback that a configuration asks for → arguments that it is made with."""
    training, logging = config.training, config.logging
    every = {"every": training.logging_steps}
    terminal = sys.stderr.isatty()
    names: dict[str, dict] = {"progress_bar": {}} if logging.progress and terminal else {}
    names["progress_lines"] = {**every, "shown": logging.progress and not terminal}
    if plan.precision.grad_scaler.value or training.on_non_finite == "skip":
        names["nonfinite"] = {}
    names |= {"dtype_guard": {}, "environment": {}, "metrics": every}
    if logging.sample_prompts:
        names["samples"] = {}
    if config.method.generates:
        names["rollouts"] = every
    names |= dict.fromkeys(logging.report_to, every)
    if training.early_stopping_patience is not None:
        names["early_stopping"] = {"patience": training.early_stopping_patience}
    if training.stop_above_loss is not None:
        names["high_loss"] = {"above": training.stop_above_loss, "steps": training.stop_above_loss_steps}
    if logging.profile is not None:  # after what works between steps, so that it is no part of a step
        names["profile"] = {"steps": logging.profile}
    if config.adapter.type != "none":
        names["adapter_effect"] = {}
    return names | {"loss_plot": {}, "report": {}, "status": {}}
