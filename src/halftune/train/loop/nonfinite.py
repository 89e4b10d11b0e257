"""The non-finite watch: stops before a broken step touches the weights, and names where it broke.

A healthy step costs two comparisons of Python floats. Only when one fails are the step's micro-batches run again, with
hooks on every module that find the first output, or gradient, that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halftune.core.errors import TrainingError
from halftune.data.batch import Batch
from halftune.model.result.save import trainable_state
from halftune.train.callback import Callback, StepMetrics
from halftune.train.loop.out_of_memory import out_of_memory
from halftune.train.run_folder.checkpoints import intact
from halftune.train.state import TrainState


@dataclass(frozen=True)
class NonFinite:
    """Where the first non-finite number appeared.

    Attributes:
        module: dotted name of the module.
        kind: class of the module.
        place: ``output``: it made the number from finite inputs. ``input``: the number was made on the way to it, by
            the code of the module around it. ``gradient``: it arrived at its output in the backward pass.
        number: ``NaN`` or ``infinity``.
        dtype: of the tensor, torch's name without ``torch.``.
        largest: largest finite magnitude in the tensor.
    """

    module: str
    kind: str
    place: str
    number: str
    dtype: str
    largest: float

    def describe(self) -> str:
        """The finding as a clause."""
        tensor = f"{self.dtype}, largest finite magnitude {self.largest:.3g}"
        around = self.module.rpartition(".")[0] or "the model"
        match self.place:
            case "output":
                return f"the first {self.number} came out of {self.module} ({self.kind}; {tensor})"
            case "input":
                return (
                    f"the first {self.number} was made in the code of {around}, on the way to {self.module} ({tensor})"
                )
            case _:
                place = f"a gradient at the output of {self.module}"
                return f"all outputs are finite; in the backward pass, the first {self.number} is in {place} ({tensor})"


class Watcher:
    """Collects the first finding of a forward and backward pass; ``finding`` is None while all is finite."""

    def __init__(self) -> None:
        self.finding: NonFinite | None = None

    def look(self, name: str, module: nn.Module, place: str, values: Any) -> None:
        """Notes the first non-finite tensor in ``values`` (tensors in tuples, lists and dicts)."""
        if self.finding is not None:
            return
        for tensor in _tensors(values):
            healthy = torch.isfinite(tensor.detach())
            if not bool(healthy.all()):
                number = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
                finite = tensor.detach()[healthy].abs()
                largest = float(finite.max()) if finite.numel() else 0.0
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.finding = NonFinite(name, type(module).__name__, place, number, dtype, largest)
                return


@contextmanager
def watch(model: nn.Module) -> Iterator[Watcher]:
    """Inside ``with``, every module's inputs, outputs and output gradients are looked at."""
    watcher, handles = Watcher(), []
    for name, module in model.named_modules():
        if name:
            handles += _hook(watcher, name, module)
    try:
        yield watcher
    finally:
        for handle in handles:
            handle.remove()


def _hook(watcher: Watcher, name: str, module: nn.Module) -> list[Any]:
    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        # attention masks hold -inf by design
        watcher.look(name, module, "input", [args, [v for key, v in kwargs.items() if "mask" not in key]])

    def after(_: nn.Module, args: tuple, output: Any) -> None:
        watcher.look(name, module, "output", output)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: watcher.look(name, module, "gradient", gradient))

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


MAX_SKIPPED = 30  # the scale starts at 2^16 and halves at each skip: by then it is far below one


Forward = Callable[[Batch], torch.Tensor]


class NonFiniteStep(TrainingError):
    """Loss or gradient norm of a step are not finite; the weights are as they were before it.

    Attributes:
        loss, grad_norm: what was measured.
    """

    def __init__(self, what: str, remedy: str, loss: float, grad_norm: float) -> None:
        super().__init__(what, code="train.non_finite", remedy=remedy)
        self.loss, self.grad_norm = loss, grad_norm


