"""The doctor: checks of the environment, and a trace of the lines of a model that promote dtypes."""
