"""Finds the line that promoted a tensor: runs a model under the plan's autocast and records torch calls."""
