"""Tiny checkpoints and hand-made plans for tests of rooms above the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.attention.contract import AttentionPlan
from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.sections.model import ModelSection
from halftune.core.choice import Choice
from halftune.data.batch import Batch
from halftune.model.files.architectures import no_progress_bars
from halftune.model.policy.policy import PolicyModel
from halftune.plan import BatchPlan, MemoryPlan, Plan
from halftune.precision import PrecisionPlan

TOKENS = 37  # of the models that are made without a checkpoint
SIZES: dict[str, dict[str, Any]] = {
    "qwen2-tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    "llama-tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    "qwen3_5-tiny": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, like: str = "qwen2-tiny", **changes: Any) -> Path:
    """Writes a random checkpoint of hidden size 32 with a vocabulary of 256, saved in ``dtype``; no tokenizer."""
    config = AutoConfig.for_model(**{**BUILTIN_MODELS[like], **SIZES[like], "vocab_size": 256, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            # values that no half format holds exactly, so that any rounding shows
            parameter.data = (parameter.data + 1e-4 * torch.randn(parameter.shape)).to(dtype)
    with no_progress_bars():
        model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["dtype"] == str(dtype).removeprefix("torch.")
    return folder


def section(folder: Path | str, **changes: Any) -> ModelSection:
    return ModelSection(name_or_path=str(folder), **changes)


def because(value: Any) -> Choice[Any]:
    return Choice(value, "the test says so")


def plan_of(precision: PrecisionPlan, *, checkpointing: bool = False) -> Plan:
    """A plan for the CPU around a precision plan."""
    attention = AttentionPlan(
        softmax=because("sdpa"),
        provider=because("torch"),
        varlen=because("none"),
        linear=because("torch"),
        rejected=(),
        guard="cast",
    )
    return Plan(
        device=because("cpu"),
        precision=precision,
        attention=attention,
        batch=BatchPlan(1, 1, 1, 512, because(False), because(checkpointing)),
        memory=MemoryPlan(0, 0, 0, 0, 0, 0, available=1, checkpoint_disk=0, verdict=because("fits")),
        distribution=because("one process"),
        num_parameters=because(1000),
        num_trainable=because(100),
    )


def plan(
    storage: str = "fp32",
    trainable: str = "fp32",
    *,
    saved: str | None = None,
    keep: tuple[str, ...] = (),
    checkpointing: bool = False,
) -> Plan:
    """A plan whose compute dtype is the storage dtype, with autocast where that is half."""
    precision = PrecisionPlan(
        storage=because(storage),
        trainable=because(trainable),
        compute=because(storage),
        autocast=because(storage != "fp32"),
        grad_scaler=because(storage == "fp16"),
        reduce=because(trainable),
        optimizer_state=because(trainable),
        saved=because(saved or trainable),
        keep_fp32=because(keep),
        tf32=because(False),
    )
    return plan_of(precision, checkpointing=checkpointing)


def finished_run(
    folder: Path, base: Path | str, *, adapter: str | dict[str, Any] = "lora", precision: str = "fp32", **sections: Any
) -> Path:
    """A run folder as training leaves it: a recipe, and a result whose weights have moved."""
    from halftune.config.facts.model import read_model_facts
    from halftune.config.load import load_config
    from halftune.hardware.catalogue import lookup
    from halftune.model.adapters import attach_adapter
    from halftune.model.files.identity import model_identity
    from halftune.model.files.result import BASE, write_finished
    from halftune.model.load.load import load_model
    from halftune.model.result.save import save_final
    from halftune.model.tokenizer.tokenizer import load_tokenizer
    from halftune.plan import resolve

    folder.mkdir(parents=True)
    kinds = {"lora": {"type": "lora", "rank": 4}, "none": {"type": "none"}}
    recipe = {
        "model": {"name_or_path": str(base), "tokenizer": "builtin:qwen2-tiny"},
        "precision": precision,
        "adapter": kinds[adapter] if isinstance(adapter, str) else adapter,
        "data": {"train": "gone.jsonl"},
        "training": {"output_dir": str(folder)},
        "generation": {"max_new_tokens": 8},
        **sections,
    }
    (folder / "resolved.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    config = load_config(folder / "resolved.yaml", look_at_files=False).run
    made = resolve(config, lookup("cpu"), read_model_facts(config.model))
    model = attach_adapter(load_model(config.model, made), config.adapter, made, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    save_final(model, load_tokenizer(config.model), made, folder / "final", facts={BASE: model_identity(config.model)})
    write_finished(folder, 1)
    return folder


def batch_of(inputs: dict[str, Any]) -> Batch:
    """Inputs of a model's forward pass, with labels, as the batch that a feed would have made."""
    tokens = {name: value for name, value in inputs.items() if getattr(value, "ndim", 0) == 2}
    return Batch(tokens, {name: value for name, value in inputs.items() if name not in tokens})


def nll_sum(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The cross-entropy that training takes of such inputs."""
    return PolicyModel(model).nll_sum(batch_of(inputs))


def a_model(kind: str = "qwen2", **changes: Any) -> Any:
    """A model of any type in fp32, hidden size 32, with weights large enough that its logits differ."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **{**sizes, **tokens, "num_key_value_heads": 2, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return model
