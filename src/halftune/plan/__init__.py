"""The plan of a run: computed once, from data alone, and never revised below.

``resolve(config, hardware, facts)`` is pure: no weights, no device, no torch.
"""

from halftune.plan.explain import explain
from halftune.plan.resolve import resolve
from halftune.plan.tree import BatchPlan, MemoryPlan, ParallelPlan, Plan, WeightsPlan, to_dict

__all__ = ["BatchPlan", "MemoryPlan", "ParallelPlan", "Plan", "WeightsPlan", "explain", "resolve", "to_dict"]
