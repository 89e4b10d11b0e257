"""Measures everything on docs/measurements/benchmarks.md again and rewrites its tables, with machine and versions.

  python scripts/bench/page.py                            everything (about 80 minutes)
  python scripts/bench/page.py startup growth             these sections

A section of the page stands between ``<!-- name -->`` and ``<!-- /name -->``; the words around are written by hand.
A section that fails keeps what it had. One thread throughout; measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from harness import DOCS, ROOT, machine, replace_section

PAGE = DOCS / "benchmarks.md"
BENCH = "-m halftune bench --config scripts/bench/page.yaml --steps 15"
# section → arguments of Python, from the repository's root
SECTIONS = {
    "startup": "scripts/bench/startup.py",
    "bench": f"{BENCH} --vary data.packing=false --vary adapter=none --vary precision=bf16",
    "growth": "scripts/bench/beside_trainer.py",
    "loss-memory": "scripts/bench/loss_memory.py",
    "linear-attention": "scripts/bench/operators.py",
    "precision": "scripts/bench/cpu_precision.py",
    "memory": "scripts/bench/memory_estimate.py",
    "memory-held-out": "scripts/bench/memory_estimate.py --held-out",
}


def measured(command: str) -> str | None:
    """The section's text, or None where its command failed (which it has told on standard error)."""
    began = time.time()
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    body = done.stdout.strip()
    if done.returncode or not body:
        return None
    if not body.startswith("|") and "\n|" not in body:  # text, not Markdown
        body = f"```text\n{body}\n```"
    minutes = (time.time() - began) / 60
    return f"{body}\n\n`python {command}`, {time.strftime('%d %B %Y')}, {minutes:.0f} min; {machine()}."


def main() -> int:
    """Measures the sections one after the other; each is written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    names = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    failed = []
    for name in names:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        body = measured(SECTIONS[name])
        if body is None:
            failed.append(name)
        else:
            replace_section(PAGE, name, body)
    if failed:
        print(f"failed, and left as they were: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
