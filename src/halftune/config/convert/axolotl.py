"""Translates an axolotl config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halftune.config.convert import axolotl_keys as keys
from halftune.config.convert import images, preference
from halftune.config.convert.axolotl_adapter import adapter, quantised_experts
from halftune.config.convert.draft import Draft, is_off, misspelt
from halftune.config.convert.formats import attention, precision, quantization
from halftune.config.convert.names import accepts
from halftune.config.convert.templates import axolotl_template
from halftune.config.convert.trainer import (
    drop_trainer,
    embedding_noise,
    evaluates,
    grouping,
    lora_plus,
    lowest_rate,
    number,
    offload,
    optimizer,
    periods,
    remote_code,
    resume,
    scheduler,
    warmup,
    whole_steps,
)

RENAMED = {
    "base_model": "model.name_or_path",
    "revision_of_model": "model.revision",
    "tokenizer_config": "model.tokenizer",
    "output_dir": "training.output_dir",
    "num_epochs": "training.num_train_epochs",
    "max_steps": "training.max_steps",
    "micro_batch_size": "training.per_device_train_batch_size",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "adam_epsilon": "training.adam_epsilon",
    "max_grad_norm": "training.max_grad_norm",
    "save_total_limit": "training.save_total_limit",
    "early_stopping_patience": "training.early_stopping_patience",
    "loss_watchdog_threshold": "training.stop_above_loss",
    "loss_watchdog_patience": "training.stop_above_loss_steps",
    "load_best_model_at_end": "training.load_best",
    "seed": "training.seed",
    "tf32": "precision.tf32",
    "sequence_len": "data.max_length",
    "val_set_size": "data.eval_split",
    "dataset_processes": "data.num_workers",
    "dataset_num_proc": "data.num_workers",
    "default_system_message": "data.system",
}
FLAGS = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
    "xformers_attention": "xformers",
    "sage_attention": "sage",
}
# What is read of an entry of `datasets`; each other key of it is named in the report.
READ = {
    *("drop_system_message", "shards_idx", "preprocess_shards", "field_chosen", "field_rejected"),
    *("path", "data_files", "name", "split", "ds_type", "type", "field", "field_messages", "field_tools"),
    *("message_property_mappings", "message_field_role", "message_field_content", *keys.LABELS),
}
USUAL = {"text": ("text",), "messages": ("messages", "conversations"), "tools": ("tools",)}
# Types of data sets → our format, and the prompt that stands in place of the chat template.
TYPES = {
    "": ("", ""),
    "chat_template": ("", ""),
    "sharegpt": ("", ""),
    "completion": ("text", ""),
    **dict.fromkeys(("alpaca", "alpaca:instruct"), ("alpaca", "alpaca")),
    **dict.fromkeys(("alpaca:chat", "alpaca_chat", "alpaca_chat.load"), ("alpaca", "alpaca_chat")),
    "alpaca:chatml": ("alpaca", "alpaca_chatml"),
    "gpteacher": ("alpaca", "alpaca"),
}
ANSWERS = {"gpteacher": "response"}  # column of the answer, where it is not alpaca's
ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "unk_token": ""}
SPEAKERS = (("role", "content"), ("from", "value"))
OVERLONG = {"drop": "drop", "raise": "error", "truncate": "keep_start"}


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        Refusal: reinforcement learning, another adapter than (Q)LoRA, or no data to train on.
    """
    method = preference.of_axolotl(draft)
    if is_off(draft.left.get("datasets")) and is_off(draft.left.get("pretraining_dataset")):
        raise draft.refuse("datasets", "names no data to train on")
    draft.rename(RENAMED)
    draft.move("learning_rate", "training.learning_rate", number)
    precision(draft, default="auto")
    _attention(draft)
    adapter(draft)
    quantization(draft, "base_model")
    quantised_experts(draft)
    _plugins(draft)
    images.of_axolotl(draft, method)
    _data(draft, method)
    _training(draft)
    preference.finish(draft, method)
    _logging(draft)
    offload(draft, folder)
    remote_code(draft)
    _tokens(draft)
    _model_config(draft)
    if (draft.left.get("model_quantization_config_kwargs") or {}).get("dequantize"):
        for key in ("model_quantization_config", "model_quantization_config_kwargs"):
            draft.none(key, "weights are widened on load")
    draft.drop(keys.NONE)
    draft.drop(keys.CHANGED, "changed")
    draft.drop(keys.REFUSED, "refused")
    draft.drop_parts(keys.PARTS)
    drop_trainer(draft)


