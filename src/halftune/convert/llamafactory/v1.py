"""Translates a config of LLaMA-Factory's new trainer (``src/llamafactory/v1``), whose keys are others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from halftune.config.reading.yaml_source import parse, read_text
from halftune.convert.draft import Draft, Refusal, is_off, listed, not_taken, number, table
from halftune.convert.formats import attention, precision, quantization
from halftune.convert.llamafactory.llamafactory import MEDIA, MEDIA_NAMES, drop_keys, frozen
from halftune.convert.sections import sections
from halftune.convert.trainer import drop_trainer, remote_code, scheduler
from halftune.core.errors import ConfigError

# The command that starts a config says which method it is for, not the config: only the data can tell.
_PAIRS = re.compile(r"(^|[_/-])(dpo|pairs?|pref\w*)([_./-]|$)")
FORMATS = ("alpaca", "sharegpt")
READ = ("path", "converter", "size", "split", "source", "streaming")  # of a data set
QUANTISED = ("quantization_bit", "double_quantization", "quantization_type")  # of quant_config


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        Refusal: preference methods, another adapter than LoRA, or no data to train on.
    """
    draft.follow("llamafactory.v1_methods")
    if is_off(draft.left.get("train_dataset")):
        raise draft.refuse("train_dataset", "there is nothing to train on: chat and export need no recipe")
    draft.follow("llamafactory.v1")
    draft.put("method.type", "sft")
    precision(draft, default="bf16")
    attention(draft, "flash_attn")
    _adapter(draft)
    _quantised(draft)
    _data(draft, folder)
    _training(draft)
    if (draft.left.get("dist_config") or {}).get("name") == "deepspeed":
        draft.left["deepspeed"] = draft.left["dist_config"].get("config_file")
    sections(draft, folder)
    remote_code(draft)
    drop_keys(draft)
    drop_trainer(draft)


def _adapter(draft: Draft) -> None:
    peft = draft.take("peft_config")
    if is_off(peft):
        draft.translated("peft_config", "adapter.type", "none")
        return
    kind, continued = peft.get("name"), peft.get("adapter_name_or_path")
    if kind == "freeze":
        freeze = table("llamafactory", "v1_freeze")
        _adapter_type(draft, "none", peft.keys() - {*freeze, "name"})
        draft.left.update({key: peft[key] for key in freeze if peft.get(key) is not None})
        frozen(draft)
    elif kind == "lora" and not continued:
        _lora(draft, peft)
    else:
        what = "set adapter.name_or_path to go on from an adapter" if continued else "this type is not converted"
        raise draft.refuse("peft_config", f"{kind}: {what}")


def _lora(draft: Draft, peft: dict[str, Any]) -> None:
    names = table("llamafactory", "v1_lora")
    _adapter_type(draft, "lora", peft.keys() - {*names, "name", "target_modules", "adapter_name_or_path"})
    for key, ours in names.items():
        if peft.get(key) is not None:
            draft.put(f"adapter.{ours}", peft[key])
    target = peft.get("target_modules", "all")
    draft.put("adapter.target_modules", "all-linear" if target == "all" else listed(target))


def _adapter_type(draft: Draft, kind: str, unknown: set[str]) -> None:
    changed = f"{', '.join(sorted(unknown))}: not taken over" if unknown else ""
    draft.translated("peft_config", "adapter.type", kind, changed=changed)


def _quantised(draft: Draft) -> None:
    """``quant_config`` says what keys of their own say in the other trainer."""
    asked = draft.left.get("quant_config")
    if isinstance(asked, dict) and asked.get("name", "bnb") in ("bnb", "auto"):
        bits = asked.get("quantization_bit") or (4 if asked.get("name", "bnb") == "bnb" else None)
        draft.left["quant_config"] = bits
        draft.left.update({f"quant_config.{key}": asked[key] for key in asked.keys() - {"name", *QUANTISED}})
        draft.left.update({key: asked[key] for key in QUANTISED[1:] if key in asked})
    quantization(draft, "model")


def _data(draft: Draft, folder: Path) -> None:
    name = str(draft.take("train_dataset"))
    sets = _read(name, folder)
    converters = {entry.get("converter") for entry in (sets or {}).values()}
    if _PAIRS.search(name) or "pair" in converters:
        why = f"preference pairs: {table('llamafactory', 'v1_pairs')}"
        raise Refusal("train_dataset", f"train_dataset: {name}", why)
    if MEDIA_NAMES.search(name):
        draft.put("data.train", [{"path": name}])
        draft.refused("train_dataset", MEDIA)
    elif sets is None:
        why = "the list of data sets was not found: name the sources themselves"
        draft.changed("train_dataset", "data.train", [{"path": name}], why)
    else:
        left = "; ".join(filter(None, (not_taken(entry, READ) for entry in sets.values())))
        draft.translated("train_dataset", "data.train", [_source(entry) for entry in sets.values()], changed=left)
    _length(draft, single=sets is not None and converters <= {"alpaca"})
    _batching(draft)


