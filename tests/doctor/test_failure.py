"""What a verb says when a compiler that torch.compile needs is not there: the sentence and the remedy, no traceback."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from halftune.cli.failure import tell


def without_compiler(graph: Any, inputs: Any) -> NoReturn:
    raise RuntimeError("No working C++ compiler found in /nonexistent")


def test_a_failure_of_torch_compile_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = torch.compile(lambda x: x + 1, backend=without_compiler)
    with pytest.raises(Exception, match=r"No working C\+\+") as caught:
        compiled(torch.ones(2))
    assert tell(caught.value, "train", show=False) == 5
    said = capsys.readouterr().err
    assert "torch.compile fails: BackendCompilerFailed" in said
    assert "training.torch_compile: false, or a compiler that works (g++, or CXX" in said
    assert "No working C++ compiler found in /nonexistent" in said
    assert "Traceback" not in said
    assert "an error in halftune" not in said
