"""RWKV-7 as a Hugging Face model: flash-linear-attention's checkpoint format, computed by our own operators."""
