"""Optional packages: imported on use, or an error with the command that installs them."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from halftune.core.errors import MissingPackageError

# distribution → halftune's extra that installs it; others are installed by name
_EXTRAS = {
    "flash-attn": "flash",
    "flash-linear-attention": "fla",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "gradio": "webui",
    "bitsandbytes": "bitsandbytes",
}


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def extra_line(extra: str) -> str:
    """Return the command that installs an extra from a checkout (halftune is not on a package index)."""
    return f'pip install -e ".[{extra}]"'


def pip_line(distribution: str) -> str:
    """Return the command that installs a distribution."""
    return extra_line(_EXTRAS[distribution]) if distribution in _EXTRAS else f"pip install {distribution}"


def need(module: str, *, why: str, distribution: str | None = None) -> ModuleType:
    """Import an optional module.

    Raises:
        MissingPackageError: it is not installed; the remedy is the pip command.
    """
    distribution = distribution or module.replace("_", "-")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{why} requires package {distribution}"
        raise MissingPackageError(what, remedy=pip_line(distribution), code="core.package_missing") from error
