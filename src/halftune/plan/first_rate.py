"""Whether a recipe without a learning rate gets one that suits its method."""

from __future__ import annotations

from halftune.config.run import RunConfig

_PAIRS = ("dpo", "kto", "simpo", "orpo", "cpo")
# The starting values of docs/how-to/first-values.md.
_OF_ADAPTERS = {**dict.fromkeys(_PAIRS, 5e-6), "grpo": 1e-5, "reward": 1e-4}
_OF_ALL_WEIGHTS = {**dict.fromkeys(_PAIRS, 5e-7), "grpo": 1e-6}
_FULL = 1e-5


def rate_warning(config: RunConfig) -> list[str]:
    """Warn of the default learning rate, which is LoRA's with sft, where docs/how-to/first-values.md has another."""
    training, method = config.training, config.method.type
    if "learning_rate" in training.model_fields_set or not training.optim.startswith("adam"):
        return []
    full = config.adapter.type == "none"
    start = _OF_ALL_WEIGHTS.get(method, _FULL) if full else _OF_ADAPTERS.get(method, training.learning_rate)
    if start == training.learning_rate:
        return []
    trained = "all weights" if full else "an adapter"
    return [
        f"training.learning_rate is not set, and its default of {training.learning_rate:g} is for LoRA with sft: "
        f"{method} of {trained} usually starts at {start:g}."
    ]
