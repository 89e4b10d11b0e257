"""Translates an axolotl config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halftune.config.convert import axolotl_keys as keys
from halftune.config.convert.draft import Draft, is_off
from halftune.config.convert.formats import attention, listed, precision, quantization
from halftune.config.convert.trainer import (
    drop_trainer,
    grouping,
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
    "load_best_model_at_end": "training.load_best",
    "seed": "training.seed",
    "tf32": "precision.tf32",
    "sequence_len": "data.max_length",
    "val_set_size": "data.eval_split",
    "dataset_processes": "data.num_workers",
    "dataset_num_proc": "data.num_workers",
    "default_system_message": "data.system",
}
LORA = {
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save",
    "peft_use_dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora",
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
    *("path", "data_files", "name", "split", "ds_type", "type", "field", "field_messages", "field_tools"),
    *("message_property_mappings", "message_field_role", "message_field_content", *keys.LABELS),
}
SPEAKERS = (("role", "content"), ("from", "value"))
OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        Refusal: reinforcement learning, a reward model, another adapter than (Q)LoRA, or no data to train on.
    """
    for key in ("rl", "reward_model", "process_reward_model"):
        if not is_off(draft.left.get(key)):
            raise draft.refuse(key, "not supported yet: halftune has supervised fine-tuning and pre-training today")
        if key in draft.left:
            draft.none(key, "is off")
    if is_off(draft.left.get("datasets")) and is_off(draft.left.get("pretraining_dataset")):
        raise draft.refuse("datasets", "names no data to train on")
    draft.rename(RENAMED)
    if draft.has("learning_rate"):
        draft.translated("learning_rate", "training.learning_rate", number(draft.take("learning_rate")))
    precision(draft, default="auto")
    _attention(draft)
    _adapter(draft)
    quantization(draft, "base_model")
    _plugins(draft)
    _data(draft)
    _training(draft)
    _logging(draft)
    offload(draft, folder)
    remote_code(draft)
    tokens = draft.left.get("special_tokens")
    if isinstance(tokens, dict) and tokens.keys() <= {"pad_token"}:
        draft.none("special_tokens", "padding is masked by position, whatever its token")
    elif isinstance(tokens, dict) and tokens.get("additional_special_tokens"):
        draft.left["additional_special_tokens"] = True
    if (draft.left.get("model_quantization_config_kwargs") or {}).get("dequantize"):
        for key in ("model_quantization_config", "model_quantization_config_kwargs"):
            draft.none(key, "weights are widened on load")
    draft.drop(keys.NONE)
    draft.drop(keys.CHANGED, "changed")
    draft.drop(keys.REFUSED, "refused")
    draft.drop_parts(keys.PARTS)
    drop_trainer(draft)


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


def _adapter(draft: Draft) -> None:
    kind = draft.take("adapter")
    if kind not in (None, "lora", "qlora"):
        raise draft.refuse("adapter", "not supported yet: halftune has full fine-tuning and LoRA today")
    if kind == "qlora":
        draft.translated("adapter", "adapter.type", "lora", "for its 4-bit base see load_in_4bit")
        draft.left.setdefault("load_in_4bit", True)
    else:
        draft.translated("adapter", "adapter.type", "lora" if kind else "none")
    if kind is None:
        for key in (*LORA, "lora_target_linear", "lora_target_modules"):
            if key in draft.left:
                draft.none(key, "adapter is not set: all weights are trained")
        return
    draft.rename(LORA)
    linear, modules = draft.take("lora_target_linear"), draft.take("lora_target_modules")
    if linear:
        draft.translated("lora_target_linear", "adapter.target_modules", "all-linear")
    elif linear is not None:
        draft.none("lora_target_linear", "is off")
    if modules and not linear:
        target = modules if isinstance(modules, str) else listed(modules)  # text is one regular expression
        draft.translated("lora_target_modules", "adapter.target_modules", target)
    elif "lora_target_modules" in draft.source:
        draft.none("lora_target_modules", "all linear layers are adapted anyway")
    draft.default("adapter.dropout", 0.0, "lora_dropout")


def _data(draft: Draft) -> None:
    pretrain = draft.take("pretraining_dataset")
    sources, notes, kinds = [], [], {True} if pretrain else set[bool]()
    for key, ours in (("datasets", "data.train"), ("test_datasets", "data.eval")):
        entries = draft.take(key) or (pretrain if key == "datasets" else None)
        if entries is None:
            continue
        read = [_source(entry) for entry in ([entries] if isinstance(entries, str | dict) else entries)]
        sources, notes = [source for source, _ in read], [note for _, note in read if note]
        kinds |= {source.get("format") == "text" for source in sources} if not pretrain else set()
        name = "pretraining_dataset" if pretrain and key == "datasets" else key
        if notes:
            draft.changed(name, ours, sources, "; ".join(dict.fromkeys(notes)))
        else:
            draft.translated(name, ours, sources)
    _labels(draft)
    if len(kinds) > 1:
        why = "some sources are type completion, where every token is trained, and some hold conversations"
        raise draft.refuse("datasets", f"{why}; halftune trains one kind in a run: make a recipe of each")
    texts = True in kinds
    draft.put("method.type", "pretrain" if texts else "sft")
    on_inputs = draft.take("train_on_inputs")
    if on_inputs is not None and not texts:
        draft.translated("train_on_inputs", "method.train_on", "all" if on_inputs else "assistant")
    elif on_inputs is not None:
        draft.none("train_on_inputs", "pre-training trains every token")
    _template(draft)
    if draft.has("sample_packing"):
        draft.translated("sample_packing", "data.packing", bool(draft.take("sample_packing")))
    draft.words("excess_length_strategy", "data.overlong", OVERLONG, "drop", "longer samples are dropped")
    draft.default("data.overlong", "drop", "excess_length_strategy")
    draft.default("data.max_length", 512, "sequence_len")
    draft.default("data.packing", False, "sample_packing")
    grouping(draft)


