"""What is learned, and where the reference model comes from, if the method needs one."""

from __future__ import annotations

from halftune.config.run import RunConfig
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.plan.tree import NO_REFERENCE, MethodPlan


def plan_method(config: RunConfig) -> MethodPlan:
    """The method's part of the plan.

    Raises:
        PlanError: it needs a reference model, and all weights are trained.
    """
    method = config.method
    name = Choice(method.type, method.learns)
    if not method.needs_reference:
        return MethodPlan(name, NO_REFERENCE)
    if config.adapter.type == "none":
        raise PlanError(
            f"method: {method.type} compares with the model before training, which adapter: none does not keep",
            where="adapter",
            remedy="adapter: lora, without which the model is the reference",
            code="plan.no_reference_model",
        )
    return MethodPlan(
        name, Choice("adapter off", "the frozen model below the adapter: no further memory, a second forward pass")
    )
