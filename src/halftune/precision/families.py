"""What is known about number formats of model families: what must stay fp32, and what overflows in fp16."""

from __future__ import annotations

from halftune.config.facts.model import ModelFacts

# Trained in bf16 with activations beyond fp16's 65,504: fp16 runs of these give inf or NaN.
OVERFLOWS_IN_FP16 = ("gemma", "t5", "mt5", "umt5", "ul2", "recurrent_gemma", "vaultgemma")

_STATE = (r"(^|\.)A_log$", r"(^|\.)dt_bias$")  # decay of a recurrence: an error here grows with every token
# Small, and their choice of experts is a threshold: trained and saved unrounded. Under autocast their matmul, like any
# other, runs in the compute dtype, unless the model's code leaves autocast for it.
_ROUTER = (r"(^|\.)(gate|router)\.(weight|bias)$", r"e_score_correction_bias$")
_BY_FAMILY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "nemotron_h"), (r"\.mixer\.D$",)),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "zamba2"), (r"\.mamba\.D$",)),
    "rwkv7": (r"\.attn\.(k_k|k_a|r_k)$", r"\.attn\.[wav]_lora\.lora\.2\.bias$"),
    "gpt_oss": (r"(^|\.)(norm|input_layernorm|post_attention_layernorm)\.weight$",),
}
_WHY = {"rwkv7": "the bias of the decay and the vectors that scale keys are small, and act on every token"}


def keep_fp32(facts: ModelFacts) -> tuple[tuple[str, ...], str]:
    """Patterns of parameters that stay fp32 whatever the plan's storage dtype is, and why."""
    patterns: tuple[str, ...] = ()
    reasons = []
    if facts.linear_layers:
        patterns += _STATE
        reasons.append("the decay of a recurrence adds up over the whole sequence")
    if facts.num_experts:
        patterns += _ROUTER
        reasons.append(
            "routers are kept, trained and saved unrounded (under autocast their matmul is rounded like any other)"
        )
    if facts.model_type in _BY_FAMILY:
        patterns += _BY_FAMILY[facts.model_type]
        reasons.append(_WHY.get(facts.model_type, f"{facts.model_type} was made with them in fp32"))
    return patterns, "; ".join(reasons) or "nothing in this family needs it"


def overflows_in_fp16(facts: ModelFacts) -> bool:
    """Whether the family is known to leave fp16's range."""
    return facts.model_type.startswith(OVERFLOWS_IN_FP16)
