"""What a run would have left, had it ended at one of its checkpoints: plain files, whoever wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from halftune.config.run import RunConfig
from halftune.core.errors import TrainingError
from halftune.model.adapters.attach import attach_adapter
from halftune.model.load import load_model
from halftune.model.save import save_final
from halftune.model.state import check_same
from halftune.model.tokenizer import load_tokenizer
from halftune.model.unread import Unread, why_not
from halftune.plan import Plan
from halftune.train.checkpoint import load_weights, opened
from halftune.train.checkpoint_list import flaw
from halftune.train.parallel.shards import Stored


def write_result(checkpoint: Path, config: RunConfig, plan: Plan, folder: Path) -> None:
    """Writes the adapter or model of a checkpoint, as the final save would have; a model tensor by tensor.

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
    tokenizer = load_tokenizer(config.model)
    if config.adapter.type == "none":
        model = load_model(config.model, plan, unread=None if why_not() else Unread())  # all come from the checkpoint
        model = attach_adapter(model, config.adapter, plan, config.training.seed)
        with opened(checkpoint) as saved:
            save_final(model, tokenizer, plan, folder, _trained(model, saved))
        return
    model = load_model(config.model, plan)
    model = attach_adapter(model, config.adapter, plan, config.training.seed, revision=config.model.revision)
    load_weights(checkpoint, model)
    save_final(model, tokenizer, plan, folder)


def _trained(model: nn.Module, saved: Stored) -> Iterator[tuple[str, torch.Tensor]]:
    """A full model's tensors, read from its checkpoint one after the other; buffers are the model's own.

    Raises:
        ModelError: model and checkpoint do not belong together.
    """
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    check_same(own, saved.shapes)
    done: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in done:
            done.add(id(tensor))
            yield name, saved.read(name) if name in own else tensor.detach()