def _tokens(draft: Draft) -> None:
    """Special tokens by their role, and added ones, where the schema has them."""
    tokens = draft.left.get("special_tokens")
    if isinstance(tokens, dict) and tokens.keys() <= {"pad_token"}:
        draft.none("special_tokens", "padding is masked by position, whatever its token")
    elif isinstance(tokens, dict) and tokens.get("additional_special_tokens"):
        draft.left["additional_special_tokens"] = True
    elif isinstance(tokens, dict) and accepts("model.tokens.special") and tokens.keys() <= ROLES.keys():
        named = {ROLES[key]: token for key, token in tokens.items() if ROLES[key]}
        why = "no text becomes the unknown token that is named here" if "unk_token" in tokens else ""
        draft.translated("special_tokens", "model.tokens.special", named, why)
    if isinstance(draft.left.get("tokens"), list) and accepts("model.tokens.add"):
        why = "with LoRA, the embedding and the output layer are trained in full"
        draft.changed("tokens", "model.tokens.add", draft.take("tokens"), why)


def _model_config(draft: Draft) -> None:
    """Changes of config.json: the loss of experts' routers, and nothing else."""
    changes = draft.left.get("model_config")
    if is_off(changes):
        return
    asked = isinstance(changes, dict) and changes.get("output_router_logits")
    if not asked or changes.keys() - {"output_router_logits", "router_aux_loss_coef"}:
        draft.refused("model_config", keys.OTHER_MODEL)
    else:
        coefficient = changes.get("router_aux_loss_coef", "model")
        draft.translated("model_config", "training.router_aux_loss_coef", coefficient)


def _plugins(draft: Draft) -> None:
    """Plugins change how a step is computed, or what is learned; one that is not known may do anything."""
    if "plugins" not in draft.left:
        return
    names = [str(name) for name in draft.take("plugins") or []]
    if other := [name for name in names if name.rpartition(".")[2] not in keys.PLUGINS]:
        draft.refused("plugins", f"{', '.join(other)}: may change what is learned")
    else:
        draft.none("plugins", "faster kernels and loggers, with the same result")


def _attention(draft: Draft) -> None:
    for key, name in FLAGS.items():
        value = draft.take(key)
        if value:
            attention(draft, key, name)
        elif key in draft.source:
            draft.none(key, "is off")
    for key in ("attn_implementation", "attention"):
        if draft.has(key):
            attention(draft, key, draft.take(key))


def _data(draft: Draft, method: str) -> None:
    pretrain = bool(_sources(draft, "pretraining_dataset", "data.train"))
    sources = [*_sources(draft, "datasets", "data.train"), *_sources(draft, "test_datasets", "data.eval")]
    _labels(draft)
    if method:
        draft.drop({"train_on_inputs": "answers are compared"})
    else:
        _learned(draft, sources, pretrain=pretrain)
    if draft.get("data.images"):
        images.labels(draft)
        images.length(draft)
    axolotl_template(draft)
    draft.move("dataset_exact_deduplication", "data.deduplicate", bool)
    draft.move("sample_packing", "data.packing", bool)
    draft.words("excess_length_strategy", "data.overlong", OVERLONG, "drop", "rows that are too long are dropped")
    draft.default("data.overlong", "drop", "excess_length_strategy")
    draft.default("data.max_length", 512, "sequence_len")
    draft.default("data.packing", False, "sample_packing")
    grouping(draft)


