"""Builds the optimizers of ``halftune.config.optimizers``.

In: parameters, the ``training`` section.
Out: an optimizer whose state has the planned dtype.
Imported by: `bench`, `train`.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from halftune.config.optimizers import OPTIMIZERS
from halftune.config.sections.model import AdapterSection, LoraAdapter
from halftune.config.sections.training import TrainingSection
from halftune.core import table
from halftune.core.optional import need
from halftune.precision import PrecisionPlan

# training.optim → build(model, training, precision) -> Optimizer, whose state_dict() holds all of its state
BUILDERS: dict[str, str] = {
    "adamw": "halftune.optim.builtin:adamw",
    "adam": "halftune.optim.builtin:adam",
    "sgd": "halftune.optim.builtin:sgd",
    "adafactor": "halftune.optim.builtin:adafactor",
    "adagrad": "halftune.optim.builtin:adagrad",
    "muon": "halftune.optim.muon:build",
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit", "paged_adamw"), "halftune.optim.bits_and_bytes:adamw"),
    **dict.fromkeys(("lion", "lion_8bit", "paged_lion_8bit"), "halftune.optim.bits_and_bytes:lion"),
    "adamw_schedule_free": "halftune.optim.schedule_free:adamw",
    "stable_adamw": "halftune.optim.optimi:stable_adamw",
    "galore": "halftune.optim.projected:galore",
    "apollo": "halftune.optim.projected:apollo",
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "halftune.optim.torchao:adamw"),
}

_MODULES = {"torch-optimi": "optimi"}  # where its name is another than the distribution's


def show_average(optimizer: Optimizer, training: TrainingSection, *, shown: bool) -> None:
    """Put the average into the weights that an optimizer keeps, or the weights in training; nothing with others."""
    if OPTIMIZERS[training.optim].averages:
        from halftune.optim.schedule_free import show_average as show  # few runs have one

        show(optimizer, shown=shown)


def make_optimizer(
    model: nn.Module, training: TrainingSection, precision: PrecisionPlan, adapter: AdapterSection | None = None
) -> Optimizer:
    """Build the configured optimizer, with its moments in ``precision.optimizer_state``.

    Args:
        model: its trainable parameters are updated.
        training: the optimizer's name and options.
        precision: the planned dtypes.
        adapter: its ``lora_plus_ratio`` raises the learning rate of LoRA's B (LoRA+).

    Raises:
        MissingPackageError: the optimizer's package is not installed.
    """
    if package := OPTIMIZERS[training.optim].package:
        module = _MODULES.get(package, package.replace("-", "_"))
        need(module, why=f"training.optim: {training.optim}", distribution=package)
    optimizer = table.load(BUILDERS, training.optim, kind="optimizer")(model, training, precision)
    if isinstance(adapter, LoraAdapter) and adapter.lora_plus_ratio is not None:
        _raise_lora_b(optimizer, model, adapter.lora_plus_ratio)
    return optimizer


def _raise_lora_b(optimizer: Optimizer, model: nn.Module, ratio: float) -> None:
    """Move the matrices B into groups with ``ratio`` times the learning rate (LoRA+, arXiv:2402.12354).

    Adapters of embeddings keep the learning rate: there, A is zero at first, not B.
    """
    lora_b = {id(weight) for name, weight in model.named_parameters() if ".lora_B." in name}
    for group in list(optimizer.param_groups):
        moved = [weight for weight in group["params"] if id(weight) in lora_b]
        if moved:
            group["params"] = [weight for weight in group["params"] if id(weight) not in lora_b]
            optimizer.add_param_group({**group, "params": moved, "lr": group["lr"] * ratio})
