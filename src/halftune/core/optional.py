"""Optional packages: imported when needed, or an error with the command that adds them."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from halftune.core.errors import MissingPackageError

# distribution name → the extra of halftune that brings it; every other one comes by its own name
_EXTRAS = {
    "flash-attn": "flash",
    "flash-linear-attention": "fla",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "gradio": "webui",
}


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it; None where it is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def extra_line(extra: str) -> str:
    """The command that adds an extra, in a checkout: no package index has halftune under a name of ours."""
    return f'pip install -e ".[{extra}]"'


def pip_line(distribution: str) -> str:
    """The command that adds a distribution."""
    return extra_line(_EXTRAS[distribution]) if distribution in _EXTRAS else f"pip install {distribution}"


def need(module: str, *, why: str, distribution: str | None = None) -> ModuleType:
    """Imports an optional module.

    Raises:
        MissingPackageError: it is not installed; the remedy is the pip line.
    """
    distribution = distribution or module.replace("_", "-")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"{why} needs the package {distribution}", remedy=pip_line(distribution)) from error
