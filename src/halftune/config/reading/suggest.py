"""What an unknown key may have meant: a near spelling, a key of another section, or another framework's name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from halftune.config.section import Section
from halftune.config.shape import Path, dotted, shape_at, walk

# Names that other tools (and habit) have for our keys; a dotted one means it in that section alone.
SYNONYMS: dict[str, str] = {
    "lr": "training.learning_rate",
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
    "batch_size": "training.per_device_train_batch_size",
    "micro_batch_size": "training.per_device_train_batch_size",
    "train_batch_size": "training.per_device_train_batch_size",
    "per_device_batch_size": "training.per_device_train_batch_size",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "grad_accum": "training.gradient_accumulation_steps",
    "gradient_accumulation": "training.gradient_accumulation_steps",
    "steps": "training.max_steps",
    "lr_scheduler": "training.lr_scheduler_type",
    "scheduler": "training.lr_scheduler_type",
    "warmup": "training.warmup_steps",
    "optimizer": "training.optim",
    "beta1": "training.adam_beta1",
    "beta2": "training.adam_beta2",
    "epsilon": "training.adam_epsilon",
    "grad_clip": "training.max_grad_norm",
    "max_norm": "training.max_grad_norm",
    "compile": "training.torch_compile",
    "load_best_model_at_end": "training.load_best",
    "resume_from_checkpoint": "training.resume",
    "output": "training.output_dir",
    "eval_strategy": "training.eval_steps",
    "evaluation_strategy": "training.eval_steps",
    "save_strategy": "training.save_steps",
    "base_model": "model.name_or_path",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "tokenizer_name_or_path": "model.tokenizer",
    "template": "model.chat_template",
    "torch_dtype": "precision.compute",
    "dtype": "precision.compute",
    "mixed_precision": "precision.compute",
    "precision": "precision.compute",
    "master_weights": "precision.trainable",
    "attn_implementation": "attention.backend",
    "flash_attn": "attention.backend",
    "flash_attention": "attention.backend",
    "peft": "adapter",
    "lora": "adapter",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "dataset": "data.train",
    "datasets": "data.train",
    "train_file": "data.train",
    "file": "data.train",
    "dataset_name": "data.train",
    "eval_dataset": "data.eval",
    "validation": "data.eval",
    "val_size": "data.eval_split",
    "test_size": "data.eval_split",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "sample_packing": "data.packing",
    "max_samples": "data.train[0].samples",
    "stage": "method.type",
    "wandb": "logging.report_to",
    "name": "logging.run_name",
    "max_tokens": "generation.max_new_tokens",
    "deepspeed": "distributed.strategy",
    "num_gpus": "distributed.num_processes",
    "nproc_per_node": "distributed.num_processes",
    "model.name": "model.name_or_path",
    "model.path": "model.name_or_path",
    "generation.max_length": "generation.max_new_tokens",
    "generation.temp": "generation.temperature",
}
# Leaf names too general to say that the key belongs elsewhere.
GENERAL = {"type", "path", "split", "format", "enabled", "samples", "weight", "columns"}


def suggest_key(path: Path, section: type[Section] | None) -> str:
    """The remedy for a key that ``section`` does not have; ``path`` is its full path."""
    key, parent = str(path[-1]), path[:-1]
    plain = key.lower().replace("-", "_")
    siblings = list(section.model_fields) if section is not None else []
    if plain in siblings:
        return _mean((*parent, plain))
    if "." in key and shape_at(tuple(key.split("."))) is not None:
        return f"write it as a section: {key.replace('.', ': {', 1)}: …}}, or {key}=… on the command line"
    if tags := _tags(parent, plain):
        return f"{plain} is a key of {dotted(parent)}.type {' and '.join(tags)}"
    if plain in KEYS_LATER:
        return KEYS_LATER[plain]
    if (scoped := dotted((*parent, plain))) in SYNONYMS and parent:
        return f"did you mean {SYNONYMS[scoped]}?"
    places = _places()
    if elsewhere := [place for place in places.get(plain, []) if place != path and plain not in GENERAL]:
        return _mean(*elsewhere[:2])
    if plain in SYNONYMS:
        return f"did you mean {SYNONYMS[plain]}?"
    if near := _near(plain, parent, siblings, places):
        return _mean(near)
    if section is not None and len(parent) == 0 and len(siblings) < 12:
        return f"sections are {', '.join(siblings)}"
    return f"keys of {dotted(parent)} are {', '.join(siblings)}" if siblings else ""


def key_of(name: str) -> str | None:
    """The full key that a name of a key, or another tool's name for one, stands for; None where none is certain."""
    plain = name.lower().replace("-", "_")
    if "." in plain:
        return plain if shape_at(tuple(plain.split("."))) is not None else None
    places = _places().get(plain, [])
    if places and plain not in GENERAL:
        return dotted(places[0])
    return SYNONYMS.get(plain)


