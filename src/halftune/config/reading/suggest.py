"""Suggestions for unknown keys: similar spellings, keys of other sections, other frameworks' names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from halftune.config.sections import Section
from halftune.config.shape import KeyPath, dotted, shape_at, walk

# Our keys with their names in other tools; dotted names apply in that section only.
_NAMES: dict[str, str] = {
    "training.learning_rate": "lr",
    "training.num_train_epochs": "epochs num_epochs",
    "training.per_device_train_batch_size": "batch_size micro_batch_size train_batch_size per_device_batch_size",
    "training.per_device_eval_batch_size": "eval_batch_size",
    "training.gradient_accumulation_steps": "grad_accum gradient_accumulation",
    "training.max_steps": "steps",
    "training.lr_scheduler_type": "lr_scheduler scheduler",
    "training.warmup_steps": "warmup",
    "training.optim": "optimizer",
    "training.adam_beta1": "beta1",
    "training.adam_beta2": "beta2",
    "training.adam_epsilon": "epsilon",
    "training.max_grad_norm": "grad_clip max_norm",
    "training.torch_compile": "compile",
    "training.label_smoothing": "label_smoothing_factor",
    "training.load_best": "load_best_model_at_end",
    "training.metric_for_best": "metric_for_best_model",
    "training.resume": "resume_from_checkpoint",
    "training.output_dir": "output",
    "training.eval_steps": "eval_strategy evaluation_strategy evals_per_epoch",
    "training.save_steps": "save_strategy saves_per_epoch",
    "model.name_or_path": "base_model model_name model_name_or_path model.name model.path",
    "model.tokenizer": "tokenizer_name_or_path",
    "model.chat_template": "template",
    "precision.compute": "torch_dtype dtype mixed_precision precision",
    "precision.trainable": "master_weights",
    "attention.backend": "attn_implementation flash_attn flash_attention",
    "adapter": "peft lora",
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.target_modules": "lora_target lora_target_modules",
    "adapter.name_or_path": "adapter_name_or_path lora_model_dir",
    "adapter.init": "init_lora_weights peft_init_lora_weights",
    "adapter.train_only": "unfrozen_parameters",
    "adapter.train_layers": "freeze_trainable_layers",
    "data.train": "dataset datasets train_file file dataset_name",
    "data.eval": "eval_dataset validation",
    "data.eval_split": "val_size test_size",
    "data.max_length": "cutoff_len max_seq_length max_seq_len seq_len sequence_len",
    "data.packing": "sample_packing",
    "data.train[0].samples": "max_samples",
    "method.type": "stage",
    "logging.report_to": "wandb",
    "logging.run_name": "name",
    "generation.max_new_tokens": "max_tokens generation.max_length",
    "distributed.strategy": "deepspeed",
    "distributed.num_processes": "num_gpus nproc_per_node",
    "generation.temperature": "generation.temp",
}
SYNONYMS = {name: ours for ours, names in _NAMES.items() for name in names.split()}
# Names too general to suggest another section.
GENERAL = {"type", "path", "split", "format", "enabled", "samples", "weight", "columns"}


def suggest_key(path: KeyPath, section: type[Section] | None) -> str:
    """Return the remedy for an unknown key at ``path`` in ``section``."""
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
    """Return the full key for a key's name, or for another tool's name of it; None if ambiguous or unknown."""
    plain = name.lower().replace("-", "_")
    if "." in plain:
        return plain if shape_at(tuple(plain.split("."))) is not None else None
    places = _places().get(plain, [])
    if places and plain not in GENERAL:
        return dotted(places[0])
    return SYNONYMS.get(plain)


# Other tools' words for ours.
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


# Words and keys of unsupported features, by a word of the list in which they are looked up.
_LATER = "it is not supported yet"
_QUANTISE = "write model.quantization: nf4 (4 bit) or int8"
_REWARDS = "reinforcement learning by this method is not supported yet"
_THEIRS = {
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
    "lion_32bit": "lion",
}
LATER: dict[str, dict[str, str]] = {
    "lora": {
        "qlora": "write adapter.type: lora and model.quantization: nf4",
        **dict.fromkeys(("prefix_tuning", "prompt_tuning"), _LATER),
    },
    "sft": dict.fromkeys(("grpo", "ppo", "rloo"), _REWARDS),
    "reward": {"rm": "did you mean reward?"},
    "adamw": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "did you mean adamw?"),
        **{theirs: f"did you mean {ours}?" for theirs, ours in _THEIRS.items()},
        **dict.fromkeys(("galore_adamw", "lomo", "apollo_adamw", "adam_mini", "came"), _LATER),
    },
    "wandb": dict.fromkeys(("none", "no", "null", "false"), "write [] for none"),
}
KEYS_LATER: dict[str, str] = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_bit", "quantization_config"), _QUANTISE),
    **dict.fromkeys(("rl", "grpo"), "did you mean method: grpo?"),
    "pref_loss": "did you mean method.loss?",
    "reward_model": "did you mean method: reward?",
    "dpo": "did you mean method: dpo?",
}


def suggest_word(value: object, known: Iterable[object]) -> str:
    """Return the remedy for an unknown word of a closed list; empty if there is no similar one."""
    words = [str(word) for word in known]
    text = str(value).lower()
    for word in words:
        if text in LATER.get(word, {}):
            return LATER[word][text]
    theirs = WORDS.get(re.sub(r"[-_ ]+", "_", text))
    near = [word for word in words if word in (text, theirs)] or get_close_matches(text, words, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def _tags(parent: KeyPath, key: str) -> list[str]:
    """The other types of a tagged section (adapter, method) with this key."""
    shape = shape_at(parent)
    sections = shape.sections if shape is not None and len(shape.sections) > 1 else {}
    return [tag for tag, section in sections.items() if key in section.model_fields]


def _near(key: str, parent: KeyPath, siblings: list[str], places: dict[str, list[KeyPath]]) -> KeyPath | None:
    """A similar key: in the same section, then a very similar one anywhere, then a less similar one in the section."""
    if near := get_close_matches(key, siblings, n=1, cutoff=0.7):
        return (*parent, near[0])
    if near := get_close_matches(key, places, n=1, cutoff=0.8):
        return places[near[0]][0]
    near = get_close_matches(key, siblings, n=1, cutoff=0.55)
    return (*parent, near[0]) if near else None


def _mean(*paths: KeyPath) -> str:
    return f"did you mean {' or '.join(dotted(path) for path in paths)}?"


def _places() -> dict[str, list[KeyPath]]:
    """Leaf name → its paths in the schema, with index 0 for list entries."""
    places: dict[str, list[KeyPath]] = {}
    for path, _, _, _ in walk():
        known = places.setdefault(str(path[-1]), [])
        if path not in known:
            known.append(path)
    return places
