"""Translates an axolotl config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halftune.config.convert.draft import Draft
from halftune.config.convert.formats import attention, listed, precision, quantization
from halftune.config.convert.trainer import NO_EQUIVALENT as TRAINER
from halftune.config.convert.trainer import grouping, number, optimizer, periods, resume, scheduler, whole_steps

RENAMED = {
    "base_model": "model.name_or_path",
    "revision_of_model": "model.revision",
    "tokenizer_config": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
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
NO_EQUIVALENT = {
    "model_type": "read from config.json",
    "tokenizer_type": "read from the tokenizer's files",
    "processor_type": "text only today",
    "is_llama_derived_model": "read from config.json",
    "strict": "unknown keys are always errors",
    "dataset_prepared_path": "tokenised data is cached by content",
    "push_dataset_to_hub": "nothing is uploaded",
    "pad_to_sequence_len": "rows are only padded to a multiple of 8",
    "eval_sample_packing": "evaluation is packed as training is",
    "sample_packing_group_size": "packing looks at the whole epoch",
    "sample_packing_bin_size": "packing looks at the whole epoch",
    "sample_packing_sequentially": "packing looks at the whole epoch",
    "multipack_real_batches": "packing looks at the whole epoch",
    "pad_to_multiple_of": "always 8",
    "special_tokens": "the tokenizer's own hold; change them there",
    "tokens": "add tokens to the tokenizer and name it in model.tokenizer",
    "lora_model_dir": "merge the adapter with halftune export first",
    "lora_fan_in_fan_out": "read from the layers",
    "lora_on_cpu": "not needed",
    "lora_mlp_kernel": "not there today",
    "lora_qkv_kernel": "not there today",
    "lora_o_kernel": "not there today",
    "loraplus_lr_ratio": "not there today",
    "relora": "not there today",
    "relora_prune_ratio": "not there today",
    "plugins": "not there today",
    "liger_rope": "not there today",
    "liger_rms_norm": "not there today",
    "liger_glu_activation": "not there today",
    "liger_layer_norm": "not there today",
    "liger_fused_linear_cross_entropy": "the loss is computed in chunks, at labelled positions only",
    "cut_cross_entropy": "the loss is computed in chunks, at labelled positions only",
    "unfrozen_parameters": "not there today",
    "neftune_noise_alpha": "not there today",
    "ddp": "the number of processes decides",
    "local_rank": "the launcher decides",
    "wandb_entity": "set WANDB_ENTITY",
    "wandb_watch": "not there today",
    "wandb_log_model": "nothing is uploaded",
    "wandb_run_id": "set WANDB_RUN_ID",
    "mlflow_tracking_uri": "not there today",
    "use_tensorboard": "logging.report_to: tensorboard",
    "debug": "halftune data shows samples and their labels",
    "shuffle_merged_datasets": "data is shuffled every epoch",
    "dataset_keep_in_memory": "data is read whole",
    "skip_prepare_dataset": "not there today",
    "eval_table_size": "not there today",
    "eval_max_new_tokens": "generation.max_new_tokens",
    "flash_attn_cross_entropy": "the loss is computed in chunks",
    "flash_attn_rms_norm": "not there today",
    "flash_attn_fuse_mlp": "not there today",
    "s2_attention": "not there today",
    "save_first_step": "not there today",
    "auto_resume_from_checkpoints": "always: a broken-off run goes on by itself",
    "eval_causal_lm_metrics": "evaluation is the loss",
    "do_causal_lm_eval": "evaluation is the loss",
    "lr_quadratic_warmup": "not there today",
    "cosine_min_lr_ratio": "lr_scheduler_type: cosine_with_min_lr ends at a tenth",
    "embedding_lr": "not there today",
    "gradient_checkpointing_kwargs": "non-reentrant, as recommended",
    "chat_template_jinja": "write the template to a file and name it in model.chat_template",
    "train_on_eos": "the end of an answer is always trained",
}
# What is read of an entry of `datasets`; each other key of it is named in the report.
READ = {
    *("path", "data_files", "name", "split", "ds_type", "type", "field", "field_messages", "roles_to_train"),
    *("message_property_mappings", "message_field_role", "message_field_content"),
}
SPEAKERS = (("role", "content"), ("from", "value"))
OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        ConfigError: reinforcement learning, a reward model or another adapter than (Q)LoRA.
    """
    for key in ("rl", "reward_model", "process_reward_model"):
        if draft.take(key):
            raise draft.refuse(key, "halftune has supervised fine-tuning and pre-training today")
    draft.rename(RENAMED)
    if draft.has("learning_rate"):
        draft.translated("learning_rate", "training.learning_rate", number(draft.take("learning_rate")))
    precision(draft, default="auto")
    _attention(draft)
    _adapter(draft)
    quantization(draft)
    _data(draft)
    _training(draft)
    _logging(draft)
    draft.drop({**TRAINER, **NO_EQUIVALENT})


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
        raise draft.refuse("adapter", "halftune has full fine-tuning and LoRA today")
    if kind == "qlora":
        why = "the base is loaded in 16 bit, not in 4, and takes more memory"
        draft.changed("adapter", "adapter.type", "lora", why)
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
        target = modules if modules == "all-linear" else listed(modules)
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
    if entry.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
        changes.append("roles_to_train: assistant turns are trained")
    return source, "; ".join([*changes, *_left_out(entry)])


def _left_out(entry: dict[str, Any]) -> list[str]:
    """What a data set says that has no place in ours."""
    said = entry.get("message_property_mappings") or {}
    role = said.get("role") or entry.get("message_field_role") or "role"
    content = said.get("content") or entry.get("message_field_content") or "content"
    kept = {"train_on_eos": "turn"}  # so it is here
    unread = [key for key, value in entry.items() if key not in READ and value not in (None, False, kept.get(key))]
    turns = "messages hold role and content, or from and value, here"
    left = [] if (role, content) in SPEAKERS else [f"{role}, {content}: {turns}"]
    return left + ([f"{', '.join(unread)}: not taken over"] if unread else [])


def _training(draft: Draft) -> None:
    optimizer(draft, "optimizer")
    scheduler(draft, "lr_scheduler")
    ratio, steps = draft.take("warmup_ratio"), draft.take("warmup_steps")
    if steps is not None:
        draft.translated("warmup_steps", "training.warmup_steps", steps)
    if ratio is not None:
        draft.translated("warmup_ratio", "training.warmup_ratio", ratio)
    checkpointing = draft.take("gradient_checkpointing")
    if isinstance(checkpointing, str):
        why = f"{checkpointing}: activations are recomputed, none are moved to main memory"
        draft.changed("gradient_checkpointing", "training.gradient_checkpointing", True, why)
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
