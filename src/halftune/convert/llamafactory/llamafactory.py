"""Translates a LLaMA-Factory config."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from halftune.convert import audio, images, preference
from halftune.convert.draft import Draft, is_off, listed, not_taken, number, table
from halftune.convert.formats import attention, precision, quantization
from halftune.convert.optimizers import project
from halftune.convert.templates import llamafactory_template
from halftune.convert.trainer import continued, convert_trainer, eval_name, grouping, lora_plus, periods
from halftune.core.files import read_limited

MEDIA = "images, videos or audio of this model or method are not supported yet: only texts would be trained"
# Names of the data sets that LLaMA-Factory brings: with images, with video, and with audio.
MEDIA_NAMES = re.compile(r"mllm|llava|multimodal|pokemon_cap|omni|rlhf_v")
_VIDEO = re.compile(r"video|omni|multimodal")
ONLINE = Path("ONLINE")  # as dataset_dir: names are ids of the hub, and no dataset_info.json lists them
METHODS = {"sft": "sft", "pt": "pretrain"}


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft. ``folder`` is where the config lies: ``dataset_dir`` may start there.

    Raises:
        Refusal: the stage or the fine-tuning type is not there, or it names no data to train on.
    """
    stage = draft.left["stage"] = str(draft.left.get("stage") or "sft")
    if stage not in (*METHODS, *preference.METHODS):
        raise draft.refuse("stage", "not converted: sft, pt, dpo, kto and rm are")
    if is_off(draft.left.get("dataset")):
        raise draft.refuse("dataset", "there is nothing to train on: chat and export need no recipe")
    if not draft.left.get("do_train", draft.left.get("do_predict") is not True):
        raise draft.refuse("do_train", "it trains nothing: chat and evaluation need no recipe")
    if stage in METHODS:
        draft.translated("stage", "method.type", METHODS[stage])
        draft.drop(table("preference", "llamafactory_keys"), f"stage is {stage}")
    else:
        preference.of_llamafactory(draft, stage)
    draft.follow("llamafactory.model")
    precision(draft, default="fp32")
    attention(draft, "flash_attn")
    _adapter(draft)
    _data(draft, stage, folder)
    quantization(draft, "model_name_or_path")
    draft.follow("llamafactory.checkpointing")
    projected(draft)
    drop_keys(draft)
    convert_trainer(draft, folder)
    draft.follow("llamafactory.muon")
    periods(draft)
    draft.follow("llamafactory.output")
    preference.finish(draft, preference.METHODS.get(stage, ""), dropout=stage == "rm")


def projected(draft: Draft) -> None:
    """GaLore and APOLLO."""
    name = next((one for one in ("galore", "apollo") if draft.left.get(f"use_{one}")), "")
    if not name:
        return
    usual, numbers = table("llamafactory", "projected")[name], table("llamafactory", "projections")[name]
    other = [option for option, value in usual.items() if draft.left.get(f"{name}_{option}") not in (None, value)]
    if other or draft.left.get("optim") not in (None, "adamw_torch"):
        draft.refused(f"use_{name}", f"{', '.join(other) or 'optim'}: only the default is supported")
        return
    draft.translated(f"use_{name}", "training.optim", name)
    draft.drop("optim", f"use_{name} decides")
    layerwise = bool(draft.left.get(f"{name}_layerwise"))
    if layerwise:
        draft.take("max_grad_norm")
    project(draft, draft.left, numbers, layerwise=layerwise)


def drop_keys(draft: Draft) -> None:
    """The keys of LLaMA-Factory without an equivalent."""
    draft.follow("llamafactory.frozen_parts")
    if draft.get("method.type") in (None, "sft"):
        _loss(draft)
    if draft.left.get("mix_strategy") in (None, "concat") or len(draft.get("data.train") or ()) == 1:
        draft.drop("mix_strategy interleave_probs", "each row is seen once in an epoch")
    _tokens(draft)
    draft.drop_listed("llamafactory")


def _tokens(draft: Draft) -> None:
    """New control tokens, and a vocabulary that is resized, with which embeddings are trained beside LoRA."""
    added = []
    for key in ("add_special_tokens", "new_special_tokens"):
        if not is_off(draft.left.get(key)):
            added += listed(draft.take(key))
            why = "their rows begin as the mean of the others; there, with noise; in a message they stay plain text"
            draft.changed(key, "model.tokens.add", added, why)
    if not added or draft.left.get("init_special_tokens") == "noise_init":
        draft.drop("init_special_tokens", "says how rows of new tokens begin")
    draft.drop("init_special_tokens", "rows of new tokens begin as the mean of the others", "changed")
    plain = draft.get("adapter.type") == "lora" and not draft.get("adapter.name_or_path") and not added
    if draft.left.get("resize_vocab") and plain and not draft.get("adapter.modules_to_save"):
        why = "the vocabulary keeps its size; see that the model's embedding and output layer have these names"
        draft.changed("resize_vocab", "adapter.modules_to_save", ["embed_tokens", "lm_head"], why)
    draft.drop("resize_vocab", "rows are added where tokens are added")


