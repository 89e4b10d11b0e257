"""torch's optimizers, with and without weight decay by parameter group.

AdamW's moments have a dtype of their own: fp32 for bf16 weights, or bf16 for fp32 weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halftune.config.sections.training import TrainingSection
from halftune.precision import PrecisionPlan
from halftune.precision.dtypes import torch_dtype

Groups = list[dict[str, Any]]
"""torch's parameter groups: ``params`` and their options."""


def by_decay(parameters: Sequence[nn.Parameter], weight_decay: float, *, vectors: bool = False) -> Groups:
    """Split parameters into two groups: matrices have weight decay; biases, norms and other vectors only on request."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": weight_decay if vectors else 0.0},
    ]
    return [group for group in groups if group["params"]]


class AdamWWithStateDtype(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101): arithmetic in fp32, moments kept in ``state_dtype``.

    torch's own AdamW always keeps its moments in the dtype of the weights.
    """

    def __init__(
        self, params: Iterable, lr: float, betas: tuple[float, float], eps: float, *, state_dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for part in _parts(weights):
                self._update(part, group)

    def _update(self, weights: list[torch.Tensor], group: dict) -> None:
        """Update some weights: one call of torch for all of them per operation."""
        states = [self._state_of(weight) for weight in weights]
        (beta1, beta2), rate = group["betas"], group["lr"]
        steps = [state["step"].add_(1).item() for state in states]  # in main memory
        gradients = _widened([weight.grad for weight in weights])  # type: ignore[misc]
        kept = [[_local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")]
        first, second = (_widened(moments, copy=True) for moments in kept)
        _each("lerp_", first, gradients, 1 - beta1)
        _each("mul_", second, beta2)
        _each("addcmul_", second, gradients, gradients, 1 - beta2)
        # now, as the denominator overwrites the second moment; the update uses what is not rounded
        for moments, new in zip(kept, (first, second), strict=True):
            _each("copy_", moments, new)
        denominator = second
        _each("div_", denominator, [1 - beta2**step for step in steps])
        _each("sqrt_", denominator)
        _each("add_", denominator, group["eps"])
        value = _widened(weights, copy=True)
        _each("mul_", value, 1 - rate * group["weight_decay"])
        _each("addcdiv_", value, first, denominator, [-rate / (1 - beta1**step) for step in steps])
        _each("copy_", [_local(weight) for weight in weights], value)

    def _state_of(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=self.state_dtype)
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict; moments stay in ``state_dtype`` (torch would cast them to the weights' dtype)."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        indices = (index for group in state_dict["param_groups"] for index in group["params"])
        weights = (weight for group in self.param_groups for weight in group["params"])
        for index, weight in zip(indices, weights, strict=True):
            for name, value in saved.get(index, {}).items():
                if name != "step":
                    self.state[weight][name] = value.to(device=weight.device, dtype=self.state_dtype)


_PART = 1 << 26  # elements that are updated at a time: four fp32 copies of them exist meanwhile


def _parts(weights: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The weights in parts of at most ``_PART`` elements, or of one weight."""
    part: list[torch.Tensor] = []
    for weight in weights:
        if part and sum(one.numel() for one in part) + weight.numel() > _PART:
            yield part
            part = []
        part.append(weight)
    if part:
        yield part


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's share of a sharded tensor, the same memory; any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _widened(tensors: list[torch.Tensor], *, copy: bool = False) -> list[torch.Tensor]:
    """This process's shares in fp32; new tensors if they are not fp32, or with ``copy``."""
    own = [_local(tensor) for tensor in tensors]
    if not copy and all(one.dtype == torch.float32 for one in own):
        return own
    wide = [torch.empty_like(one, dtype=torch.float32) for one in own]
    _each("copy_", wide, own)
    return wide


def _each(operation: str, *arguments: Any) -> None:
    """An operation on the tensors of lists, in few launches."""
    getattr(torch, f"_foreach_{operation}")(*arguments)


def adamw(model: nn.Module, training: TrainingSection, precision: PrecisionPlan) -> Optimizer:
    """Build AdamW: our implementation if the moments' dtype differs from the weights', else torch's."""
    groups, state = groups_of(model, training), precision.optimizer_state.value
    assert state not in ("8bit", "4bit"), "formats of other optimizers"
    if state != precision.trainable.value:
        return AdamWWithStateDtype(groups, **adam_options(training), state_dtype=torch_dtype(state))
    return torch.optim.AdamW(groups, **adam_options(training), fused=is_fused(groups))


def adam(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adam."""
    groups = groups_of(model, training)
    return torch.optim.Adam(groups, **adam_options(training), fused=is_fused(groups))


def sgd(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build SGD without momentum."""
    return torch.optim.SGD(groups_of(model, training), lr=training.learning_rate)


def adafactor(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adafactor."""
    return torch.optim.Adafactor(groups_of(model, training), lr=training.learning_rate)


def adagrad(model: nn.Module, training: TrainingSection, _: PrecisionPlan) -> Optimizer:
    """Build Adagrad."""
    return torch.optim.Adagrad(groups_of(model, training), lr=training.learning_rate)


def groups_of(model: nn.Module, training: TrainingSection) -> Groups:
    """Return the parameter groups of all trained weights, with and without weight decay."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return by_decay(trained, training.weight_decay, vectors=training.weight_decay_on == "all")


def adam_options(training: TrainingSection) -> dict[str, Any]:
    """Return learning rate, betas and epsilon by torch's names."""
    betas = (training.adam_beta1, training.adam_beta2)
    return {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon}


def is_fused(groups: Groups) -> bool | None:
    """Return True if torch has a fused implementation for the device (three times as fast on a CPU), else None: torch's
    default."""
    kinds = {parameter.device.type for group in groups for parameter in group["params"]}
    return True if kinds in ({"cpu"}, {"cuda"}) else None


def split_hidden(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained weights: hidden matrices, and all others, among them adapters of embeddings and output layer."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = [one for one in model.modules() if isinstance(one, nn.Embedding) or any(one is end for end in ends)]
    outer = {id(parameter) for module in modules for parameter in module.parameters()}
    trained = [one for one in model.parameters() if one.requires_grad]
    hidden = [one for one in trained if one.ndim == 2 and id(one) not in outer]
    inside = set(map(id, hidden))
    return hidden, [one for one in trained if id(one) not in inside]
