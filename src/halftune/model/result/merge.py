"""Merges an adapter into its base model in fp32 and verifies the result against the unmerged model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from halftune.config.sections.model import ModelSection
from halftune.core.choice import Choice, Format
from halftune.core.errors import ModelError
from halftune.hardware.probe import host_memory_bytes
from halftune.model.adapters import load_adapter
from halftune.model.load.load import load_model
from halftune.model.load.parts import adapted_towers, release
from halftune.model.load.quantised.formats import prepare_merge
from halftune.plan import Plan
from halftune.precision.dtypes import kept_names, stays_fp32, torch_dtype

ROWS, TOKENS = 2, 32  # of the random input for both forward passes

Progress = Callable[[str, int, int], None]
"""Called with a phase (``loading | merging | checking | writing``), steps done and total steps (0: unknown)."""


def no_progress(phase: str, step: int = 0, total: int = 0) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Merge:
    """A merged model and its error.

    Attributes:
        model: fp32 tensors with values that ``stored`` represents exactly.
        stored: the format to save.
        forward_error: ‖merged − unmerged‖ / ‖unmerged‖ of the logits on random input, computed in fp32.
        bound: largest accepted ``forward_error`` for this format and depth.
        update_size: ‖update‖ / ‖weights‖ over all adapted weights; 0 for a full model.
        update_error: ‖rounded update − update‖ / ‖update‖: the share of the update lost to rounding.
        by_layer: whether it was merged layer by layer; the errors are then those of each layer's output.
    """

    model: PreTrainedModel
    stored: Format
    forward_error: float
    bound: float
    update_size: float = 0.0
    update_error: float = 0.0
    by_layer: bool = False

    @property
    def compared(self) -> str:
        """What ``forward_error`` is."""
        return "error of a layer's output" if self.by_layer else "logit error"


def fp32_plan(plan: Plan, stored: Format) -> Plan:
    """The plan with fp32 everywhere on the CPU, for merging and verification.

    ``stored`` is the saved format, which decides what the model's code keeps in fp32.
    """
    fp32: Choice[Format] = Choice("fp32", "merging and its check are done in fp32")
    off = Choice(False, "fp32 throughout")
    precision = replace(
        plan.precision,
        storage=fp32,
        trainable=fp32,
        compute=fp32,
        saved=Choice(stored, "to be exported"),
        autocast=off,
        grad_scaler=off,
    )
    here = "runs in fp32 on a CPU"
    attention = replace(plan.attention, varlen=Choice("none", "no packed rows"))
    if attention.softmax.value not in ("sdpa", "eager"):  # a GPU kernel; sdpa may not support the model
        softmax, provider = Choice("eager", here), Choice("transformers", here)
        attention = replace(attention, softmax=softmax, provider=provider)
    batch = replace(plan.batch, packing=Choice(False, "no packed rows"))
    return replace(plan, device=Choice("cpu", here), precision=precision, attention=attention, batch=batch)


def merge_adapter(
    model: ModelSection, adapter: Path, plan: Plan, stored: Format, progress: Progress = no_progress
) -> Merge:
    """Merge base and adapter in fp32 on the CPU and round to ``stored``; verify the logits before and after rounding.

    Args:
        model: the base model.
        adapter: folder of the adapter.
        plan: the run's plan; its ``keep_fp32`` applies.
        stored: the format to save, usually the base checkpoint's.
        progress: called with the progress.

    Raises:
        ModelError: not enough memory, or the merged model's logits differ from base plus adapter.
    """
    _check_memory(plan)
    exact = fp32_plan(plan, stored)
    base = load_model(model, exact, for_training=False)
    prepare_merge(base, plan)
    adapted = load_adapter(base, adapter, exact)
    changed = adapted_towers(adapted)
    ids_BT = random_ids(adapted)
    expected_BTV = logits_of(adapted, ids_BT)
    size, error = _merge_layers(adapted, stored, plan, progress)
    progress("checking", 0, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        merged: PreTrainedModel = adapted.merge_and_unload()  # pyright: ignore[reportCallIssue]
    release(merged, lambda name: name.startswith(changed))
    bound = _check_merged(merged, ids_BT, expected_BTV)
    result = _round(merged, ids_BT, expected_BTV, stored, plan, bound)
    return replace(result, update_size=size, update_error=error)


def round_model(model: ModelSection, plan: Plan, stored: Format) -> Merge:
    """Load a full model in fp32 and round it to ``stored``; verify the logits.

    Raises:
        ModelError: not enough memory, or the rounded model's logits differ too much.
    """
    _check_memory(plan)
    loaded = load_model(model, fp32_plan(plan, stored), for_training=False)
    ids_BT = random_ids(loaded)
    return _round(loaded, ids_BT, logits_of(loaded, ids_BT), stored, plan)


def _round(
    model: PreTrainedModel,
    ids_BT: torch.Tensor,
    expected_BTV: torch.Tensor,
    stored: Format,
    plan: Plan,
    bound: float = 0.0,
) -> Merge:
    _check_range(model, stored, plan)
    kept, saved = kept_names(model, plan.precision.keep_fp32.value), model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    for name, tensor in (*model.named_parameters(), *buffers):
        if name not in kept and tensor.is_floating_point():
            tensor.data = rounded(tensor.detach(), stored)
    bound = max(bound, forward_bound(stored, _depth(model)))
    return Merge(model, stored, check_forward(logits_of(model, ids_BT), expected_BTV, stored, bound), bound)


def _check_range(model: PreTrainedModel, stored: Format, plan: Plan) -> None:
    """Refuse weights that exceed the format's range.

    Raises:
        ModelError: names the number of tensors, the first, and its largest value.
    """
    most, kept = torch.finfo(torch_dtype(stored)).max, kept_names(model, plan.precision.keep_fp32.value)
    sizes = {
        name: float(tensor.abs().max())
        for name, tensor in model.named_parameters()
        if tensor.numel() and name not in kept
    }
    if beyond := {name: size for name, size in sizes.items() if size > most}:
        raise beyond_range(stored, beyond)


def beyond_range(stored: Format, sizes: dict[str, float]) -> ModelError:
    """The error for weights beyond a format's range: their names with their largest values."""
    most, (name, size) = torch.finfo(torch_dtype(stored)).max, next(iter(sizes.items()))
    what = f"{len(sizes)} weights exceed the {stored} range ({most:,.0f}), first {name} ({size:,.0f})"
    return ModelError(what, remedy="--dtype bf16 or --dtype fp32", code="export.beyond_range")


