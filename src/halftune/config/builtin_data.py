"""Names and descriptions of the builtin data sets."""

from __future__ import annotations

BUILTIN_DATA: dict[str, str] = {
    "stdlib-text": "plain text: docstrings and sources of this Python's standard library, a few megabytes",
    "python-docs": "about 1,500 questions and answers on Python's standard library",
    "number-formats": "questions and answers on number formats and GPUs, each fact in several wordings",
    "number-formats-test": "the same facts asked in wordings that number-formats does not have",
    "number-formats-text": "the same facts as plain text",
    "python-pairs": "python-docs with a rejected answer, from another question, for preference methods",
}
