"""What a run would have left, had it ended at one of its checkpoints: plain files, whoever wrote the checkpoint."""

from __future__ import annotations

from pathlib import Path

from halftune.config.run import RunConfig
from halftune.core.errors import TrainingError
from halftune.model.adapters.attach import attach_adapter
from halftune.model.load import load_model
from halftune.model.save import save_final
from halftune.model.tokenizer import load_tokenizer
from halftune.plan import Plan
from halftune.train.checkpoint import load_weights
from halftune.train.checkpoint_list import flaw


def write_result(checkpoint: Path, config: RunConfig, plan: Plan, folder: Path) -> None:
    """Writes the adapter or model of a checkpoint, as the final save would have.

    Args:
        checkpoint: written by any number of processes.
        config, plan: of its run, on this machine.
        folder: is made.

    Raises:
        TrainingError: the checkpoint is damaged; says how.
        ModelError: base model and checkpoint do not belong together, or the folder cannot be written.
    """
    if wrong := flaw(checkpoint, thorough=True):
        raise TrainingError(
            f"this is no valid checkpoint: {wrong}", where=str(checkpoint), remedy="export another one, or the run"
        )
    model = load_model(config.model, plan)
    model = attach_adapter(model, config.adapter, plan, config.training.seed, revision=config.model.revision)
    load_weights(checkpoint, model)
    save_final(model, load_tokenizer(config.model), plan, folder)
