"""Throws thousands of new inputs at everything that reads a file: no traceback, no hang, nothing lost.

python scripts/fuzz.py                    5,000 inputs, of every kind its share
python scripts/fuzz.py --inputs 500 recipes data
python scripts/fuzz.py --seed 7           the same inputs again

At the end stand, for each test, how many inputs it threw, how many were refused, and the CPU-seconds.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("recipes", "steps", "data", "models", "runs")


def main() -> int:
    """Runs the fuzz tests of the kinds asked for; the exit code is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all of them by default")
    parser.add_argument("--inputs", type=int, default=5000, help="how many, over all kinds")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="a new one by default")
    args = parser.parse_args()
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    files = [str(ROOT / "tests" / "fuzz" / f"test_fuzz_{kind}.py") for kind in args.kinds or KINDS]
    environment = {**os.environ, "HALFTUNE_FUZZ_INPUTS": str(args.inputs), "OMP_NUM_THREADS": "1"}
    print(f"seed {args.seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--hypothesis-seed={args.seed}", *files]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
