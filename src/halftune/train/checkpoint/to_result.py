"""Convert a checkpoint to a final result: an adapter or model in plain files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halftune.config.run import RunConfig
from halftune.core.errors import TrainingError
from halftune.model.adapters import attach_adapter
from halftune.model.files.identity import check_base
from halftune.model.files.result import BASE
from halftune.model.load.lazy_weights import LazyWeights, why_not
from halftune.model.load.load import load_model
from halftune.model.result.completed_run import CompletedRun
from halftune.model.result.save import check_same, save_final
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan
from halftune.train.checkpoint.checkpoint import (
    checkpoint_errors,
    first_weights,
    load_weights,
    open_weights,
    read_state,
)
from halftune.train.checkpoint.run_inputs import adapter_form
from halftune.train.parallel.shards import Stored
from halftune.train.run_folder.checkpoints import find_damage


def write_result(checkpoint: Path, run: CompletedRun) -> None:
    """Writes the adapter or model of a checkpoint, as the final save would have; a model tensor by tensor.

    Args:
        checkpoint: written by any number of processes.
        run: of :func:`~halftune.model.result.completed_run.open_checkpoint`; its ``final`` is made.

    Raises:
        TrainingError: the checkpoint is damaged, or of another run; says how.
        ModelError: base model and checkpoint do not belong together, or the folder cannot be written.
    """
    config, plan, folder = run.loaded.run, run.plan, run.final
    if wrong := find_damage(checkpoint, thorough=True):
        raise TrainingError(
            f"this is no valid checkpoint: {wrong}",
            where=str(checkpoint),
            remedy="use another one, or the run",
            code="train.checkpoint_damaged",
        )
    base, form = (_made_of(checkpoint).get(key) for key in ("model", "adapter_form"))
    if form not in (None, adapter_form(config.adapter)):
        what, remedy = "the checkpoint was written by a run with another adapter", "move it into its own run folder"
        raise TrainingError(what, where=str(checkpoint), remedy=remedy, code="train.run_changed")
    check_base(base, config.model, allowed=run.any_base)
    facts = {BASE: base}
    tokenizer = load_tokenizer(config.model)
    if config.adapter.type == "none":
        model = load_model(
            config.model, plan, lazy=LazyWeights() if _all_stored(config, plan) else None
        )  # all come from the checkpoint
        model = attach_adapter(model, config.adapter, plan, config.training.seed)
        with open_weights(checkpoint) as saved:
            save_final(model, tokenizer, plan, folder, _trained(model, saved, checkpoint), facts)
        return
    model = load_model(config.model, plan)
    fresh = config.adapter.model_copy(update={"name_or_path": None})  # its weights are those of the checkpoint
    seed, revision, initial = config.training.seed, config.model.revision, first_weights(checkpoint, config.adapter)
    model = attach_adapter(model, fresh, plan, seed, revision=revision, initial=initial)
    load_weights(checkpoint, model)
    save_final(model, tokenizer, plan, folder, facts=facts)


def _all_stored(config: RunConfig, plan: Plan) -> bool:
    """Whether the checkpoint has every weight, so that none needs to be read from the base model."""
    return not (why_not() or config.model.tokens.add or plan.train_only is not None)


def _made_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's run was made of; empty where an older version wrote nothing.

    Raises:
        TrainingError: the checkpoint cannot be read.
    """
    made = read_state(checkpoint)["made_of"]
    return made if isinstance(made, dict) else {}


def _trained(model: nn.Module, saved: Stored, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A full model's tensors, read from its checkpoint one after the other; buffers are the model's own.

    Raises:
        ModelError: model and checkpoint do not belong together.
        TrainingError: a tensor cannot be read.
    """
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    check_same(own, saved.shapes)
    done: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            done.add(id(tensor))
            with checkpoint_errors(checkpoint):
                weight = saved.read(name) if name in own else tensor.detach()
            yield name, weight
