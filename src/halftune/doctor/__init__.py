"""The doctor: what of this environment is not as a run needs it, and which line of a model leaves the number format."""
