"""RWKV-7 as a Hugging Face model: flash-linear-attention's checkpoint format, computed by our own operators.

In: a config.json of RWKV-7.
Out: a Hugging Face model.
Imported by: `model.files`.
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from halftune.model.rwkv7.configuration import RWKV7Config


def _register() -> None:
    from halftune.model.rwkv7.modeling import RWKV7ForCausalLM  # whoever reads no RWKV-7 needs no operators

    # the config class is the key, so no other registration is replaced
    AutoModelForCausalLM.register(RWKV7Config, RWKV7ForCausalLM, exist_ok=True)


RWKV7Config.before_use.append(_register)
