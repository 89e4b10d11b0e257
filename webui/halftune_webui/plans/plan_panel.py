"""The plan as HTML: every decision with its reason, and the memory that it needs as a bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halftune.core.choice import Choice
from halftune.core.errors import HalftuneError
from halftune.plan import MemoryPlan, Plan
from halftune.plan.explain import size
from halftune_webui.html import render
from halftune_webui.labels import Words

MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "overhead")


def plan_panel(
    plan: Plan | None,
    problem: HalftuneError | None,
    words: Words,
    *,
    elsewhere: bool,
    first: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> str:
    """The panel.

    Args:
        plan: what to show; None where there is a ``problem``, or nothing to plan yet.
        problem: why there is no plan.
        words: the labels.
        elsewhere: whether the plan is for another machine than this one.
        first: recipes that are trained before this one.
        unused: those of them whose result it does not use.
    """
    shown: dict[str, Any] = {"plan": plan, "problem": problem, "words": words, "elsewhere": elsewhere}
    shown |= {"first": first, "unused": unused, "size": size}
    if plan is not None:
        shown |= {"formats": _formats(plan), "attention": _attention(plan), "rest": _rest(plan)}
        shown["parts"] = list(_parts(plan.memory))
    return render("plan", **shown)


Row = tuple[str, str, str]  # key of its label, value, reason


def _rows(choices: Mapping[str, Choice[Any] | None]) -> Iterator[Row]:
    for name, choice in choices.items():
        if choice is not None:
            yield name, _shown(choice.value), choice.reason


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _formats(plan: Plan) -> Iterator[Row]:
    names = ("compute", "storage", "trainable", "reduce", "optimizer_state", "saved")
    return _rows({name: getattr(plan.precision, name) for name in names})


def _attention(plan: Plan) -> Iterator[Row]:
    attention = plan.attention
    yield "softmax", f"{attention.softmax.value} ({attention.provider.value})", attention.softmax.reason
    yield from _rows({"linear": attention.linear, "varlen": attention.varlen if plan.batch.packing.value else None})


def _rest(plan: Plan) -> Iterator[Row]:
    precision, batch, quantised = plan.precision, plan.batch, plan.weights.format
    yield from _rows({
        "method": plan.method.name,
        "reference": plan.method.reference,
        "autocast": precision.autocast,
        "grad_scaler": precision.grad_scaler,
        "tf32": precision.tf32,
        "linear_weights": precision.linear,
        "packing": batch.packing,
        "gradient_checkpointing": batch.gradient_checkpointing,
        "fused_layers": batch.fused_layers,
        "weights": quantised if quantised.value != "none" else None,
        "parameters": plan.all_parameters,
        "trained": plan.num_trainable,
        "optimizer": plan.optimizer,
        "towers": plan.towers,
        "features": plan.features,
    })  # fmt: skip
    for part in plan.parts:
        shown = (part.trained.value, part.dtype.value, part.attention.value)
        yield f"part_{part.name}", " · ".join(value for value in shown if value != "-"), part.trained.reason
    yield "checkpoint", size(plan.memory.checkpoint_disk), ""
    for name, reason in (*plan.attention.rejected, *plan.attention.rejected_linear):
        yield "rejected", name, reason


def _parts(memory: MemoryPlan) -> Iterator[tuple[str, int, float]]:
    """The parts of the bar: name, bytes, and the bytes less what overlaps with others."""
    parts = {name: getattr(memory, name) for name in MEMORY}
    shrink = memory.total / max(1, sum(parts.values()))
    yield from ((name, part, part * shrink) for name, part in parts.items())
