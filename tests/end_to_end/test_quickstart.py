"""The quickstart ends with answers that are right: exact answers to questions whose wordings were not trained."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halftune.data.sources.builtin.number_formats import questions

ROOT = Path(__file__).resolve().parents[2]
RIGHT, RIGHT_BEFORE = 0.8, 0.2  # shares of exact answers: at least with the adapter, at most without


@pytest.mark.slow
def test_most_test_questions_are_answered_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("quickstart_score", ROOT / "scripts/quickstart_score.py")
    assert spec is not None
    assert spec.loader is not None
    score = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(score)
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "halftune", "train", "--config", "configs/quickstart.yaml"]
    subprocess.run(command, check=True, env=offline, capture_output=True)
    asked = questions(held_out=True)[::4]  # not 3: that is one wording of each fact
    assert len(score.wrong_answers("runs/quickstart", asked)) <= (1 - RIGHT) * len(asked)
    assert len(score.wrong_answers("runs/quickstart", asked[::3], base=True)) >= (1 - RIGHT_BEFORE) * len(asked[::3])
