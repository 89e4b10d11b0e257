"""Runs that are killed with SIGKILL at random moments end as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.slow
def test_five_kills_end_bit_identically(tmp_path: Path) -> None:
    """A whole model, packed, and an adapter with dropout; ``scripts/kill_test.py`` makes a hundred, bf16 among them."""
    command = [sys.executable, str(SCRIPTS / "kill_test.py"), "--kills", "5", "--seed", "39", "--room", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills" in done.stdout


@pytest.mark.slow
def test_the_newest_checkpoint_is_valid_whenever_somebody_looks() -> None:
    """``python scripts/soak.py`` looks for a quarter of an hour."""
    command = [sys.executable, str(SCRIPTS / "soak.py"), "--minutes", "0.1", "--every", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "WRONG" not in done.stdout, done.stdout
    assert "saw" in done.stdout, done.stderr


@pytest.mark.slow
def test_two_kills_of_one_of_two_processes_end_bit_identically(tmp_path: Path) -> None:
    """``python scripts/kill_test.py --processes 2`` kills in adapters and DDP, too."""
    command = [sys.executable, str(SCRIPTS / "kill_test.py"), "--processes", "2", "--kills", "2"]
    command += ["--case", "fsdp2-full", "--room", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout
