"""Resolves the plan from config, hardware and model facts."""

from __future__ import annotations

from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.hardware import Hardware
from halftune.plan.constraints import constrained
from halftune.plan.decide import decide
from halftune.plan.inference import resolve_teacher
from halftune.plan.request import Request
from halftune.plan.tree import Plan


def resolve(config: RunConfig, hardware: Hardware, facts: ModelFacts, world_size: int = 1) -> Plan:
    """Decide everything about a run; pure, and nothing below decides again.

    Args:
        config: what was asked.
        hardware: the machine, probed or from the catalogue.
        facts: the model's config.json as facts.
        world_size: processes, one device each.

    Raises:
        PlanError: machine or model cannot honour what was asked; lists everything, with reasons and remedies.
    """
    request = constrained(Request(config, facts))
    distilled = config.method.teacher_model is not None
    teacher = resolve_teacher(request.config, hardware, facts.teacher) if distilled else None
    return decide(request, hardware, world_size, teacher)
