"""Packing and attention, which hang together: not every backend keeps the samples of one row apart."""

from __future__ import annotations

from halftune.attention.linear import route_linear
from halftune.attention.plan import AttentionPlan
from halftune.attention.route import route_attention
from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.core.formats import Format
from halftune.hardware.facts import Hardware
from halftune.plan.packing import choose_packing
from halftune.plan.problem_collector import ProblemCollector

Rows = tuple[Choice[bool], AttentionPlan]


def choose_rows(
    config: RunConfig, hardware: Hardware, facts: ModelFacts, compute: Format, tried: ProblemCollector
) -> Rows | None:
    """Whether rows are packed, and the attention that computes them; None where ``tried`` has noted why not.

    Args:
        config, hardware, facts: what was asked, where it runs, the model.
        compute: dtype of attention.
        tried: takes what cannot be honoured.
    """

    def routed(*, packing: bool) -> AttentionPlan:
        return route_attention(section, hardware, facts, compute, packing=packing)

    section, remote = config.attention, config.model.trust_remote_code
    linear = tried.of(lambda: route_linear(section, hardware, facts))
    if linear is None:
        section = section.model_copy(update={"linear": "auto"})
        linear = route_linear(section, hardware, facts)
    layers = linear.chosen.value
    data = config.data
    packing = tried.of(
        lambda: choose_packing(data.packing, facts, trust_remote_code=remote, linear=layers, longest=data.max_length)
    )
    padded = tried.of(lambda: routed(packing=False))
    if packing is None or padded is None:
        return None
    if not packing.value:
        return packing, padded
    if config.data.packing.enabled is True:
        packed = tried.of(lambda: routed(packing=True))
        return None if packed is None else (packing, packed)
    try:
        packed = routed(packing=True)
    except PlanError:
        return Choice(False, f"attention: {padded.softmax.value} has no path for packed rows"), padded
    if section.backend == "auto" and packed.softmax.value == "eager" != padded.softmax.value:
        reason = f"attention: eager alone could pack this model's rows, and {padded.softmax.value} is faster padded"
        return Choice(False, reason), padded
    return packing, packed
