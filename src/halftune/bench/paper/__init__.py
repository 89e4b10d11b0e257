"""The paper profiler: a training step on fake CUDA tensors, every kernel counted and timed by a roofline.

In: a recipe and the description of a GPU.
Out: predicted times of a step, kernel by kernel.
Imported by: `cli`.
"""
