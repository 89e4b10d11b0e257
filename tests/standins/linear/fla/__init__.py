"""A CPU stand-in of flash-linear-attention with its layout: layers of its own, which call operators of its own."""