def _learned(draft: Draft, sources: list[dict[str, Any]], *, pretrain: bool) -> None:
    """Documents or conversations, and which of their tokens."""
    kinds = {pretrain or source.get("format") == "text" for source in sources}
    if len(kinds) > 1:
        why = "some sources are type completion, where every token is trained, and some hold conversations"
        raise draft.refuse("datasets", f"{why}; halftune trains one kind in a run: make a recipe of each")
    texts = pretrain or True in kinds
    draft.put("method.type", "pretrain" if texts else "sft")
    if texts:
        draft.drop({"train_on_inputs": "pre-training trains every token"})
    prompted = all(source.get("prompt") for source in sources)
    if draft.left.get("train_on_inputs") and not prompted and not texts:
        why = "headers of turns have labels too; there, only the texts and the ends of turns"
        draft.changed("train_on_inputs", "method.train_on", "all", why)
    draft.move("train_on_inputs", "method.train_on", lambda on: "all" if on else "assistant")


def _sources(draft: Draft, key: str, ours: str) -> list[dict[str, Any]]:
    """Translates a list of data sets; returns our sources."""
    entries = draft.take(key)
    if not entries:
        return []
    method = draft.get("method.type") or ""  # of a preference method
    read = [_source(entry, method) for entry in ([entries] if isinstance(entries, str | dict) else entries)]
    sources, notes = [source for source, _ in read], [note for _, note in read if note]
    if notes:
        draft.changed(key, ours, sources, "; ".join(dict.fromkeys(notes)))
    else:
        draft.translated(key, ours, sources)
    return sources


def _labels(draft: Draft) -> None:
    """Refuses data sets whose trained rows or tokens would be others here, or whose keys are misspelt."""
    entries = [entry for entry in draft.source.get("datasets") or [] if isinstance(entry, dict)]
    for key, (here, why) in keys.LABELS.items():
        if any(entry.get(key) not in (None, *here) for entry in entries):
            draft.refused(key, why)
    for key in sorted(set[str]().union(*entries) - READ):
        if near := misspelt(key, READ):
            draft.refused(key, f"not a key of a data set: did you mean {near}?")
    _check_types(draft, [entry.get("type") for entry in entries])


def _check_types(draft: Draft, kinds: list[Any]) -> None:
    if not all(kinds):
        draft.refused("type", "a data set without a type holds tokens and labels; halftune reads texts only")
    elif "input_output" in kinds:
        draft.refused("type", "input_output marks parts of a text; halftune trains whole answers")


def _source(entry: Any, method: str) -> tuple[dict[str, Any], str]:
    """One data set: (our source, what changed)."""
    if not isinstance(entry, dict):
        return {"path": str(entry)}, ""
    path, partial = _path(entry)
    kind = entry.get("type") or ""
    kind = kind.partition("\n")[0] if isinstance(kind, str) else "of its own"
    form, prompt = TYPES.get(kind, ("", ""))
    change = "" if kind in TYPES or method else f"type {kind}: the format is found from the columns"
    source = {
        "path": path,
        "split": "" if entry.get("ds_type") or entry.get("split") == "train" else entry.get("split"),
        "format": form,
        "prompt": prompt,
        "columns": _columns(entry, kind),
        "drop_system": bool(entry.get("drop_system_message")),
    }
    if method:
        source, change = preference.axolotl_source(entry, source, method)
    changes = "; ".join(filter(None, [partial, change, *_left_out(entry)]))
    return {key: value for key, value in source.items() if value}, changes


def _path(entry: dict[str, Any]) -> tuple[str, str]:
    """Path of a data set, and what changes."""
    files = entry.get("data_files") or str(entry.get("path"))
    files = [files] if isinstance(files, str) else files
    path = f"{files[0]}:{entry['name']}" if entry.get("name") else files[0]
    return path, "only the first of data_files is taken" if len(files) > 1 else ""


def _columns(entry: dict[str, Any], kind: str) -> dict[str, Any]:
    """Columns with other names than those that are found by themselves."""
    given = {"tools": entry.get("field_tools")}
    if kind == "completion":
        given["text"] = entry.get("field")
    elif TYPES.get(kind, ("", ""))[1]:
        return {"output": ANSWERS[kind]} if kind in ANSWERS else {}
    else:
        given["messages"] = entry.get("field_messages")
    return {ours: theirs for ours, theirs in given.items() if theirs and theirs not in USUAL[ours]}


