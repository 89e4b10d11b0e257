"""What libraries raise when a file that they read is damaged: far more than they document."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError

# Around one call of a library on a file of the user's, and nothing else: our own mistakes must not look like damage.
DAMAGE = (
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
)
# The same of a chat template that is rendered: it is a program, and can do whatever a program can.
TEMPLATE_FAULTS = (
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
    """What an error says, in one line; of a config.json that transformers refuses, which value and why."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, StrictDataclassError) and len(lines) > 1:  # "validation error for …:", then "ValueError: …"
        return f"config.json: {lines[1].strip().partition(': ')[2]}"
    return lines[0][:300]
