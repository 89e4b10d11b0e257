"""What a verb says when libraries fail: torch.compile without a compiler, or stopped; formats that do not agree."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tiny_model import plan

from halftune.cli.failure import report_error
from halftune.model.attention.register import registered_attention


def without_compiler(graph: Any, inputs: Any) -> NoReturn:
    raise RuntimeError("No working C++ compiler found in /nonexistent")


def test_a_failure_of_torch_compile_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=without_compiler)
    with pytest.raises(Exception, match=r"No working C\+\+") as caught:
        compiled(torch.ones(2))
    assert report_error(caught.value, "train", show=False) == 5
    said = capsys.readouterr().err
    assert "torch.compile failed: BackendCompilerFailed" in said
    assert "training.torch_compile: false" in said
    assert "No working C++ compiler found in /nonexistent" in said
    assert "Traceback" not in said
    assert "bug in halftune" not in said


def stopped_compiler(graph: Any, inputs: Any) -> NoReturn:
    try:
        subprocess.run("kill -TERM $$", shell=True, check=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError("C++ compile error") from error
    raise AssertionError


def test_a_signal_that_reached_the_compiler_stops_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 2, backend=stopped_compiler)
    with pytest.raises(Exception, match=r"C\+\+ compile error") as caught:
        compiled(torch.ones(2))
    assert report_error(caught.value, "train", show=False) == 143
    said = capsys.readouterr().err
    assert "stopped by SIGTERM while torch.compile" in said
    assert "failed" not in said


@pytest.mark.parametrize(("mode", "code"), [("off", 4), ("cast", 70)])
def test_formats_that_nobody_brought_together_name_the_guard_that_is_off(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, code: int
) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    settled = plan("bf16", "fp32")
    settled = replace(settled, attention=replace(settled.attention, guard=mode))
    with registered_attention(settled):
        query, key = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8, dtype=torch.bfloat16)
        with pytest.raises(RuntimeError, match="same dtype") as caught:
            torch.nn.functional.scaled_dot_product_attention(query, key, key)
        assert report_error(caught.value, "train", show=False) == code
    assert ("attention.guard: cast" in capsys.readouterr().err) == (mode == "off")
