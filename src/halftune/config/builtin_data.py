"""Names of the builtin data sets, for checks that need nothing else."""

from __future__ import annotations

BUILTIN_DATA: dict[str, str] = {
    "stdlib-text": "plain text: docstrings and sources of this Python's standard library, a few megabytes",
    "python-docs": "about 1,500 questions and answers on Python's standard library",
}
