"""RWKV-7 as a Hugging Face model: flash-linear-attention's checkpoint format, computed by our own operators."""

from halftune.model.rwkv7.configuration import RWKV7Config
from halftune.model.rwkv7.modeling import RWKV7ForCausalLM

__all__ = ["RWKV7Config", "RWKV7ForCausalLM"]
