"""Exceptions that libraries raise for corrupt files; more than they document."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError

# Catch only around a single library call on a user's file, so that bugs here do not look like corrupt files.
LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,  # a RecursionError, too
    ImportError,
    AssertionError,
    SafetensorError,
    StrictDataclassError,
)
# Exceptions of rendering a chat template, which is a program.
TEMPLATE_ERRORS = (
    TemplateError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


def first_line(error: BaseException) -> str:
    """The first line of an error, with the second after a colon.

    For a config.json rejected by transformers: the value and the reason.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, StrictDataclassError) and len(lines) > 1:  # "validation error for …:", then "ValueError: …"
        return f"config.json: {lines[1].strip().partition(': ')[2]}"
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])[:300]
