"""The doctor of a recipe whose model another recipe has yet to make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halftune.cli import main


def test_its_architecture_stands_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--config", "quickstart.yaml", "--hardware", "a100", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert left.value.code == 0, said
    assert said["trace"]["model"].startswith("builtin:qwen2-tiny")
    (note,) = (check for check in said["environment"] if check["name"] == "model")
    assert "quickstart-pretrain/final is not trained yet" in note["what"]
