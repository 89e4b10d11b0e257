"""Optional packages: imported when needed, or an error with the command that adds them."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from halftune.core.errors import MissingPackageError

# distribution name → the extra of halftune that brings it
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


def need(module: str, *, why: str, distribution: str | None = None) -> ModuleType:
    """Imports an optional module.

    Raises:
        MissingPackageError: it is not installed; the remedy is the pip line.
    """
    distribution = distribution or module.replace("_", "-")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        target = f'"halftune[{_EXTRAS[distribution]}]"' if distribution in _EXTRAS else distribution
        raise MissingPackageError(f"{why} needs the package {distribution}", remedy=f"pip install {target}") from error