def _loss(draft: Draft) -> None:
    """The loss of supervised fine-tuning; the first one that is on holds."""
    draft.follow("llamafactory.loss")
    if draft.left.get("use_asft_loss") and draft.get("method.loss") is None:
        anchor = draft.take("ref_model") or draft.get("model.name_or_path")
        draft.put("method.teacher", {"name_or_path": anchor})
        draft.put("method.divergence_weight", number(draft.take("asft_alpha") or 0.1))
        draft.values["method"] |= {"sft_weight": 1.0, "sft_loss": "dft"}
        why = "the loss is a mean over the tokens of the global batch; there, a sum over micro-batches of their means"
        draft.changed("use_asft_loss", "method.type", "distill", why)
    draft.follow("llamafactory.other_loss")


def _adapter(draft: Draft) -> None:
    kind = draft.left["finetuning_type"] = str(draft.left.get("finetuning_type") or "lora")
    if kind not in ("lora", "full", "freeze", "oft"):
        raise draft.refuse("finetuning_type", "not converted: full, freeze, lora and oft are")
    draft.follow("llamafactory.adapter_type")
    if kind != "lora":
        draft.drop(table("llamafactory", "not_lora"), f"finetuning_type is {kind}")
    if kind == "freeze":
        frozen(draft)
    if kind == "oft":
        draft.follow("llamafactory.oft")
        return
    draft.drop(table("llamafactory", "not_oft"), f"finetuning_type is {kind}")
    if kind != "lora":
        draft.drop("additional_target", f"finetuning_type is {kind}")
    elif continued(draft, "adapter_name_or_path", table("llamafactory", "of_an_adapter")):
        lora_plus(draft)
    else:
        draft.follow("llamafactory.lora")
        draft.default("adapter.alpha", 2 * int(draft.get("adapter.rank")), "lora_alpha (twice the rank)")
        draft.follow("llamafactory.targets")
        lora_plus(draft)
        draft.move("additional_target", "adapter.modules_to_save", listed)


def frozen(draft: Draft) -> None:
    """``finetuning_type: freeze``: the last n layers, or the first n; other modules by a part of their name."""
    draft.assume("freeze_trainable_layers", 2)
    draft.follow("llamafactory.frozen")
    if extra := draft.left.get("freeze_extra_modules"):
        found = [re.escape(name) for name in listed(extra)]
        draft.translated("freeze_extra_modules", "adapter.train_only", found)


def _data(draft: Draft, stage: str, folder: Path) -> None:
    _named_sources(draft, folder, stage)
    draft.move("val_size", "data.eval_split")
    draft.follow("llamafactory.packing")
    _length(draft, stage)
    draft.move("moe_aux_loss_coef", "training.router_aux_loss_coef", number)
    grouping(draft)
    if draft.get("data.images"):
        draft.follow("media.pixels")
    if draft.get("data.videos"):
        draft.follow("media.videos")
    else:
        draft.drop(
            "use_audio_in_video video_fps video_maxlen video_max_pixels video_min_pixels", "no source has videos"
        )
    if draft.get("data.audio"):
        audio.rate(draft)
    if any(draft.get(f"data.{kind}") for kind in ("images", "videos", "audio")):
        images.llamafactory_parts(draft)
    llamafactory_template(draft)
    draft.follow("llamafactory.thinking")
    if stage == "sft":
        draft.follow("llamafactory.sft")


def _length(draft: Draft, stage: str) -> None:
    """``cutoff_len``; packed rows have one token less."""
    shorter = int(bool(draft.get("data.packing")))
    if stage == "pt":
        why = "documents are cut into pieces; there, only the first piece is trained, or rows begin inside of documents"
        draft.changed("cutoff_len", "data.max_length", draft.take("cutoff_len") or 2048, why)
        return
    draft.put("data.overlong", "proportional")
    draft.move("cutoff_len", "data.max_length", lambda length: int(length) - shorter)
    draft.default("data.max_length", 2048 - shorter, "cutoff_len")


def _named_sources(draft: Draft, folder: Path, stage: str) -> None:
    samples = draft.take("max_samples")
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if draft.has(key):
            counted = {} if samples is None else {"samples": samples, "sampling": "first"}
            _translate_names(draft, key, ours, folder, counted, stage)
    if str(draft.left.get("dataset_dir")).startswith("REMOTE:"):
        draft.refused("dataset_dir", "a dataset_info.json of the hub is not read: copy it, and name its folder")
    if samples is not None:
        draft.none("max_samples", "samples of each source, the first ones")


