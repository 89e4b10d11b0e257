"""Makes docs/reference/errors.md: every bad input of the table is tried, and what is said is written down.

python scripts/errors_page.py > docs/reference/errors.md
python scripts/errors_page.py --seconds          CPU-seconds of each, in a process of its own
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests" / "end_to_end"
sys.path.insert(0, str(TESTS))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bad_inputs.case import attempt  # noqa: E402  the path is set above
from bad_inputs.page import page  # noqa: E402  the path is set above
from bad_inputs.table import CASES  # noqa: E402  the path is set above


def measure() -> None:
    """Prints the CPU-seconds of every case, start of Python and imports included, the slowest first."""
    took = []
    for case in CASES:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "bad_inputs", case.name]
        subprocess.run(command, cwd=TESTS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        took.append((seconds, "with torch" if case.needs_torch else "", case.name))
    for seconds, torch, name in sorted(took, reverse=True):
        print(f"{seconds:6.2f} s  {torch:10}  {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", action="store_true")
    if parser.parse_args().seconds:
        measure()
    else:
        with tempfile.TemporaryDirectory() as runs:
            os.environ["HALFTUNE_BAD_INPUT_RUNS"] = runs
            print(page({case.name: attempt(case) for case in CASES}), end="")
