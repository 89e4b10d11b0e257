"""Batches of different lengths bring new shapes at every step: what a CPU keeps of each does not fill the memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halftune.cli import BEFORE_TORCH

SHAPES = """
import torch
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
weight = torch.randn(256, 256, dtype=torch.bfloat16)
for rows in range(1, 301):
    torch.randn(rows + 64, 256, dtype=torch.bfloat16) @ weight
    if rows == 150:
        before = resident()
print((resident() - before) // 2**20)
"""


def test_what_is_kept_of_shapes_is_limited_before_torch_is_imported() -> None:
    code = "import os, sys; from halftune.cli import run_verb\n"
    code += "try: run_verb('train', ['--no-such-option'])\nexcept SystemExit: pass\n"
    code += "limits = {name: int(text) for name, text in os.environ.items() if name.endswith('CACHE_CAPACITY')}\n"
    code += "print(sorted(limits.items()), 'torch' in sys.modules)"
    clean = {name: value for name, value in os.environ.items() if name not in BEFORE_TORCH}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout == "[('LRU_CACHE_CAPACITY', 64), ('ONEDNN_PRIMITIVE_CACHE_CAPACITY', 64)] False\n"


@pytest.mark.nightly  # by the memory of a process, which depends on the instructions of the processor
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc")
def test_products_of_many_shapes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHAPES], env=os.environ | BEFORE_TORCH, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 25, "MiB for 150 further shapes, the caches being full; 70 to 130 where each is kept"
