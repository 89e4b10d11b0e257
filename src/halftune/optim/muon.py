"""Muon (https://kellerjordan.github.io/posts/muon/) for hidden matrices, AdamW for all other weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.optim.builtin import Groups, adam_options, by_decay, is_fused, split_hidden
from halftune.precision import PrecisionPlan


class MuonWithAdamW(Optimizer):
    """torch's Muon and AdamW as one optimizer, with one state and one list of parameter groups.

    Args:
        groups: with the options of torch's classes; ``muon`` selects the optimizer of a group.
    """

    def __init__(self, groups: Groups) -> None:
        self.parts: list[Optimizer] = []
        super().__init__(groups, {"lr": groups[0]["lr"]})  # some schedules read this default
        muon, adamw = self._split()
        if muon:  # torch refuses an optimizer without parameters
            self.parts.append(torch.optim.Muon(muon))
        if adamw:
            self.parts.append(torch.optim.AdamW(adamw))
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for part in self.parts:
            part.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer that its ``muon`` selects."""
        super().add_param_group(param_group)
        if self.parts:  # not while Optimizer.__init__ adds the first groups
            self._share()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict and share the new groups and state, which torch replaces, with both optimizers."""
        super().load_state_dict(state_dict)
        self._share()

    def _split(self) -> tuple[Groups, Groups]:
        return [one for one in self.param_groups if one["muon"]], [one for one in self.param_groups if not one["muon"]]

    def _share(self) -> None:
        for part, groups in zip(self.parts, filter(None, self._split()), strict=True):
            part.param_groups, part.state = groups, self.state


def build(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> MuonWithAdamW:
    """Build both with one learning rate: Muon's updates are scaled to AdamW's (arXiv:2502.16982, section 2.2)."""
    (hidden, outside), decay = split_hidden(model), training.weight_decay
    rest = by_decay(outside, decay, vectors=training.weight_decay_on == "all")
    muon = {
        "lr": training.learning_rate,
        "momentum": training.muon_momentum,
        "ns_steps": training.muon_ns_steps,
        "adjust_lr_fn": "match_rms_adamw",
    }
    adam = adam_options(training) | {"fused": is_fused(rest)}
    groups = [{**muon, **group, "muon": True} for group in by_decay(hidden, decay)]
    return MuonWithAdamW([*groups, *({**adam, **group, "muon": False} for group in rest)])