def _left_out(entry: dict[str, Any]) -> list[str]:
    """What a data set says that has no place in ours."""
    given = {key: value for key, value in entry.items() if value not in (None, False)}
    said = given.get("message_property_mappings", {})
    role = said.get("role", given.get("message_field_role", "role"))
    content = said.get("content", given.get("message_field_content", "content"))
    unread = [key for key in given if key not in READ]
    turns = "messages hold role and content, or from and value, here"
    left = [] if (role, content) in SPEAKERS else [f"{role}, {content}: {turns}"]
    return left + ([f"{', '.join(unread)}: not taken over"] if unread else [])


def _training(draft: Draft) -> None:
    optimizer(draft, "optimizer")
    scheduler(draft, "lr_scheduler")
    lowest_rate(draft)
    lora_plus(draft)
    embedding_noise(draft)
    if draft.left.get("warmup_steps") is None and draft.left.get("warmup_ratio") is None:
        why = "not written there: 3 % of the steps, at most 100 of them"
        draft.changed("warmup_ratio", "training.warmup_ratio", 0.03, why)
    warmup(draft)
    batch = draft.take("batch_size")
    if batch is not None:
        steps = max(1, int(batch) // int(draft.get("training.per_device_train_batch_size") or 1))
        draft.translated("batch_size", "training.gradient_accumulation_steps", steps)
    checkpointing = draft.take("gradient_checkpointing")
    if isinstance(checkpointing, str):
        why = f"{checkpointing}: activations are recomputed, none are moved to main memory"
        draft.translated("gradient_checkpointing", "training.gradient_checkpointing", True, why)
    elif checkpointing is not None:
        draft.translated("gradient_checkpointing", "training.gradient_checkpointing", checkpointing)
    draft.move("torch_compile", "training.torch_compile", lambda value: value is True)
    _periods(draft)
    whole_steps(draft, "logging_steps", "training.logging_steps")
    resume(draft)
    if draft.get("training.max_steps") is None:
        draft.default("training.num_train_epochs", 1, "num_epochs")
    draft.default("training.per_device_train_batch_size", 1, "micro_batch_size")
    draft.default("training.gradient_checkpointing", False, "gradient_checkpointing")
    draft.default("training.output_dir", "model-out", "output_dir")


def _periods(draft: Draft) -> None:
    """Evaluation and checkpoints: times per epoch, which axolotl turns into a share of the run, or steps."""
    times_per_epoch = (
        ("evals_per_epoch", "training.eval_steps", evaluates(draft)),
        ("saves_per_epoch", "training.save_steps", True),
    )
    for key, ours, possible in times_per_epoch:
        times = number(draft.take(key))
        if times and possible:
            draft.translated(key, ours, _period(times, number(draft.get("training.num_train_epochs")) or 1))
        elif key in draft.source:
            draft.none(key, "never there" if possible else "there is no evaluation data")
    if "eval_steps" in draft.left and "eval_strategy" not in draft.left and evaluates(draft):
        whole_steps(draft, "eval_steps", "training.eval_steps")
    periods(draft, per_steps=False)


def _period(times: Any, epochs: Any) -> float | str:
    """So many times per epoch as a share of the run, which is what axolotl hands on; once is "epoch"."""
    numbers = all(isinstance(one, int | float) and 0 < one < 1e9 for one in (times, epochs))
    share = 1.0 / (times * epochs) if numbers else 1.0
    return share if times != 1 and share < 1 else "epoch"


def _logging(draft: Draft) -> None:
    if draft.left.get("wandb_project"):
        why = "set WANDB_PROJECT for the project's name"
        draft.translated("wandb_project", "logging.report_to", ["wandb"], why)
    if draft.left.get("wandb_name"):
        draft.move("wandb_name", "logging.run_name")
    draft.drop(dict.fromkeys(("wandb_project", "wandb_name"), "is off"))
