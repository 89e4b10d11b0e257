"""The plan of a recipe for the page: what every choice would mean here, or on another machine. No torch, no device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from halftune.config.facts.model import ModelFacts
from halftune.config.load import LoadedConfig
from halftune.config.recipe_facts import model_facts
from halftune.config.run import RunConfig
from halftune.config.shape import choices, shape_at
from halftune.core.errors import HalftuneError, PlanError
from halftune.hardware import Hardware
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.probe import probe
from halftune.plan import Plan, resolve

HERE = ""
"""The name of this machine among those that ``outlook`` can plan for."""


@dataclass(frozen=True)
class Outlook:
    """What the page shows about a plan.

    Attributes:
        plan: None where the machine or the model cannot honour what was asked.
        problem: why it cannot.
        impossible: dotted key → word → why this machine cannot run it.
    """

    plan: Plan | None
    problem: HalftuneError | None
    impossible: dict[str, dict[str, str]]


def machines() -> dict[str, Hardware]:
    """Machines to plan for by name, this one first."""
    return {HERE: this_machine(), **CATALOGUE}


@cache
def this_machine() -> Hardware:
    """This machine, looked at once: without a device context, and without torch."""
    return probe()


def outlook(loaded: LoadedConfig, machine: str) -> Outlook:
    """Plans a recipe for a machine, and tries every other precision and attention.

    Args:
        loaded: the recipe.
        machine: a name of ``machines()``.
    """
    try:
        hardware = this_machine() if machine == HERE else lookup(machine)
        facts = model_facts(loaded)
    except HalftuneError as error:
        return Outlook(None, error, {})
    impossible = {
        "precision.compute": _impossible_precisions(loaded.run, hardware, facts),
        "attention.backend": _impossible_attentions(loaded.run, hardware, facts),
    }
    try:
        return Outlook(resolve(loaded.run, hardware, facts), None, impossible)
    except PlanError as error:
        return Outlook(None, error, impossible)


def _impossible_precisions(run: RunConfig, hardware: Hardware, facts: ModelFacts) -> dict[str, str]:
    """Words of ``precision`` that cannot run, whatever the attention."""
    return _impossible(_with(run, "attention", "backend", "auto"), "precision", "compute", hardware, facts)


def _impossible_attentions(run: RunConfig, hardware: Hardware, facts: ModelFacts) -> dict[str, str]:
    """Words of ``attention`` that cannot run in the precision that was asked for, where that one can run."""
    if _objection(_with(run, "attention", "backend", "auto"), hardware, facts):
        run = run.model_copy(update={"precision": type(run.precision)()})
    return _impossible(run, "attention", "backend", hardware, facts)


def _impossible(run: RunConfig, section: str, field: str, hardware: Hardware, facts: ModelFacts) -> dict[str, str]:
    shape = shape_at((section, field))
    assert shape is not None
    tried = {word: _objection(_with(run, section, field, word), hardware, facts) for word in choices(shape)}
    return {word: why for word, why in tried.items() if why}


def _with(run: RunConfig, section: str, field: str, word: str) -> RunConfig:
    changed = run.__dict__[section].model_copy(update={field: word})
    return run.model_copy(update={section: changed})


def _objection(run: RunConfig, hardware: Hardware, facts: ModelFacts) -> str:
    try:
        resolve(run, hardware, facts)
    except PlanError as error:
        first = error.problems[0].what
        return first.partition(" is unavailable: ")[2] or first
    return ""
