"""Operators, one folder for each."""

from fla.ops.rwkv7 import chunk_rwkv7

__all__ = ["chunk_rwkv7"]