def _depth(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_hidden_layers


def _check_merged(merged: PreTrainedModel, ids_BT: torch.Tensor, expected_BTV: torch.Tensor) -> float:
    """Check the logits in fp32 and return the bound; where they exceed the usual one, what rounding does to this model.

    Some models magnify the last bit more than others. Measured on small models, merging moves the logits by 0.7 to 2.4
    times what an error of the last bit in every module's output does; 8 times are accepted, and 16 times the usual
    bound at most: where a router chooses other experts for the last bit, anything would be explained.

    Raises:
        ModelError: they differ by more than rounding explains.
    """
    actual_BTV, usual = logits_of(merged, ids_BT), forward_bound("fp32", _depth(merged))
    bound = usual
    if _apart(actual_BTV, expected_BTV) > usual:
        with _rounded_outputs(merged):
            bound = min(16 * usual, max(usual, 8 * _apart(logits_of(merged, ids_BT), actual_BTV)))
    check_forward(actual_BTV, expected_BTV, "fp32", bound)
    return bound


@contextmanager
def _rounded_outputs(model: torch.nn.Module) -> Iterator[None]:
    """Inside, what each module with weights gives is off by the last bit of fp32, up or down by chance."""
    generator, eps = torch.Generator().manual_seed(0), torch.finfo(torch.float32).eps

    def nudge(_module: Any, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        signs = 2 * torch.randint(2, output.shape, generator=generator, dtype=output.dtype) - 1
        return output * (1 + eps * signs)

    hooks = [
        module.register_forward_hook(nudge)
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _apart(actual_BTV: torch.Tensor, expected_BTV: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖."""
    return float((actual_BTV - expected_BTV).norm() / expected_BTV.norm())


def check_forward(
    actual_BTV: torch.Tensor, expected_BTV: torch.Tensor, stored: Format, bound: float, of: str = "logit"
) -> float:
    """Relative difference of two logits, or outputs ``of`` a layer; it must be what rounding to ``stored`` explains.

    Raises:
        ModelError: the difference is larger, or NaN.
    """
    error = _apart(actual_BTV, expected_BTV)
    if not error <= bound:
        what = f"relative {of} error {error:.2g} after merging in {stored} exceeds the rounding bound {bound:.2g}"
        raise ModelError(
            what,
            remedy="check that the adapter was trained on this base model, or use a wider --dtype",
            code="export.merge_inexact",
        )
    return error


def forward_bound(stored: Format, layers: int) -> float:
    """Largest relative change of the logits that rounding all weights to ``stored`` can cause.

    Each weight changes by at most eps/2 relative, independently, so errors grow with the square root of the number of
    layers. Measured on small models: 0.2 to 1.3 eps per root layer in half formats, and 3 to 6 in fp32, where the
    forward's own rounding dominates. The bounds are 4 and 64. A wrong merge fails the fp32 check, which comes first.
    """
    eps = torch.finfo(torch_dtype(stored)).eps
    return (64 if stored == "fp32" else 4) * eps * math.sqrt(layers + 1)


def _merge_layers(adapted: PeftModel, stored: Format, plan: Plan, progress: Progress) -> tuple[float, float]:
    """Merge every adapted layer in place (fp32); return the update's relative size and its rounding loss."""
    update = Update()
    layers: list[Any] = [(name, part) for name, part in adapted.named_modules() if isinstance(part, BaseTunerLayer)]
    for number, (name, layer) in enumerate(layers):
        progress("merging", number, len(layers))
        leaf = getattr(layer, "parameter_name", "weight")  # of LoRA on experts
        weight = getattr(layer.get_base_layer(), leaf)
        before = weight.detach().clone()
        layer.merge(safe_merge=True)  # peft raises for NaN in the result
        after = getattr(layer.get_base_layer(), leaf).detach()
        kept = stays_fp32(f"{name}.{leaf}", weight, plan.precision.keep_fp32.value)
        update.add(before, after, "fp32" if kept else stored)
    return update.size, update.error


class Update:
    """The size of an adapter's update of all weights, and of what rounding takes from it."""

    def __init__(self) -> None:
        self._whole = self._wanted = self._lost = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor, stored: Format) -> None:
        """Add a weight, in fp32 before and after the merge; ``stored`` is the format to which it will be rounded."""
        for one, other in zip(before.flatten().split(_PART), after.flatten().split(_PART), strict=True):
            update = (other - one).double()
            moved = rounded(other, stored).double() - rounded(one, stored)
            self._whole += float(one.double().square().sum())
            self._wanted += float(update.square().sum())
            self._lost += float((moved - update).square().sum())

    @property
    def size(self) -> float:
        """‖update‖ / ‖weights‖."""
        return math.sqrt(self._wanted / self._whole) if self._whole else 0.0

    @property
    def error(self) -> float:
        """‖rounded update − update‖ / ‖update‖."""
        return math.sqrt(self._lost / self._wanted) if self._wanted else 0.0


_PART = 2**20  # weights at a time, so that no copy of a large one is made


def rounded(tensor: torch.Tensor, stored: Format) -> torch.Tensor:
    """fp32 values that ``stored`` holds exactly."""
    return tensor.to(torch_dtype(stored)).to(torch.float32)


def random_ids(model: PeftModel | PreTrainedModel) -> torch.Tensor:
    """Random tokens ``[ROWS, TOKENS]``, the same in each call."""
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    size = embedding.weight.shape[0]
    return torch.randint(size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def logits_of(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return logits in fp64; of a reward model the scores of all tokens ``[B, T, 1]``."""
    with torch.inference_mode():
        logits = model(input_ids=ids_BT, use_cache=False).logits
    if logits.shape[-1] == 1:
        from halftune.model.load.score_head import token_scores  # few models are reward models

        logits = token_scores(model.get_base_model() if isinstance(model, PeftModel) else model)
    return logits.double()


def lacks_memory(plan: Plan) -> str:
    """Why the whole model in fp32 does not fit into the main memory; empty if it does."""
    needed, free = 4 * plan.num_parameters.value, min(psutil.virtual_memory().available, host_memory_bytes())
    if needed <= free:
        return ""
    return f"merging needs {needed / 2**30:.1f} GiB of main memory (fp32 weights); {free / 2**30:.1f} GiB are free"


def _check_memory(plan: Plan) -> None:
    if what := lacks_memory(plan):
        raise ModelError(what, remedy="export on a machine with more memory", code="export.not_enough_memory")