def _length(draft: Draft, *, single: bool) -> None:
    """``cutoff_len``; ``single``: every conversation has one answer."""
    draft.put("data.overlong", "keep_start")
    why = "a conversation is one row; there, each of its answers is a row with the turns before it"
    length = draft.take("cutoff_len") or 2048
    draft.translated("cutoff_len", "data.max_length", length, changed="" if single else why)


def _batching(draft: Draft) -> None:
    strategy = str(draft.take("batching_strategy") or "normal")
    packed = strategy == "dynamic_padding_free"
    same = strategy in ("normal", "padding_free")  # padding_free: the same rows in a batch, one behind the other
    changed = "" if same else f"{strategy}: batches have other sizes here"
    draft.translated("batching_strategy", "data.packing", packed, changed=changed)
    if not packed:
        draft.default("data.group_by_length", False, "group_by_length")


def _read(name: str, folder: Path) -> dict[str, dict[str, Any]] | None:
    """The list of data sets in a file; None if there is none."""
    path = next((path for path in (Path(name), *(one / name for one in _above(folder))) if path.is_file()), None)
    try:
        found = parse(read_text(path), str(path)).values if path is not None else None
    except ConfigError:
        return None
    sets = isinstance(found, dict) and all(isinstance(entry, dict) and "path" in entry for entry in found.values())
    return found if sets else None


def _above(folder: Path) -> tuple[Path, ...]:
    """The folder of a config and those above it: LLaMA-Factory starts in its own folder."""
    return folder.resolve(), *folder.resolve().parents


def _source(entry: dict[str, Any]) -> dict[str, Any]:
    converter = entry.get("converter")
    if converter not in (None, *FORMATS):
        what = f"a data set has the converter {converter}"
        raise ConfigError(what, remedy="make it alpaca or sharegpt", code="convert.unexpected_value")
    source: dict[str, Any] = {"path": str(entry["path"])}
    if converter:
        source["format"] = converter
    if entry.get("size"):
        source["samples"] = entry["size"]
    if entry.get("split", "train") != "train":
        source["split"] = entry["split"]
    return source


def _optimizer(draft: Draft) -> None:
    """torch's AdamW, where every weight decays; or Muon, which has a learning rate of its own."""
    draft.put("training.weight_decay_on", "all")
    asked, options = draft.left.get("optim_config"), table("llamafactory", "v1_muon")
    given = {"nesterov": True, "adamw_betas": (0.9, 0.95), **(asked if isinstance(asked, dict) else {})}
    other = given.keys() - {*options, "name", "nesterov", "adamw_betas"}
    if given.get("name") != "muon" or other or not given["nesterov"]:
        draft.default("training.weight_decay", 0.01, "weight_decay (torch's AdamW)")
        return
    changed = "adapters are updated by Muon; there, by AdamW" if draft.get("adapter.type") != "none" else ""
    why = "its own learning rate holds, 1e-3 by default"
    draft.translated("optim_config", "training.optim", "muon", why, changed=changed)
    given["beta1"], given["beta2"] = given["adamw_betas"]
    for option, (ours, usual) in options.items():
        draft.put(f"training.{ours}", number(given.get(option, usual)))


def _training(draft: Draft) -> None:
    draft.translated("learning_rate", "training.learning_rate", number(draft.take("learning_rate") or 1.0e-4))
    batch = draft.take("global_batch_size")
    if batch is not None:
        why = "divided by the batch of one device: with several devices, divide by their number too"
        steps = max(1, int(batch) // int(draft.get("training.per_device_train_batch_size") or 1))
        draft.changed("global_batch_size", "training.gradient_accumulation_steps", steps, why)
    schedule = draft.take("lr_scheduler_config")
    if isinstance(schedule, dict):
        options = {key: value for key, value in schedule.items() if key != "name"}
        draft.left.update({"lr_scheduler_config": schedule.get("name"), "lr_scheduler_kwargs": options})
        scheduler(draft, "lr_scheduler_config")
    draft.follow("llamafactory.v1_defaults", "trainer.noise", "trainer.resume", "llamafactory.v1_more")
    _optimizer(draft)
    draft.default("training.output_dir", "runs/converted", "output_dir")
