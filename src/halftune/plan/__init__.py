"""The plan of a run: computed once, from data alone, and never revised below.

``resolve(config, hardware, facts)`` is pure: no weights, no device, no torch.

In: a `RunConfig`, `Hardware`, `ModelFacts`.
Out: a `Plan`, or every reason against it.
Imported by: `api`, `bench`, `certify`, `cli`, `data`, `doctor`, `evaluate`, `export`, `halftune_webui`, `model`,
    `serve`, `train`.
"""

from halftune.plan.explain import explain
from halftune.plan.resolve import resolve
from halftune.plan.tree import BatchPlan, MemoryPlan, ParallelPlan, Plan, WeightsPlan, to_dict

__all__ = ["BatchPlan", "MemoryPlan", "ParallelPlan", "Plan", "WeightsPlan", "explain", "resolve", "to_dict"]