def check_finite(
    run: TrainState,
    loss: float,
    grad_norm: float,
    batches: Sequence[Batch],
    forward: Forward,
    rows: Callable[[slice], str],
) -> None:
    """Called after the backward pass, before the weights change.

    Args:
        run: the run; ``run.step`` steps are done.
        loss: mean loss of the global batch, over all processes.
        grad_norm: global gradient norm; 0 where a loss scaler looks after overflowing gradients itself.
        batches: this process's micro-batches.
        forward: computes the loss of one of them again, by the model as it was built.
        rows: which rows of the data a part of the micro-batches was made of.

    Raises:
        NonFiniteStep: loss or gradient norm is not finite. Names the first module that went non-finite and the last
            checkpoint. The weights are as they were before the step.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
    try:
        cause, part = _cause(run, batches, forward)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        cause, part = "memory ran out in the search for the module", slice(None)
    made_of = rows(part)
    raise NonFiniteStep(
        f"{what} in step {run.step + 1}: {cause}{f'; it was fed {made_of}' if made_of else ''}",
        f"{_remedy(run)}; the weights were not updated, {intact(run.folder)}",
        loss,
        grad_norm,
    )


def check_weights(run: TrainState) -> None:
    """Called before a checkpoint is written, so that no broken one pushes a good one out.

    Raises:
        TrainingError: a trained weight is not finite: the last update broke it.
    """
    for name, tensor in trainable_state(run.model).items():
        if _bad(tensor):
            raise TrainingError(
                f"the weight {name} is not finite after step {run.step}: its update overflowed",
                remedy=f"{_remedy(run)}; nothing was saved, {intact(run.folder)}",
                code="train.non_finite",
            )


class NonFiniteWatch(Callback):
    """Stops a run in which every update is skipped: nothing would be learned, silently."""

    def __init__(self) -> None:
        self.skipped = 0

    def state(self) -> dict[str, Any]:
        """How many updates in a row were skipped."""
        return {"skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on counting."""
        self.skipped = state["skipped"]

    def on_step(self, run: TrainState, metrics: StepMetrics) -> None:
        """Counts skipped updates in a row.

        Raises:
            TrainingError: there were too many.
        """
        self.skipped = self.skipped + 1 if metrics.extra.get("skipped") else 0
        if self.skipped < MAX_SKIPPED:
            return
        what, remedy = "loss or gradient are not finite", _remedy(run)
        if (scale := metrics.extra.get("loss_scale")) is not None:
            what = f"fp16 gradients overflow even at a loss scale of {scale:.3g}"
            remedy = "this model needs precision: bf16 or fp32"
        raise TrainingError(
            f"the last {self.skipped} updates were skipped: {what}",
            remedy=f"{remedy}; {intact(run.folder)}",
            code="train.gradients_overflow",
        )


def _cause(run: TrainState, batches: Sequence[Batch], forward: Forward) -> tuple[str, slice]:
    """Runs the micro-batches again; where the first non-finite number came from, and which of them showed it."""
    everything = slice(None)
    if name := first_bad_weight(run.model):
        return f"the weight {name} is not finite", slice(0)
    if run.sharded:  # every process would have to stop at the same place
        return "in which module is not looked for while the model is in shards", everything
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    if found := _in_a_module(run, batches, forward, parameters):
        return found
    bad = [parameter for parameter, gradient in zip(parameters, gradients, strict=True) if _bad(gradient)]
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    if bad and len(batches) > 1:
        return f"the gradients of {names[id(bad[0])]} overflowed when micro-batches were added up", everything
    what = "it did not come back when this process's batches were run again: dropout, or another process's batch"
    return what, everything


def _in_a_module(
    run: TrainState, batches: Sequence[Batch], forward: Forward, parameters: Sequence[torch.nn.Parameter]
) -> tuple[str, slice] | None:
    """The first micro-batch in which a module, or the loss, is not finite again."""
    # Hooks and compiled code do not go together; eagerly the same numbers appear, to rounding.
    with torch.compiler.set_stance("force_eager"), watch(run.model) as watcher:
        for index, batch in enumerate(batches):
            loss = forward(batch)
            if watcher.finding is None and loss.requires_grad:
                # not backward(): that would add to .grad, and talk to other processes
                torch.autograd.grad(loss, parameters, allow_unused=True)
            if watcher.finding is not None:
                where = f" (micro-batch {index + 1} of {len(batches)})" if len(batches) > 1 else ""
                return watcher.finding.describe() + where, slice(index, index + 1)
            if not torch.isfinite(loss):
                what = "every module's output is finite, the loss itself is not: look at labels and logits"
                return what, slice(index, index + 1)
    return None


def first_bad_weight(model: torch.nn.Module, *, frozen: bool = False) -> str | None:
    """Name of the first parameter (of the ``frozen`` ones alone) that holds a non-finite number, or None."""
    looked_at = ((name, one) for name, one in model.named_parameters() if not (frozen and one.requires_grad))
    return next((name for name, one in looked_at if _bad(one)), None)


def _bad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(tensor.detach()).all())


def _remedy(run: TrainState) -> str:
    # a load in fp16 refuses numbers that its rounding would make infinite
    teacher = getattr(run.reference, "policy", None) if run.config.method.teacher_model is not None else None
    if teacher is not None and (name := first_bad_weight(teacher.model)) is not None:
        return f"{name} of the teacher: its files hold that number; copy or download them again"
    if (frozen := first_bad_weight(run.model, frozen=True)) is not None:
        return f"{frozen} is frozen: the base model's files hold that number; copy or download them again"
    if run.plan.precision.compute.value == "fp16":
        return "fp16 overflows above 65504: use precision: bf16 or fp32"
    return "lower training.learning_rate, lengthen the warm-up, or look at the data of this step"
