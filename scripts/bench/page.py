"""Measures everything on docs/benchmarks.md again and rewrites its tables, with this machine and these versions.

  python scripts/bench/page.py                            all but the other frameworks (about 40 minutes)
  python scripts/bench/page.py startup growth             these sections
  python scripts/bench/page.py peers --work FOLDER        the other frameworks, set up by peers.py --setup

A section of the page stands between ``<!-- name -->`` and ``<!-- /name -->``; the words around are written by hand.
A section that fails keeps what it had. One thread throughout; measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from halftune import __version__
from halftune.hardware.probe import probe

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
PACKAGES = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class Section:
    """What is measured by one command.

    Attributes:
        command: arguments of Python, from the repository's root.
        fenced: the output is text, not Markdown.
    """

    command: tuple[str, ...]
    fenced: bool = False


SECTIONS = {
    "startup": Section(("scripts/bench/startup.py",)),
    "bench": Section(
        (
            *("-m", "halftune", "bench", "--config", "scripts/bench/page.yaml", "--steps", "15"),
            *("--vary", "data.packing=false", "--vary", "adapter=none", "--vary", "precision=bf16"),
        ),
        fenced=True,
    ),
    "growth": Section(("scripts/bench/growth.py", "--plot", "docs/images/growth.png")),
    "step": Section(("scripts/bench/step.py",)),
    "loss-memory": Section(("scripts/bench/loss_memory.py",)),
    "linear-attention": Section(("scripts/bench/linear_attention.py",)),
    "precision": Section(("scripts/bench/cpu_precision.py",)),
    "memory": Section(("scripts/bench/memory_estimate.py",)),
    "memory-held-out": Section(("scripts/bench/memory_estimate.py", "--held-out")),
    "peers": Section(("scripts/bench/peers.py", "--work", "{work}", "--quiet")),
}


def machine() -> str:
    """This machine and these versions in one line."""
    hardware = probe()
    device = hardware.devices[0]
    cores = "1 core" if hardware.cpu_cores == 1 else f"{hardware.cpu_cores} cores"
    memory = f"{cores}, {hardware.host_memory_bytes / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    # Ratios differ by instruction set, and one name stands for several processors.
    vectors = "avx512_bf16" if "avx512_bf16" in device.features else torch.backends.cpu.get_cpu_capability()
    name = f"{device.name} ({vectors})"
    return (
        f"{name}, {memory}, {platform.system()}; Python {platform.python_version()}, {versions}; "
        f"halftune {__version__}{_commit()}"
    )


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return f" at {asked.stdout.strip()}" if asked.returncode == 0 else ""


def measured(section: Section, work: Path | None) -> str | None:
    """The section's text, or None where its command failed (which it has told on standard error)."""
    words = [word.format(work=work) for word in section.command]
    began = time.time()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode or not done.stdout.strip():
        return None
    minutes = (time.time() - began) / 60
    shown = [word if word != str(work) else "FOLDER" for word in words]
    command = " ".join(f'"{word}"' if " " in word else word for word in ["python", *shown])
    body = done.stdout.strip()
    if section.fenced:
        body = f"```text\n{body}\n```"
    return f"{body}\n\n`{command}`, {time.strftime('%d %B %Y')}, {minutes:.0f} min; {machine()}."


def replaced(page: str, name: str, body: str) -> str:
    """The page with a section's body exchanged.

    Raises:
        SystemExit: the page has no such section.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{PAGE.relative_to(ROOT)} has no section between {start} and {end}")
    return f"{before}{start}\n{body}\n{end}{after}"


def main() -> int:
    """Measures the sections one after the other; each is written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--work", type=Path, help="the folder of peers.py")
    args = parser.parse_args()
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    names = args.sections or [name for name in SECTIONS if name != "peers" or args.work]
    if "peers" in names and args.work is None:
        parser.error("peers needs --work FOLDER")
    failed = []
    for name in names:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        replaced(PAGE.read_text(encoding="utf-8"), name, "")  # before minutes are spent
        body = measured(SECTIONS[name], args.work.resolve() if args.work else None)
        if body is None:
            failed.append(name)
        else:
            PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), name, body), encoding="utf-8")
    if failed:
        print(f"failed, and left as they were: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
