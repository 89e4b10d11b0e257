"""AdamW of torchao, with moments in blocks of 8 bit (arXiv:2110.02861) or 4 bit (arXiv:2309.01507)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchao.optim import AdamW4bit, AdamW8bit

from halftune.config.optimizers import OPTIMIZERS
from halftune.config.sections.training import TrainingSection
from halftune.optim.builtin import adam_options, groups_of
from halftune.precision import PrecisionPlan

_SAVED = ("codes", "scale")  # of a quantised moment; the rest of its tensors are constant


class _Plain(Optimizer):
    """State as plain tensors, and learning rates as numbers; torchao has tensor subclasses, and tensors."""

    _subclass_zeros: Callable[[Tensor, bool, int], Any]
    block_size: int

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its learning rate as a number."""
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights, compiled except on a CPU, where eager code needs no compiler and is tested."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)  # a number would be compiled into the update
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        try:
            with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
                return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's format; a quantised moment is ``<name>_codes`` and ``<name>_scale``."""
        whole = super().state_dict()
        return {**whole, "state": {index: _flat(entry) for index, entry in whole["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class."""
        super().load_state_dict({**state_dict, "state": {}})
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, weight in zip(indices, weights, strict=True):
            if entry := state_dict["state"].get(index):
                self.state[weight] = self._quantised(weight, entry)

    def _quantised(self, weight: Tensor, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of a weight from plain tensors."""
        found: dict[str, Tensor] = {"step": entry["step"].cpu()}
        for name in ("exp_avg", "exp_avg_sq"):
            if name in entry:
                found[name] = entry[name].to(weight.device)
                continue
            moment = self._subclass_zeros(weight, name == "exp_avg", self.block_size)  # only the first has a sign
            for part in _SAVED:
                getattr(moment, part).copy_(entry[f"{name}_{part}"])
            found[name] = moment
        return found


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in entry.items():
        quantised = hasattr(value, _SAVED[0])
        flat |= {f"{name}_{part}": getattr(value, part) for part in _SAVED} if quantised else {name: value}
    return flat


class PlainAdamW8bit(_Plain, AdamW8bit):
    """AdamW with 8-bit moments."""


class PlainAdamW4bit(_Plain, AdamW4bit):
    """AdamW with 4-bit moments."""


def adamw(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build AdamW."""
    kind = PlainAdamW4bit if OPTIMIZERS[training.optim].state_format == "4bit" else PlainAdamW8bit
    return kind(groups_of(model, training), **adam_options(training))
