"""The optimizers and learning-rate schedules, one row each, with everything that plans and rules between keys need.

``halftune.optim`` builds the optimizers, ``halftune.train.schedule`` the schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

Shape = tuple[int, ...]
Optim = Literal["adamw", "adam", "sgd", "adafactor", "adagrad", "muon",
                "adamw_8bit", "paged_adamw_8bit", "paged_adamw", "lion", "lion_8bit", "paged_lion_8bit",
                "adamw_torch_8bit", "adamw_torch_4bit", "galore", "apollo",
                "stable_adamw", "adamw_schedule_free"]  # fmt: skip
"""The keys of :data:`OPTIMIZERS`, for the type of ``training.optim``."""

PROJECTION_RANK = 128
"""The default of ``training.projection_rank``."""
BETAS = ("adam_beta1", "adam_beta2")
ADAM_OPTIONS = (*BETAS, "adam_epsilon")
_WHOLE = "needs whole rows and columns of a gradient, which no process has under fsdp2"


@dataclass(frozen=True)
class OptimizerSpec:
    """Requirements and state size of an optimizer.

    Attributes:
        state: (shape of a weight, whether it is a hidden matrix) → number of elements of its optimizer state, without
            scalars such as step counts. A hidden matrix has two dimensions and is neither an embedding nor the output
            layer.
        state_width: bytes per element of state; 0: as ``precision.optimizer_state``.
        state_format: the state's dtype if the optimizer fixes it: ``fp32``, ``8bit`` or ``4bit`` (blocks with scales).
        options: keys of the ``training`` section that not all optimizers read, but this one does.
        rest: the algorithm for weights that are not hidden matrices, if different; else empty.
        cannot_shard: why fsdp2 cannot shard its state; else empty.
        own_state_dtype: whether the state can have another dtype than the weights (``precision.optimizer_state``).
        since_torch: first torch release with it, as (major, minor).
        package: required distribution.
        devices: kinds of devices that run it.
        paged: whether the state may move to main memory if the device is full; never on a CPU.
        averages: whether the result is an average of the weights in training, which takes the place of a schedule.
        ranked: whether ``state`` takes the ``rank`` of projections, ``training.projection_rank``.
    """

    state: Callable[..., int]
    options: tuple[str, ...] = ()
    rest: str = ""
    cannot_shard: str = ""
    own_state_dtype: bool = False
    since_torch: tuple[int, int] = (2, 6)
    state_width: int = 0
    state_format: Literal["", "fp32", "8bit", "4bit"] = ""
    package: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda", "rocm", "xpu", "mps")
    paged: bool = False
    ranked: bool = False
    averages: bool = False

    def of_rank(self, rank: int) -> OptimizerSpec:
        """The row of an optimizer whose projections have this rank; itself where it has none."""
        return replace(self, state=partial(self.state, rank=rank)) if self.ranked else self


def _per_weight(count: int) -> Callable[[Shape, bool], int]:
    return lambda shape, _: count * math.prod(shape)


def _factored(shape: Shape, _: bool) -> int:
    """Adafactor (arXiv:1804.04235): a row and a column per matrix, vectors in full."""
    return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1] if len(shape) > 1 else math.prod(shape)


def _blocks(moments: int) -> Callable[[Shape, bool], int]:
    """Bytes of 8-bit moments (arXiv:2110.02861): a byte per weight and an fp32 scale per block of 256 weights.

    bitsandbytes keeps the moments of tensors below 4,096 weights in fp32.
    """

    def count(shape: Shape, _: bool) -> int:
        weights = math.prod(shape)
        return moments * (4 * weights if weights < 4096 else weights + 4 * math.ceil(weights / 256))

    return count


def _bitsandbytes(moments: int, bits: int, *, paged: bool = False) -> OptimizerSpec:
    """AdamW (two moments) or Lion (arXiv:2302.06675, one) of bitsandbytes, with state in 32 or 8 bit."""
    return OptimizerSpec(
        _per_weight(moments) if bits == 32 else _blocks(moments),
        options=ADAM_OPTIONS if moments == 2 else BETAS,
        cannot_shard="updates tensors outside of torch's operators, which fsdp2 cannot shard",
        state_width=4 if bits == 32 else 1,
        state_format="fp32" if bits == 32 else "8bit",
        package="bitsandbytes",
        devices=("cpu", "cuda", "rocm", "xpu"),
        paged=paged,
    )


def _torchao(bits: int, block: int) -> OptimizerSpec:
    """AdamW of torchao with moments in blocks, and an fp32 scale per block.

    Tensors below 4,096 weights, and those that blocks do not divide, have moments in their own dtype.
    """

    def count(shape: Shape, _: bool) -> int:
        weights = math.prod(shape)
        whole = weights < 4096 or weights % block
        return 2 * (4 * weights if whole else weights * bits // 8 + 4 * weights // block)

    return OptimizerSpec(
        count,
        options=ADAM_OPTIONS,
        cannot_shard="keeps its state in a form that checkpoints of fsdp2 do not hold",
        state_width=1,
        state_format="4bit" if bits == 4 else "8bit",
        package="torchao",
        devices=("cpu", "cuda", "rocm", "xpu"),
    )


def _projected(package: str, *, random: bool) -> OptimizerSpec:
    """AdamW in a space of low rank, for hidden matrices: a projection, and moments of the projected gradient.

    GaLore (arXiv:2403.03507) projects on singular vectors, of which there are no more than rows and columns; APOLLO
    (arXiv:2412.05270) on random ones.
    """

    def count(shape: Shape, hidden: bool, rank: int = PROJECTION_RANK) -> int:
        if not hidden or len(shape) != 2:
            return 2 * math.prod(shape)
        rank = rank if random else min(rank, *shape)
        return rank * min(shape) + 2 * rank * max(shape)

    return OptimizerSpec(
        count,
        options=(*ADAM_OPTIONS, "projection_rank", "projection_interval", "projection_scale"),
        rest="adamw",
        cannot_shard=_WHOLE,
        package=package,
        devices=("cpu", "cuda", "rocm", "xpu"),
        ranked=True,
    )


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(_per_weight(2), options=ADAM_OPTIONS, own_state_dtype=True),
    "adam": OptimizerSpec(_per_weight(2), options=ADAM_OPTIONS),
    "sgd": OptimizerSpec(_per_weight(0)),
    "adafactor": OptimizerSpec(_factored, cannot_shard=_WHOLE),
    "adagrad": OptimizerSpec(_per_weight(1)),
    "muon": OptimizerSpec(
        lambda shape, hidden: (1 if hidden else 2) * math.prod(shape),
        options=(*ADAM_OPTIONS, "muon_momentum", "muon_ns_steps"),
        rest="adamw",
        cannot_shard=_WHOLE,
        since_torch=(2, 9),
    ),
    "adamw_8bit": _bitsandbytes(2, 8),
    "paged_adamw_8bit": _bitsandbytes(2, 8, paged=True),
    "paged_adamw": _bitsandbytes(2, 32, paged=True),
    "lion": _bitsandbytes(1, 32),
    "lion_8bit": _bitsandbytes(1, 8),
    "paged_lion_8bit": _bitsandbytes(1, 8, paged=True),
    "adamw_torch_8bit": _torchao(8, 256),
    "adamw_torch_4bit": _torchao(4, 128),
    "galore": _projected("galore-torch", random=False),
    "apollo": _projected("apollo-torch", random=True),
    "stable_adamw": OptimizerSpec(
        _per_weight(2),
        options=ADAM_OPTIONS,
        cannot_shard="clips by the mean over a whole weight, which no process has under fsdp2",
        package="torch-optimi",
        devices=("cpu", "cuda", "rocm", "xpu"),
    ),
    "adamw_schedule_free": OptimizerSpec(
        _per_weight(2),
        options=ADAM_OPTIONS,
        cannot_shard="has two sets of weights, of which fsdp2 shards one",
        package="schedulefree",
        devices=("cpu", "cuda", "rocm", "xpu"),
        averages=True,
    ),
}


Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial",
                   "inverse_sqrt", "cosine_with_restarts", "warmup_stable_decay", "rex"]  # fmt: skip
"""The keys of :data:`SCHEDULES`, for the type of ``training.lr_scheduler_type``."""


@dataclass(frozen=True)
class ScheduleSpec:
    """A learning-rate schedule.

    Attributes:
        options: key of the ``training`` section that not all schedules read, but this one does → its default.
        warmup: whether the learning rate rises from zero at first.
    """

    options: dict[str, Any]
    warmup: bool = True


SCHEDULES: dict[str, ScheduleSpec] = {
    "linear": ScheduleSpec({}),
    "cosine": ScheduleSpec({}),
    "constant": ScheduleSpec({}, warmup=False),
    "constant_with_warmup": ScheduleSpec({}),
    "cosine_with_min_lr": ScheduleSpec({"lr_min_ratio": 0.1}),
    "polynomial": ScheduleSpec({"lr_min_ratio": 0.0, "lr_power": 1.0}),
    "inverse_sqrt": ScheduleSpec({}),
    "cosine_with_restarts": ScheduleSpec({"lr_cycles": 1}),
    "warmup_stable_decay": ScheduleSpec({"lr_min_ratio": 0.0, "lr_decay_ratio": 0.1}),
    "rex": ScheduleSpec({"lr_min_ratio": 0.0}),
}
