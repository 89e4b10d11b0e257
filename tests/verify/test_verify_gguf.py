"""GGUF files by llama.cpp: honest copies pass. Skipped without llama-cpp-python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halftune.cli import main

Verdict = Callable[..., tuple[int, Any]]


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_a_gguf_copy_is_the_same(made: dict[str, Path], verdict: Verdict, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("llama_cpp")
    with pytest.raises(SystemExit) as ended:
        main(["export", str(made["run"]), "--output", str(tmp_path / "copy"), "--format", "gguf", "--gguf-type", kind])
    assert ended.value.code == 0
    status, found = verdict(made["result"], tmp_path / "copy")
    assert (status, found["findings"]) == (0, []), found
