"""The plan as HTML: every decision with its reason, and the memory that it needs as a bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from halftune.core.choice import Choice
from halftune.core.errors import HalftuneError
from halftune.plan import MemoryPlan, Plan
from halftune.plan.explain import size
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
    note = f'<p class="elsewhere">{escape(words("plan.elsewhere"))}</p>' if elsewhere else ""
    if first:
        note += f'<p class="elsewhere">{escape(words("plan.first", names=", ".join(first)))}</p>'
    if unused:
        note += f'<p class="warning">{escape(words("plan.unused", names=", ".join(unused)))}</p>'
    if problem is not None:
        said = "<br>".join(escape(words.problem(each)) for each in problem.problems)
        brief = _brief("wrong", words("plan.impossible"))
        return f'<div class="ht-plan">{note}<p class="problem" role="alert">{said}</p>{brief}</div>'
    if plan is None:
        return f'<div class="ht-plan"><p class="help">{escape(words("plan.none"))}</p></div>'
    return (
        f'<div class="ht-plan">{note}<p class="subject"><b>{escape(plan.model)}</b> '
        f"{escape(words('plan.on'))} <b>{escape(words.said(plan.machine))}</b></p>"
        f"{_memory(plan.memory, words)}"
        f"{''.join(_warning(words.said(text)) for text in plan.warnings)}"
        f"{_table('formats', _formats(plan), words)}{_table('attention', _attention(plan), words)}"
        f"{_table('rest', _rest(plan), words, folded=True)}{_verdict(plan, words)}</div>"
    )


def _verdict(plan: Plan, words: Words) -> str:
    state, compute = plan.memory.verdict.value.replace(" ", "-"), plan.precision.compute.value
    return _brief(state, f"{words(f'memory.{state}')} · {compute}")


def _brief(state: str, text: str) -> str:
    """The plan in a line, which stays in view on a screen that has no room for the plan beside the form."""
    return f'<button type="button" class="ht-brief {state}" data-goto="#plan">{escape(text)} ↓</button>'


def _formats(plan: Plan) -> Iterator[tuple[str, str, str]]:
    for name in ("compute", "storage", "trainable", "reduce", "optimizer_state", "saved"):
        choice: Choice[str] = getattr(plan.precision, name)
        yield name, choice.value, choice.reason


def _attention(plan: Plan) -> Iterator[tuple[str, str, str]]:
    attention = plan.attention
    yield "softmax", f"{attention.softmax.value} ({attention.provider.value})", attention.softmax.reason
    yield "linear", attention.linear.value, attention.linear.reason
    if plan.batch.packing.value:
        yield "varlen", attention.varlen.value, attention.varlen.reason


def _rest(plan: Plan) -> Iterator[tuple[str, str, str]]:
    precision, batch = plan.precision, plan.batch
    flags = {
        "autocast": precision.autocast,
        "grad_scaler": precision.grad_scaler,
        "tf32": precision.tf32,
        "packing": batch.packing,
        "gradient_checkpointing": batch.gradient_checkpointing,
        "fused_layers": batch.fused_layers,
    }
    for name, choice in flags.items():
        yield name, "on" if choice.value else "off", choice.reason
    yield "parameters", f"{plan.num_parameters.value:,}", plan.num_parameters.reason
    yield "trained", f"{plan.num_trainable.value:,}", plan.num_trainable.reason
    if plan.towers is not None:
        yield "towers", plan.towers.value, plan.towers.reason
    yield "checkpoint", size(plan.memory.checkpoint_disk), ""
    for name, reason in (*plan.attention.rejected, *plan.attention.rejected_linear):
        yield "rejected", name, reason


def _table(name: str, rows: Iterator[tuple[str, str, str]], words: Words, *, folded: bool = False) -> str:
    body = "".join(
        f'<tr data-plan="{key}"><th scope="row">{escape(words(f"plan.{key}"))}</th>'
        f'<td><span class="chip {escape(value)}">{escape(words.table.get(f"values.{value}", value))}</span></td>'
        f"<td>{escape(words.said(reason))}</td></tr>"
        for key, value, reason in rows
    )
    table = f"<table><tbody>{body}</tbody></table>"
    if folded:
        return f"<details><summary>{escape(words(f'plan.{name}'))}</summary>{table}</details>"
    return f"<h3>{escape(words(f'plan.{name}'))}</h3>{table}"


def _warning(text: str) -> str:
    return f'<p class="warning">{escape(text)}</p>'


def _memory(memory: MemoryPlan, words: Words) -> str:
    """A bar as long as the device's memory, or as the need where that is more."""
    whole = max(memory.available, memory.total)
    parts = [(name, getattr(memory, name)) for name in MEMORY]
    shrink = memory.total / max(1, sum(part for _, part in parts))  # what overlaps is not there twice
    bars = "".join(
        f'<span class="part {name}" style="width:{100 * part * shrink / whole:.2f}%" '
        f'title="{escape(words(f"memory.{name}"))}: {size(part)}"></span>'
        for name, part in parts
    )
    limit = f'<span class="limit" style="left:{100 * memory.available / whole:.2f}%"></span>'
    legend = "".join(
        f'<li><i class="part {name}"></i>{escape(words(f"memory.{name}"))} {size(part)}</li>'
        for name, part in parts
        if part >= memory.total / 200
    )
    state, reason = memory.verdict.value.replace(" ", "-"), escape(words.said(memory.verdict.reason))
    return (
        f'<div class="memory {state}"><p><b>{escape(words("memory.title"))}</b> '
        f'<span class="verdict">{escape(words(f"memory.{state}"))}</span> {reason}</p>'
        f'<div class="bar" role="img" aria-label="{reason}">{bars}{limit}</div><ul>{legend}</ul></div>'
    )
