"""Translates a LLaMA-Factory config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halftune.config.convert.draft import Draft
from halftune.config.convert.formats import attention, listed, precision, quantization
from halftune.config.convert.trainer import convert_trainer, grouping, periods
from halftune.core.files import read_limited

MODEL = {
    "model_name_or_path": "model.name_or_path",
    "model_revision": "model.revision",
    "preprocessing_num_workers": "data.num_workers",
    "default_system": "data.system",
}
LORA = {
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "use_rslora": "adapter.use_rslora",
    "use_dora": "adapter.use_dora",
}
NO_EQUIVALENT = {
    "plot_loss": "loss.png is always drawn",
    "overwrite_cache": "the cache is keyed by content: it is never stale",
    "dataset_dir": "each source has its own path",
    "media_dir": "text only today",
    "tokenized_path": "tokenised data is cached by content",
    "streaming": "data is read whole before training",
    "buffer_size": "data is read whole before training",
    "interleave_probs": "give each source a weight",
    "mix_strategy": "sources are mixed evenly; give each source a weight",
    "preprocessing_batch_size": "decided by itself",
    "eval_num_beams": "evaluation is the loss",
    "eval_on_each_dataset": "one evaluation loss over all sources",
    "ignore_pad_token_for_loss": "padding never carries a label",
    "tool_format": "the chat template renders tools",
    "adapter_name_or_path": "training goes on from checkpoints only; merge the adapter with halftune export first",
    "adapter_folder": "as adapter_name_or_path",
    "create_new_adapter": "an adapter is always new",
    "export_dir": "halftune export",
    "infer_backend": "halftune chat uses the plan of training",
    "infer_dtype": "the plan of training holds for inference",
    "use_unsloth": "not there today",
    "enable_liger_kernel": "not there today",
    "shift_attn": "not there today",
    "rope_scaling": "not there today",
    "moe_aux_loss_coef": "not there today",
    "resize_vocab": "not there today",
    "upcast_layernorm": "the plan decides each dtype",
    "upcast_lmhead_output": "the loss is computed in fp32",
    "use_llama_pro": "not there today",
    "use_galore": "not there today",
    "use_apollo": "not there today",
    "use_badam": "not there today",
    "use_muon": "not there today",
    "loraplus_lr_ratio": "not there today",
    "loraplus_lr_embedding": "not there today",
    "pissa_init": "not there today",
    "pissa_iter": "not there today",
    "pissa_convert": "not there today",
    "use_swanlab": "not there today",
    "include_effective_tokens_per_second": "always shown",
    "predict_with_generate": "halftune chat answers after training",
    "ray_run_name": "not there today",
    "cache_dir": "the hub's own cache is used",
    "use_fast_tokenizer": "always",
    "split_special_tokens": "control tokens inside text are always neutralised",
    "low_cpu_mem_usage": "always",
    "flash_attn_implementation": "attention",
    "freeze_vision_tower": "text only today",
    "freeze_multi_modal_projector": "text only today",
    "image_max_pixels": "text only today",
    "video_max_pixels": "text only today",
    "enable_thinking": "model.chat_template_kwargs, where the template knows it",
    "compute_accuracy": "evaluation is the loss",
}
# Columns of dataset_info.json, by ours.
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
METHODS = {"sft": "sft", "pt": "pretrain"}


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft. ``folder`` is where the config lies: ``dataset_dir`` may start there.

    Raises:
        ConfigError: the stage or the fine-tuning type is not there.
    """
    stage = str(draft.take("stage") or "sft")
    if stage not in METHODS:
        raise draft.refuse("stage", "halftune has supervised fine-tuning (sft) and pre-training (pt) today")
    draft.translated("stage", "method.type", METHODS[stage])
    draft.rename(MODEL)
    precision(draft, default="fp32")
    if draft.has("flash_attn"):
        attention(draft, "flash_attn", draft.take("flash_attn"))
    _adapter(draft)
    _data(draft, stage, folder)
    quantization(draft)
    _checkpointing(draft)
    convert_trainer(draft)
    draft.default("training.learning_rate", 5.0e-5, "learning_rate")
    periods(draft, evaluates=draft.get("data.eval") is not None or bool(draft.get("data.eval_split")))
    draft.default("training.logging_steps", 500, "logging_steps")
    draft.default("training.output_dir", "runs/converted", "output_dir")
    draft.drop(NO_EQUIVALENT)


def _adapter(draft: Draft) -> None:
    kind = str(draft.take("finetuning_type") or "lora")
    if kind not in ("lora", "full"):
        raise draft.refuse("finetuning_type", "halftune has full fine-tuning and LoRA today")
    draft.translated("finetuning_type", "adapter.type", "none" if kind == "full" else "lora")
    if kind == "full":
        for key in (*LORA, "lora_target", "additional_target"):
            if key in draft.left:
                draft.none(key, "finetuning_type is full")
        return
    draft.rename(LORA)
    draft.default("adapter.rank", 8, "lora_rank")
    draft.default("adapter.alpha", 2 * int(draft.get("adapter.rank")), "lora_alpha (twice the rank)")
    if draft.has("lora_target"):
        target = draft.take("lora_target")
        draft.translated("lora_target", "adapter.target_modules", "all-linear" if target == "all" else listed(target))
    if draft.has("additional_target"):
        draft.translated("additional_target", "adapter.modules_to_save", listed(draft.take("additional_target")))


