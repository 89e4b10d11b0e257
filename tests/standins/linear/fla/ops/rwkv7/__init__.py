"""The operator of RWKV-7."""

from fla.ops.rwkv7.chunk import chunk_rwkv7

__all__ = ["chunk_rwkv7"]
