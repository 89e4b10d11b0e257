"""Attention: what each backend can do, the one place that chooses, and the paths of packed rows."""
