"""What the recurrences over the rows of a sequence share: arguments, the scan in chunks in torch and in Triton, a step.

In: checked tensors of a call, decays for each head or each channel, samples of a packed row.
Out: `chunk_scan` in torch, `ChunkLaunch` and device functions in Triton, `delta_rule_step` for one token.
Imported by: the operators `gated_delta_rule`, `kda`, `rwkv7` and `ssd`.
"""
