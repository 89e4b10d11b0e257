"""The paper profiler: a training step on fake CUDA tensors, every kernel counted and timed by a roofline."""
