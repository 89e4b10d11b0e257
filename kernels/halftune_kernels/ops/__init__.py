"""The operators, a folder each: reference, CPU and Triton."""