def _translate_names(draft: Draft, key: str, ours: str, folder: Path, samples: dict[str, Any], stage: str) -> None:
    """Translates names of data sets; ``samples`` is part of each source."""
    names, where = listed(draft.take(key)), Path(str(draft.left.get("dataset_dir") or "data"))
    known, base = _listed_sets(where, folder)
    sources = [_source(name, known.get(name), base or where, stage) | samples for name in names]
    if key == "eval_dataset":
        _name_each(draft, ours, sources, names)
    draft.put(ours, sources)
    if untrained := _untrained_media(draft, names, known, stage):
        draft.refused(key, f"{', '.join(untrained)}: {MEDIA}")
        return
    left = [_left_out(known[name], stage) for name in names if isinstance(known.get(name), dict)]
    found = base or where == ONLINE
    changed = "; ".join(filter(None, left)) if found else "dataset_info.json was not found: check these paths"
    draft.translated(key, ours, sources, changed=changed)
    if known.keys() >= set(names) and not draft.get("data.images"):
        draft.drop("image_max_pixels image_min_pixels", "no source has images")


def _name_each(draft: Draft, ours: str, sources: list[dict[str, Any]], names: list[str]) -> None:
    """``eval_on_each_dataset``: a loss for each source, if their names differ."""
    ours_of = [eval_name(name) for name in names]
    if draft.left.get("eval_on_each_dataset") and len(set(ours_of)) == len(names):
        for source, name in zip(sources, ours_of, strict=True):
            source["name"] = name
        draft.translated("eval_on_each_dataset", ours, sources)


def _listed_sets(dataset_dir: Path, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """What dataset_info.json lists, and its folder; None where it cannot be found or read.

    LLaMA-Factory starts in its own folder, above the one that the config lies in.
    """
    for base in (dataset_dir, folder / dataset_dir, *(above / dataset_dir for above in folder.resolve().parents)):
        info = base / "dataset_info.json"
        if info.is_file():
            with suppress(OSError, ValueError):
                known = json.loads(read_limited(info).decode())
                return known, base
            break
    return {}, None


def _media(name: str, entry: Any) -> set[str]:
    """The columns of a data set that hold media."""
    columns = entry.get("columns") or {} if isinstance(entry, dict) else {}
    found = {"images", "videos", "audios"} & columns.keys()
    if not found and MEDIA_NAMES.search(name):
        return {"videos"} if _VIDEO.search(name) else {"audios"} if "audio" in name else {"images"}
    return found


def _untrained_media(draft: Draft, names: list[str], known: dict[str, Any], stage: str) -> list[str]:
    """The data sets with media that would not be trained; they are, where the model takes them."""
    media = {name: found for name in names if (found := _media(name, known.get(name)))}
    taken = audio.find_media(draft.get("model.name_or_path")) if stage in ("sft", "dpo", "kto") else set[str]()
    found = set[str]().union(*media.values())
    if not found <= taken:
        return list(media)
    for kind, key in (("images", "data.images"), ("videos", "data.videos"), ("audios", "data.audio")):
        if kind in found:
            draft.put(key, True)
    return []


def _source(name: str, entry: Any, base: Path, stage: str) -> dict[str, Any]:
    if base == ONLINE:  # an id of the hub, whose rows have alpaca's columns
        return {"path": name, "format": "alpaca"} if stage in METHODS else {"path": name}
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
    return source | (_columns(entry) if stage in METHODS else preference.listed_columns(entry, stage))


def _left_out(entry: dict[str, Any], stage: str) -> str:
    """What an entry of dataset_info.json says that has no place in ours."""
    tags = {key: tag for key, tag in (entry.get("tags") or {}).items() if tag not in table("llamafactory", "tags")}
    columns = table("llamafactory", "columns")
    names = set[str]().union(*columns.values()) if stage in METHODS else entry.get("columns") or ()
    left = not_taken(entry, table("llamafactory", "read")), not_taken(tags, ())
    return "; ".join(filter(None, (*left, not_taken(entry.get("columns") or {}, names))))


def _columns(entry: dict[str, Any]) -> dict[str, Any]:
    """Format and columns of a data set whose columns have other names."""
    form = "sharegpt" if (entry.get("tags") or {}).get("role_tag") != "role" else "messages"
    form = "alpaca" if entry.get("formatting", "alpaca") == "alpaca" else form
    names, columns = table("llamafactory", "columns")[form], (entry.get("columns") or {}).items()
    renamed = {names[key]: column for key, column in columns if names.get(key, column) != column}
    return {"format": form, "columns": renamed} if renamed else {"format": form} if form == "alpaca" else {}
