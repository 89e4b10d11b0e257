"""Operators of halftune, usable alone. This package never imports halftune."""
