"""Fixtures of the operators' tests."""

from __future__ import annotations

from operator_checks import poisoned

__all__ = ["poisoned"]
