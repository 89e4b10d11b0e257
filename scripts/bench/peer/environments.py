"""Sets the frameworks up, each in a virtual environment of its own, with the CPU build of torch."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from .fixture import make_fixture
from .frameworks import FRAMEWORKS

TORCH = "torch==2.13.0"  # pinned: where the index offers a CPU build of it, pip takes that one
INSTALLED = ".installed"


def set_up(work: Path, data: Path | None, names: Sequence[str]) -> None:
    """Installs what is missing, then makes models and data.

    Raises:
        SystemExit: models and data are missing and ``data`` is not given.
        subprocess.CalledProcessError: an installation failed.
    """
    work.mkdir(parents=True, exist_ok=True)
    constraints = work / "constraints.txt"
    constraints.write_text(f"{TORCH}\n")
    for name in names:
        if FRAMEWORKS[name].packages:
            install(name, work / "environments" / name, constraints)
    if data is None and not (work / "fixture" / "tune").is_dir():
        sys.exit("--setup needs --data, a folder with alpaca_en_demo.json and identity.json")
    if data is not None:
        make_fixture(work / "fixture", data.resolve())


def install(name: str, folder: Path, constraints: Path) -> None:
    """One framework; an environment that is complete already is left alone."""
    framework = FRAMEWORKS[name]
    if (folder / INSTALLED).exists():
        return
    print(f"installing {name} into {folder}", flush=True)
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "-c", str(constraints), *framework.packages], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    for command in framework.afterwards:
        subprocess.run([part.format(python=python, site=site) for part in command], check=True)
    (folder / INSTALLED).touch()
