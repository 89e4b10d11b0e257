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


@pytest.mark.slow
def test_a_server_of_llama_cpp(made: dict[str, Path], verdict: Verdict, tmp_path: Path) -> None:
    """Its own form of log-probabilities; the format is the one that it names. Skipped without xllamacpp."""
    library: Any = pytest.importorskip("xllamacpp")
    folder = tmp_path / "copy"
    with pytest.raises(SystemExit) as ended:
        main(["export", str(made["run"]), "--output", str(folder), "--format", "gguf", "--gguf-type", "q8_0"])
    assert ended.value.code == 0
    parameters = library.CommonParams()
    parameters.model.path = str(next(folder.glob("*.gguf")))
    parameters.n_ctx, parameters.n_parallel, parameters.port, parameters.model_alias = 4096, 1, 0, ["mine"]
    parameters.cpuparams.n_threads = 1
    server = library.Server(parameters)
    status, found = verdict(made["result"], server.listening_address)
    other, named = verdict(made["result"], server.listening_address, "--format", "fp32")
    assert (status, found["findings"], found["answer"]) == (0, [], "same"), found
    assert found["numbers"]["to_trained"] > 0
    assert (other, named["findings"][0]["code"]) == (4, "weights.differ")
