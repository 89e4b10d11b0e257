"""Quantised weights: kept as the checkpoint has them, dequantised, or quantised on load; fused experts, too.

In: a folder, a plan's weight format.
Out: arguments of ``from_pretrained``; layers whose parts compute in the plan's dtype.
Imported by: `model.load`, `model.result`.
"""