def _labels(draft: Draft) -> None:
    """Refuses data sets whose trained tokens would be others here."""
    entries = [entry for entry in draft.source.get("datasets") or [] if isinstance(entry, dict)]
    for key, (here, why) in keys.LABELS.items():
        if any(entry.get(key) not in (None, *here) for entry in entries):
            draft.refused(key, why)
    kinds = [entry.get("type") for entry in entries]
    if not all(kinds):
        draft.refused("type", "a data set without a type holds tokens and labels; halftune reads texts only")
    elif "input_output" in kinds:
        draft.refused("type", "input_output marks parts of a text; halftune trains whole answers")


def _template(draft: Draft) -> None:
    template = draft.take("chat_template")
    if template == "chatml":
        draft.translated("chat_template", "model.chat_template", "chatml")
    elif template == "tokenizer_default":
        draft.none("chat_template", "the tokenizer's own template is the default")
    elif template is not None:
        why = "the tokenizer's own chat template renders conversations; see model.chat_template if it has none"
        draft.changed("chat_template", "", None, why)


def _source(entry: Any) -> tuple[dict[str, Any], str]:
    """One data set: (our source, what changed)."""
    if not isinstance(entry, dict):
        return {"path": str(entry)}, ""
    files = entry.get("data_files")
    files = [files] if isinstance(files, str) else files
    source: dict[str, Any] = {"path": files[0] if files else str(entry.get("path"))}
    changes = ["only the first of data_files is taken"] if files and len(files) > 1 else []
    if entry.get("name"):
        source["path"] += f":{entry['name']}"
    split = entry.get("split")
    if split and split != "train" and not entry.get("ds_type"):
        source["split"] = split
    kind = entry.get("type") or ""
    kind = kind if isinstance(kind, str) else "of its own"
    if kind == "alpaca":
        changes.append(
            'type alpaca: the chat template renders questions, without Alpaca\'s "### Instruction:" around them'
        )
    if kind in ("alpaca", "completion"):
        source["format"] = "text" if kind == "completion" else "alpaca"
    elif kind not in ("chat_template", "sharegpt", ""):
        changes.append(f"type {kind.splitlines()[0]}: the format is found from the columns")
    field = entry.get("field_messages")
    if kind == "completion" and entry.get("field", "text") != "text":
        source["columns"] = {"text": entry["field"]}
    elif field and field not in ("messages", "conversations"):
        source["columns"] = {"messages": field}
    if entry.get("field_tools") not in (None, "tools"):
        source.setdefault("columns", {})["tools"] = entry["field_tools"]
    return source, "; ".join([*changes, *_left_out(entry)])


def _left_out(entry: dict[str, Any]) -> list[str]:
    """What a data set says that has no place in ours."""
    said = entry.get("message_property_mappings") or {}
    role = said.get("role") or entry.get("message_field_role") or "role"
    content = said.get("content") or entry.get("message_field_content") or "content"
    unread = [key for key, value in entry.items() if key not in READ and value not in (None, False)]
    turns = "messages hold role and content, or from and value, here"
    left = [] if (role, content) in SPEAKERS else [f"{role}, {content}: {turns}"]
    return left + ([f"{', '.join(unread)}: not taken over"] if unread else [])


def _training(draft: Draft) -> None:
    optimizer(draft, "optimizer")
    scheduler(draft, "lr_scheduler")
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
    compiled = draft.take("torch_compile")
    if compiled is not None:
        draft.translated("torch_compile", "training.torch_compile", compiled is True)
    _periods(draft)
    whole_steps(draft, "logging_steps", "training.logging_steps")
    resume(draft)
    if draft.get("training.max_steps") is None:
        draft.default("training.num_train_epochs", 1, "num_epochs")
    draft.default("training.per_device_train_batch_size", 1, "micro_batch_size")
    draft.default("training.gradient_checkpointing", False, "gradient_checkpointing")
    draft.default("training.output_dir", "model-out", "output_dir")


def _periods(draft: Draft) -> None:
    """Evaluation and checkpoints: times per epoch, or steps."""
    evaluates = draft.get("data.eval") is not None or bool(draft.get("data.eval_split"))
    for key, ours in (("evals_per_epoch", "training.eval_steps"), ("saves_per_epoch", "training.save_steps")):
        times = draft.take(key)
        if times == 1 and (evaluates or ours.endswith("save_steps")):
            draft.translated(key, ours, "epoch")
        elif times and (evaluates or ours.endswith("save_steps")):
            draft.changed(key, ours, "epoch", f"once per epoch instead of {times} times; a number of steps works too")
        elif times is not None or key in draft.source:
            draft.none(
                key, "never there" if evaluates or ours.endswith("save_steps") else "there is no evaluation data"
            )
    if "eval_steps" in draft.left and "eval_strategy" not in draft.left and evaluates:
        whole_steps(draft, "eval_steps", "training.eval_steps")
    periods(draft, evaluates=evaluates, per_steps=False)


def _logging(draft: Draft) -> None:
    project, name = draft.take("wandb_project"), draft.take("wandb_name")
    if project:
        draft.changed("wandb_project", "logging.report_to", ["wandb"], "set WANDB_PROJECT for the project's name")
    elif "wandb_project" in draft.source:
        draft.none("wandb_project", "is off")
    if name:
        draft.translated("wandb_name", "logging.run_name", name)
    elif "wandb_name" in draft.source:
        draft.none("wandb_name", "is off")
