"""The method's part of the plan: what is learned, and what it is compared with."""

from __future__ import annotations

from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.config.sections.method import GrpoMethod, ReferenceMethod
from halftune.config.sections.model import AdapterSection, LoraAdapter
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.plan.tree import NO_REFERENCE, MethodPlan, Plan
from halftune.plan.weights.score_head import score_head

_PASS = "one forward pass over all examples before training, 8 bytes per answer"
# (whether the base weights change, whether training starts from an adapter) → reason
PRECOMPUTED = {
    (True, False): f"training changes the base weights: {_PASS}",
    (True, True): f"training changes the base weights: {_PASS}",
    (False, True): f"the model with the adapter that training starts from: {_PASS}",
    (False, False): f"asked for: {_PASS}",
}
ADAPTER_OFF = {
    False: "the frozen model without the adapter: no extra memory, a second forward pass",
    True: "asked for: the base model without the adapter that training starts from, by a second forward pass",
}


def plan_method(config: RunConfig, facts: ModelFacts, teacher: Plan | None = None) -> MethodPlan:
    """The method's part of the plan. The reference is the model before training, with an adapter that it starts from,
    or the teacher.

    Raises:
        PlanError: the base model is asked for as the reference, and this run does not keep it.
    """
    method = config.method
    name = Choice(method.type, method.learns)
    if teacher is not None:
        storage, compute = teacher.precision.storage.value, teacher.precision.compute.value
        stored = f"{teacher.num_parameters.value:,} frozen weights in {storage}, computed in {compute}"
        return MethodPlan(name, Choice("teacher", f"{teacher.model}: {stored}"))
    if method.head == "score":
        return MethodPlan(name, NO_REFERENCE, score_head(facts))
    if isinstance(method, GrpoMethod) and method.beta:
        method = ReferenceMethod(reference="adapter_off")
    reference = _reference(method, config.adapter) if isinstance(method, ReferenceMethod) else NO_REFERENCE
    return MethodPlan(name, reference)


def _reference(method: ReferenceMethod, adapter: AdapterSection) -> Choice[str]:
    """How the model before training is kept.

    Raises:
        PlanError: this run does not keep it, and the method asks for it.
    """
    lora = adapter if isinstance(adapter, LoraAdapter) else None
    lost = adapter.type == "none" or (lora is not None and lora.reduces_base)
    if lost and method.reference == "adapter_off":
        raise PlanError(
            "this run does not keep the base model, which is asked for as the reference",
            where="method.reference",
            remedy="method.reference: auto",
            code="plan.no_reference_model",
        )
    continued = lora is not None and lora.name_or_path is not None
    if {"precomputed": True, "adapter_off": False}.get(method.reference, lost or continued):
        return Choice("precomputed", PRECOMPUTED[lost, continued])
    return Choice("adapter off", ADAPTER_OFF[continued])
