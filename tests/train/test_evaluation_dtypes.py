"""Evaluation computes in the plan's format, whatever the checkpoint's own dtype is."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import checkpoint

from halftune.config.builtin_models import VOCAB_SIZE
from halftune.train.loop.evaluate import evaluate
from halftune.train.run_folder.start_or_resume import RunFolder
from halftune.train.setup import build

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize(("own", "precision", "adapter"), itertools.product(DTYPES, ("bf16", "fp32"), ("lora", "none")))
def test_every_cell(recipe: Any, tmp_path: Path, own: str, precision: str, adapter: str) -> None:
    base = checkpoint(tmp_path / "base", DTYPES[own], vocab_size=VOCAB_SIZE)
    loaded, plan = recipe(
        f"model.name_or_path={json.dumps(str(base))}",
        "model.tokenizer=builtin:qwen2-tiny",
        f"precision={precision}",
        f"adapter={json.dumps({'type': adapter})}",
        "data.eval_split=8",
    )
    run = build(loaded, plan, RunFolder(tmp_path, None, finished=False))
    seen: set[torch.dtype] = set()
    for name, module in run.model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    measured = evaluate(run)
    assert measured is not None
    assert 0 < measured["eval_loss"] < 20
    assert seen == {DTYPES[precision]}
