"""AdamW and Lion of bitsandbytes, with state in 32 bit or in 8-bit blocks (arXiv:2110.02861)."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW
from bitsandbytes.optim.lion import Lion
from bitsandbytes.optim.optimizer import Optimizer8bit
from bitsandbytes.utils import sync_gpu
from torch import nn
from torch.optim import Optimizer

from halftune.config.optimizers import OPTIMIZERS
from halftune.config.sections.training import TrainingSection
from halftune.optim.builtin import adam_options, groups_of
from halftune.precision import PrecisionPlan

# The code of each 8-bit value is a constant: state → its key in bitsandbytes' table of codes.
_CODES = {"qmap1": "dynamic", "qmap2": "udynamic"}


def _without_waits(step: Any) -> Any:
    """The same step, for which waiting for the device is nothing; of torch's wrappers it has ``no_grad`` alone."""
    plain = inspect.unwrap(step)
    namespace = {**plain.__globals__, "sync_gpu": lambda _: None}
    return torch.no_grad()(FunctionType(plain.__code__, namespace, "step", plain.__defaults__, plain.__closure__))


_step = _without_waits(Optimizer8bit.step)


class FlatState(Optimizer8bit):
    """State as tensors and numbers only; bitsandbytes nests its tensors in a dict, which checkpoints do not hold."""

    def step(self, closure: Any = None) -> Any:
        """Update the weights without waiting for the device after each of them; after the last if state is paged."""
        loss = _step(self, closure)
        if self.is_paged:  # what is paged is moved asynchronously
            sync_gpu(self.param_groups[0]["params"][0])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's format, without the constant codes."""
        whole = Optimizer.state_dict(self)
        state = {
            index: {name: value for name, value in entry.items() if name not in _CODES}
            for index, entry in whole["state"].items()
        }
        return {**whole, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load a state dict, add the codes, and page the state again if the optimizer is paged."""
        super().load_state_dict(state_dict, move_to_device)
        for weight, entry in self.state.items():
            for number, (name, code) in enumerate(_CODES.items(), start=1):
                if f"absmax{number}" in entry:
                    # as Optimizer2State.init_state: on the weight's device, one for all weights
                    entry[name] = self.name2qmap[code] = self.name2qmap[code].to(weight.device)
                if self.is_paged and f"state{number}" in entry:
                    loaded = entry[f"state{number}"]
                    entry[f"state{number}"] = self.get_state_buffer(weight, dtype=loaded.dtype).copy_(loaded)


class FlatAdamW(FlatState, AdamW):
    """AdamW."""


class FlatLion(FlatState, Lion):
    """Lion (arXiv:2302.06675)."""


def adamw(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build AdamW."""
    return FlatAdamW(groups_of(model, training), **adam_options(training), **_storage(model, training))


def lion(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Lion, with the betas of Adam as its own."""
    options = {key: value for key, value in adam_options(training).items() if key != "eps"}
    return FlatLion(groups_of(model, training), **options, **_storage(model, training))


def _storage(model: nn.Module, training: TrainingSection) -> dict[str, Any]:
    """Return bits of the state, and whether to page it: not on a CPU, where there is nothing to page."""
    row = OPTIMIZERS[training.optim]
    on_cpu = next(model.parameters()).device == torch.device("cpu")
    return {"optim_bits": 8 if row.state_format == "8bit" else 32, "is_paged": row.paged and not on_cpu}
