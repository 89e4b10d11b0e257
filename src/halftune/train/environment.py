"""``environment.json``: what a run was made with, so that it can be made again."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halftune import __version__
from halftune.core.optional import version_of
from halftune.hardware.facts import Hardware

# What numbers and data depend on; the optional ones are listed where they are installed.
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "triton",
    "flash-attn",
    "flash-linear-attention",
    "liger-kernel",
    "bitsandbytes",
)


def environment(hardware: Hardware, fingerprints: dict[str, str], folder: Path | None = None) -> dict[str, Any]:
    """The environment as plain data.

    Args:
        hardware: the machine.
        fingerprints: data source → fingerprint of its content.
        folder: whose git commit is noted: that of the recipe and the data; the working directory by default.
    """
    machine = asdict(hardware)
    for device in machine["devices"]:
        device["features"] = sorted(device["features"])
    return {
        "halftune": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "hardware": machine,
        "git": git_state(folder or Path.cwd()),
        "data": fingerprints,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the work tree that ``folder`` stands in and whether it was changed since; None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
