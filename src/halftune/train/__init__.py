"""Training: set-up, the loop, checkpoints, callbacks and the report."""
