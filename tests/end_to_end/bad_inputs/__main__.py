"""Tries bad inputs and prints what each gets, as JSON: ``python -m bad_inputs quick`` those that need no torch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

from bad_inputs.case import attempt
from bad_inputs.table import CASES


def main(which: str) -> None:
    """Prints name → [exit code, message, whether torch was imported, CPU-seconds]."""
    found = {}
    with tempfile.TemporaryDirectory() as runs:
        os.environ["HALFTUNE_BAD_INPUT_RUNS"] = runs
        for case in CASES:
            if which == "all" or which == case.name or (which == "quick" and not case.needs_torch):
                began = time.process_time()
                answer = attempt(case)
                took = round(time.process_time() - began, 3)
                found[case.name] = [answer.code, answer.message, answer.torch, took]
    json.dump(found, sys.stdout)


main(sys.argv[1])
