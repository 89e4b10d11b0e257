"""A result whose answers end, its base and its exports; and the verdict of the command."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import checkpoint, finished_run

from halftune.cli import main
from halftune.verify.measure import score
from halftune.verify.probes import PROBES, Probe
from halftune.verify.reference import open_reference
from halftune.verify.targets.folder import load_plain

LAYERS, BOS = 4, 1  # <|im_start|>, with which the template begins
Verdict = Callable[..., tuple[int, Any]]


def edited(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cut(answer: list[int], stop: int) -> list[int]:
    return answer[: answer.index(stop) + 1] if stop in answer else answer


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A result with probes whose answers end, its base, and its export in bf16."""
    folder = tmp_path_factory.mktemp("verify")
    base = checkpoint(
        folder / "base", torch.bfloat16, vocab_size=4096, num_hidden_layers=LAYERS, tie_word_embeddings=True
    )
    adapter = {"type": "lora", "rank": 4, "alpha": 16, "target_modules": "all-linear"}
    run = finished_run(folder / "run", base, adapter=adapter)
    reference = open_reference(run / "final")
    first = reference.probes.probes
    # a token of many answers, so that greedy answers end
    ((stop, _),) = Counter(token for one in first for token in set(one.answer[2:])).most_common(1)
    edited(base / "generation_config.json", eos_token_id=[0, stop])
    pairs = [(one.prompt, cut(one.answer, stop)) for one in first]
    model, _ = load_plain(run / "final")
    trained = score(model, pairs, 0, torch.device("cpu"))
    probes = [
        Probe(
            **{**dict(one), "answer": answer, "ended": answer[-1] == stop, "base": None}
            | {"logprobs": own.logprobs, "top": own.top}
        )
        for one, (_, answer), own in zip(first, pairs, trained, strict=True)
    ]
    result = folder / "result"
    shutil.copytree(run / "final", result)
    (result / "manifest.json").unlink()
    (result / PROBES).write_text(
        reference.probes.model_copy(update={"probes": probes, "bos": BOS, "stops": [0, 2, stop]}).as_json()
    )
    assert command("export", str(run), "--output", str(folder / "merged")) == 0
    assert command("export", str(run), "--output", str(folder / "merged-fp32"), "--dtype", "fp32") == 0
    return {"run": run, "result": result, "base": base, "merged": folder / "merged"}


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


@pytest.fixture
def verdict(capsys: pytest.CaptureFixture[str]) -> Verdict:
    """``halftune verify``: its exit code, and its report."""

    def judged(reference: Path, target: Path | str, *more: str) -> tuple[int, Any]:
        capsys.readouterr()
        status = command("verify", "--reference", str(reference), "--against", str(target), "--json", *more)
        return status, json.loads(capsys.readouterr().out)

    return judged