# Words that other tools have for ours.
WORDS = {
    **dict.fromkeys(("flash_attention_2", "flash_attention", "flash_attn", "flash_attn_2", "flashattn", "fa"), "fa2"),
    **dict.fromkeys(("flashattention", "flashattention2", "flashattention_2", "fa_2", "flash"), "fa2"),
    **dict.fromkeys(("flash_attention_3", "flash_attn_3", "flashattention3", "flashattention_3", "fa_3"), "fa3"),
    **dict.fromkeys(("flash_attention_4", "flash_attn_4", "flashattention4", "flashattention_4", "fa_4"), "fa4"),
    **dict.fromkeys(("flex_attention", "flex_attn", "flexattention"), "flex"),
    **dict.fromkeys(("openai", "oai", "chatml", "chat", "chat_template"), "messages"),
    **dict.fromkeys(("bfloat16", "torch.bfloat16", "brain_float"), "bf16"),
    **dict.fromkeys(("float16", "torch.float16", "half", "f16"), "fp16"),
    **dict.fromkeys(("float32", "torch.float32", "float", "single", "full", "f32"), "fp32"),
    **dict.fromkeys(("sdp", "scaled_dot_product_attention", "torch_sdpa", "mem_efficient", "xformers"), "sdpa"),
}


# Words and keys for what does not exist here yet, by a word of the list in which they are looked for.
_LATER = "it is not supported yet"
_QUANTISE = "quantising a base on load is not supported yet: name a checkpoint that is quantised already (…-bnb-4bit)"
_PREFERENCE = "preference methods and reinforcement learning are not supported yet"
_EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
LATER: dict[str, dict[str, str]] = {
    "lora": {
        "qlora": f"{_QUANTISE}, with adapter.type: lora",
        **dict.fromkeys(("oft", "ia3", "prefix_tuning", "prompt_tuning", "freeze", "vera", "loha", "lokr"), _LATER),
    },
    "sft": dict.fromkeys(("dpo", "kto", "orpo", "simpo", "grpo", "ppo", "rm", "reward", "rloo", "cpo"), _PREFERENCE),
    "adamw": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "did you mean adamw?"),
        **dict.fromkeys(_EIGHT_BIT, "moments in 8 bit are not supported yet; write adamw"),
        **dict.fromkeys(("muon", "lion", "galore_adamw", "lomo", "apollo_adamw", "adam_mini", "came"), _LATER),
    },
    "wandb": dict.fromkeys(("none", "no", "null", "false"), "write [] for none"),
}
KEYS_LATER: dict[str, str] = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit", "quantization_config"), _QUANTISE),
    **dict.fromkeys(("rl", "dpo", "grpo", "pref_loss", "reward_model"), _PREFERENCE),
}


def suggest_word(value: object, known: Iterable[object]) -> str:
    """The remedy for a word that is not in a closed list; empty where nothing is near."""
    words = [str(word) for word in known]
    text = str(value).lower()
    for word in words:
        if text in LATER.get(word, {}):
            return LATER[word][text]
    theirs = WORDS.get(re.sub(r"[-_ ]+", "_", text))
    near = [word for word in words if word in (text, theirs)] or get_close_matches(text, words, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def _tags(parent: Path, key: str) -> list[str]:
    """The other kinds of a tagged section (adapter, method) that have this key."""
    shape = shape_at(parent)
    sections = shape.sections if shape is not None and len(shape.sections) > 1 else {}
    return [tag for tag, section in sections.items() if key in section.model_fields]


def _near(key: str, parent: Path, siblings: list[str], places: dict[str, list[Path]]) -> Path | None:
    """The key of a like spelling: one beside it, then a very like one anywhere, then a less like one beside it."""
    if near := get_close_matches(key, siblings, n=1, cutoff=0.7):
        return (*parent, near[0])
    if near := get_close_matches(key, places, n=1, cutoff=0.8):
        return places[near[0]][0]
    near = get_close_matches(key, siblings, n=1, cutoff=0.55)
    return (*parent, near[0]) if near else None


def _mean(*paths: Path) -> str:
    return f"did you mean {' or '.join(dotted(path) for path in paths)}?"


def _places() -> dict[str, list[Path]]:
    """Leaf name → where it stands in the schema; one place for each, list entries as index 0."""
    places: dict[str, list[Path]] = {}
    for path, _, _, _ in walk():
        known = places.setdefault(str(path[-1]), [])
        if path not in known:
            known.append(path)
    return places
