"""Attention: the backends' capabilities, the choice among them, and attention over packed rows."""