def _data(draft: Draft, stage: str, folder: Path) -> None:
    _named_sources(draft, folder)
    if draft.has("cutoff_len"):
        why = "turns that do not fit are left out whole; there, prompt and answer are both shortened"
        draft.changed("cutoff_len", "data.max_length", draft.take("cutoff_len"), why)
    draft.default("data.max_length", 2048, "cutoff_len")
    if draft.has("val_size"):
        draft.translated("val_size", "data.eval_split", draft.take("val_size"))
    _packing(draft)
    grouping(draft)
    if draft.has("template"):
        why = "the tokenizer's own chat template renders conversations; see model.chat_template if it has none"
        draft.changed("template", "", draft.take("template"), why)
    if stage == "sft":
        _labels(draft)


def _named_sources(draft: Draft, folder: Path) -> None:
    where = Path(str(draft.left.get("dataset_dir") or "data"))
    samples = draft.take("max_samples")
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if draft.has(key):
            sources, why = _sources(listed(draft.take(key)), where, folder)
            if samples is not None:
                for source in sources:
                    source["samples"] = samples
            if why:
                draft.changed(key, ours, sources, why)
            else:
                draft.translated(key, ours, sources)
    if samples is not None:
        draft.changed(
            "max_samples", "", None, "becomes samples of each source: taken after a shuffle, not the first rows"
        )


def _packing(draft: Draft) -> None:
    packing, neat = draft.take("packing"), draft.take("neat_packing")
    if neat:
        draft.translated("neat_packing", "data.packing", True)
        if packing is not None:
            draft.translated("packing", "data.packing", True)
    elif packing:
        draft.changed("packing", "data.packing", True, "samples in a row do not see each other, as with neat_packing")
    else:
        for key, value in (("packing", packing), ("neat_packing", neat)):
            if value is not None:
                draft.translated(key, "data.packing", False)
        draft.default("data.packing", False, "packing")


def _labels(draft: Draft) -> None:
    prompt, history = draft.take("train_on_prompt"), draft.take("mask_history")
    word = "all" if prompt else "last" if history else "assistant"
    for key, value in (("train_on_prompt", prompt), ("mask_history", history)):
        if value is not None:
            draft.translated(key, "method.train_on", word)


def _checkpointing(draft: Draft) -> None:
    """On there unless it is disabled."""
    disabled, given = draft.take("disable_gradient_checkpointing"), draft.take("gradient_checkpointing")
    if given is not None:
        draft.none("gradient_checkpointing", "decided there by disable_gradient_checkpointing alone")
    if disabled is not None:
        draft.translated("disable_gradient_checkpointing", "training.gradient_checkpointing", not disabled)
    draft.default("training.gradient_checkpointing", True, "gradient checkpointing")


def _sources(names: list[str], dataset_dir: Path, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Data sets by name, through dataset_info.json where it can be found."""
    for base in (dataset_dir, folder / dataset_dir):
        info = base / "dataset_info.json"
        if info.is_file():
            try:
                known = json.loads(read_limited(info).decode())
            except (OSError, ValueError):
                break
            return [_source(name, known.get(name), base) for name in names], ""
    why = "dataset_info.json was not found: check these paths"
    return [{"path": str(dataset_dir / f"{name}.json")} for name in names], why


def _source(name: str, entry: Any, base: Path) -> dict[str, Any]:
    if not isinstance(entry, dict):
        return {"path": str(base / f"{name}.json")}
    if "file_name" in entry:
        source: dict[str, Any] = {"path": str(base / entry["file_name"])}
    else:
        source = {"path": entry.get("hf_hub_url") or name}
        if entry.get("subset"):
            source["path"] += f":{entry['subset']}"
        if entry.get("split", "train") != "train":
            source["split"] = entry["split"]
    if entry.get("num_samples"):
        source["samples"] = entry["num_samples"]
    columns = entry.get("columns") or {}
    alpaca = entry.get("formatting", "alpaca") == "alpaca"
    turns = "messages" if (entry.get("tags") or {}).get("role_tag") == "role" else "conversations"
    ours = ALPACA if alpaca else {"messages": turns, "system": "system", "tools": "tools"}
    renamed = {ours[key]: column for key, column in columns.items() if key in ours and ours[key] != column}
    if renamed:
        form = "alpaca" if alpaca else "sharegpt" if turns == "conversations" else "messages"
        source |= {"format": form, "columns": renamed}
    return source
