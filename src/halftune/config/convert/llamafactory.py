"""Translates a LLaMA-Factory config."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from halftune.config.convert import llamafactory_keys as keys
from halftune.config.convert.draft import Draft, is_off
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
# Columns of dataset_info.json, by ours.
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
MEDIA = "images, video and audio are not supported yet: only texts would be trained"
MEDIA_NAMES = re.compile(r"mllm|llava|multimodal|pokemon_cap|omni")  # of the data sets that LLaMA-Factory brings
METHODS = {"sft": "sft", "pt": "pretrain"}


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft. ``folder`` is where the config lies: ``dataset_dir`` may start there.

    Raises:
        Refusal: the stage or the fine-tuning type is not there, or it names no data to train on.
    """
    stage = str(draft.take("stage") or "sft")
    if stage not in METHODS:
        why = "not supported yet: halftune has supervised fine-tuning (sft) and pre-training (pt) today"
        raise draft.refuse("stage", why)
    if is_off(draft.left.get("dataset")):
        raise draft.refuse("dataset", "there is nothing to train on: chat and export need no recipe")
    if not draft.left.get("do_train", draft.left.get("do_predict") is not True):
        raise draft.refuse("do_train", "it trains nothing: chat and evaluation need no recipe")
    draft.translated("stage", "method.type", METHODS[stage])
    draft.rename(MODEL)
    precision(draft, default="fp32")
    if draft.has("flash_attn"):
        attention(draft, "flash_attn", draft.take("flash_attn"))
    _adapter(draft)
    _data(draft, stage, folder)
    quantization(draft, "model_name_or_path")
    _checkpointing(draft)
    _stopping(draft)
    drop_keys(draft)
    convert_trainer(draft, folder)
    draft.default("training.learning_rate", 5.0e-5, "learning_rate")
    periods(draft, evaluates=draft.get("data.eval") is not None or bool(draft.get("data.eval_split")))
    draft.default("training.logging_steps", 500, "logging_steps")
    draft.default("training.output_dir", "runs/converted", "output_dir")


def drop_keys(draft: Draft) -> None:
    """The keys of LLaMA-Factory without an equivalent."""
    for key, part in (("freeze_vision_tower", "a vision tower"), ("freeze_multi_modal_projector", "a projector")):
        if draft.left.get(key) is False:
            draft.refused(key, f"training {part} is not supported yet")
    draft.drop(keys.NONE)
    draft.drop(keys.CHANGED, "changed")
    draft.drop(keys.REFUSED, "refused")
    draft.drop_parts(keys.PARTS)


def _stopping(draft: Draft) -> None:
    if draft.has("early_stopping_steps"):
        steps = draft.take("early_stopping_steps")
        draft.translated("early_stopping_steps", "training.early_stopping_patience", steps)


def _adapter(draft: Draft) -> None:
    kind = str(draft.take("finetuning_type") or "lora")
    if kind not in ("lora", "full"):
        raise draft.refuse("finetuning_type", "not supported yet: halftune has full fine-tuning and LoRA today")
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
    if draft.left.get("enable_thinking") is False:
        draft.translated("enable_thinking", "model.chat_template_kwargs", {"enable_thinking": False})
    if stage == "sft":
        _labels(draft)


def _named_sources(draft: Draft, folder: Path) -> None:
    where = Path(str(draft.left.get("dataset_dir") or "data"))
    samples = draft.take("max_samples")
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if draft.has(key):
            names = listed(draft.take(key))
            known, base = _listed_sets(where, folder)
            sources = [_source(name, known.get(name), base or where) for name in names]
            why = "" if base else "dataset_info.json was not found: check these paths"
            if samples is not None:
                for source in sources:
                    source["samples"] = samples
            if media := [name for name in names if _has_media(name, known.get(name))]:
                draft.put(ours, sources)
                draft.refused(key, f"{', '.join(media)}: {MEDIA}")
            elif why:
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


def _listed_sets(dataset_dir: Path, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """What dataset_info.json lists, and its folder; None where it cannot be found or read."""
    for base in (dataset_dir, folder / dataset_dir):
        info = base / "dataset_info.json"
        if info.is_file():
            with suppress(OSError, ValueError):
                known = json.loads(read_limited(info).decode())
                return known, base
            break
    return {}, None


def _has_media(name: str, entry: Any) -> bool:
    columns = entry.get("columns") or {} if isinstance(entry, dict) else {}
    return bool({"images", "videos", "audios"} & columns.keys()) or bool(MEDIA_NAMES.search(name))


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
