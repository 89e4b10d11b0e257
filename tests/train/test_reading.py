"""A model that processes share is read by each of them: its rows, its formats, and what is known of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import in_processes
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from halftune.model.files.architectures import no_progress_bars
from halftune.model.load import lazy_weights
from halftune.model.load.load import load_model
from halftune.precision.dtypes import kept_names
from halftune.train import setup
from halftune.train.parallel import make_strategy
from halftune.train.parallel.processes import make_accelerator
from halftune.train.parallel.shards import own_rows

KEPT = "shared_expert_gate"  # one row: with two processes one has none of it


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts that lie apart in the files, a head that is the embedding, a weight of one row."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    routed: dict[str, Any] = {"num_experts": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    folder = tmp_path_factory.mktemp("experts")
    config = Qwen2MoeConfig(**sizes, **routed, num_key_value_heads=1, vocab_size=513, tie_word_embeddings=True)
    with no_progress_bars():
        Qwen2MoeForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="40KB")
    return folder


def test_each_process_holds_its_rows_as_one_would(recipe, experts: Path) -> None:
    """The model's own code keeps a weight in fp32; sharding makes new weights, and that is still known of them."""
    model = (f"model.name_or_path={experts}", "model.tokenizer=builtin:qwen2-tiny", "adapter=none")
    loaded, plan = recipe(*model, "precision=bf16", "distributed.strategy=fsdp2", machine="cpu-amx", world_size=2)

    def work(rank: int) -> None:
        get = PreTrainedModel._get_dtype_plan
        PreTrainedModel._get_dtype_plan = lambda self, dtype: {**get(self, dtype), KEPT: torch.float32}  # type: ignore[method-assign]
        alone = load_model(loaded.run.model, plan)
        theirs, kept = dict(alone.named_parameters()), kept_names(alone, ())
        assert any(KEPT in name for name in kept)
        model, unread = setup.make_model(loaded.run, plan)
        assert unread is not None
        strategy = make_strategy(make_accelerator(plan), plan)
        strategy.place(model, unread)
        strategy.wrap(model, unread)
        assert kept_names(model, ()) == kept
        own = dict(model.named_parameters())
        assert own.keys() == theirs.keys()
        for name, weight in own.items():
            assert isinstance(weight, DTensor)
            first, count = own_rows(weight) or (0, 0)
            assert torch.equal(weight.to_local(), theirs[name][first : first + count]), name
            assert weight.to_local().dtype == theirs[name].dtype
            assert count == 0 or KEPT not in name or rank == 0
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
        assert head.weight is embedding.weight

    assert in_processes(2, work) == [0, 0]


def test_what_cannot_be_left_in_its_files_is_read_whole(
    recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, plan = recipe("adapter=none", "distributed.strategy=fsdp2", world_size=2)
    monkeypatch.setattr(lazy_weights, "why_not", lambda: "this transformers is another one")
    with caplog.at_level(logging.WARNING, "halftune"):
        model, unread = setup.make_model(loaded.run, plan)
    assert unread is None
    assert not any(weight.is_meta for weight in model.parameters())
    assert "reads the whole model into main memory" in caplog.text
    assert "this transformers is another one" in caplog.text
