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
from halftune.train.folder import RunFolder
from halftune.train.interrupt import Interrupts
from halftune.train.setup import build
from halftune.train.trainer import Trainer
from halftune.train.validation import evaluate

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
    session = build(loaded, plan, tmp_path)
    stepper = Trainer(session, RunFolder(tmp_path, None, finished=False), Interrupts()).attempts.stepper
    seen: set[torch.dtype] = set()
    for name, module in session.run.model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.register_forward_hook(lambda m, args, out: seen.add(out.dtype))
    assert session.eval_feed is not None
    loss = evaluate(stepper, session.run.model, session.eval_feed)
    assert loss is not None
    assert 0 < loss < 20
    assert seen == {DTYPES[precision]}
