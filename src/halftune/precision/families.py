"""Parameters that stay fp32 in every storage dtype."""

from __future__ import annotations

from halftune.config.facts.model import ModelFacts

_STATE = (r"(^|\.)A_log$", r"(^|\.)dt_bias$")  # decay of a recurrence: errors grow with every token
# Small, and the choice of experts is sensitive to rounding: trained and saved in fp32. Under autocast their matmul runs
# in the compute dtype, unless the model's code disables autocast.
_ROUTER = (r"(^|\.)(gate|router)\.(weight|bias)$", r"e_score_correction_bias$")


def keep_fp32(facts: ModelFacts) -> tuple[tuple[str, ...], str]:
    """Return the patterns of parameters that stay fp32, and the reason."""
    patterns: tuple[str, ...] = ()
    reasons = []
    if facts.linear_layers:
        patterns += _STATE
        reasons.append("errors in recurrent decays accumulate over the sequence")
    if facts.num_experts:
        patterns += _ROUTER
        reasons.append("routers are trained and saved in fp32 (under autocast their matmul uses the compute dtype)")
    if facts.family.keep_fp32:
        patterns += facts.family.keep_fp32
        reasons.append(facts.family.why_fp32 or f"{facts.model_type} defines them in fp32")
    return patterns, "; ".join(reasons) or "not needed in this family"
