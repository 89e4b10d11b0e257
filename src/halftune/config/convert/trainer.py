"""Keys of transformers' TrainingArguments, which LLaMA-Factory and TRL share, and words that all three use."""

from __future__ import annotations

from typing import Any

from halftune.config.convert.draft import Draft

RENAMED = {
    "output_dir": "training.output_dir",
    "num_train_epochs": "training.num_train_epochs",
    "per_device_train_batch_size": "training.per_device_train_batch_size",
    "per_device_eval_batch_size": "training.per_device_eval_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "adam_epsilon": "training.adam_epsilon",
    "max_grad_norm": "training.max_grad_norm",
    "seed": "training.seed",
    "torch_compile": "training.torch_compile",
    "save_total_limit": "training.save_total_limit",
    "load_best_model_at_end": "training.load_best",
    "run_name": "logging.run_name",
    "tf32": "precision.tf32",
    "trust_remote_code": "model.trust_remote_code",
}
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adagrad": "adagrad",
}
SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial")
SHARING = "distributed.strategy: auto shares the model by fsdp2 where it does not fit one device"
NO_EQUIVALENT = {
    "do_train": "halftune train always trains",
    "do_eval": "there is evaluation where there is evaluation data",
    "do_predict": "halftune chat answers after training",
    "overwrite_output_dir": "a run folder of another configuration is never overwritten",
    "dataloader_num_workers": "data is tokenised before training",
    "dataloader_pin_memory": "data is tokenised before training",
    "dataloader_drop_last": "every sample is seen",
    "remove_unused_columns": "only the columns of the format are read",
    "length_column_name": "lengths are counted in tokens",
    "ddp_timeout": "data is prepared before the processes wait for each other",
    "ddp_find_unused_parameters": "decided by the adapter",
    "ddp_bucket_cap_mb": "torch's default",
    "deepspeed": SHARING,
    "fsdp": SHARING,
    "fsdp_config": SHARING,
    "accelerator_config": "an accelerate config never changes a run here",
    "gradient_checkpointing_kwargs": "non-reentrant, as recommended",
    "neftune_noise_alpha": "not there today",
    "label_smoothing_factor": "not there today",
    "use_cpu": "the plan takes what the machine has",
    "no_cuda": "the plan takes what the machine has",
    "logging_dir": "metrics go to the run folder",
    "logging_first_step": "logging_steps: 1 is the default",
    "logging_strategy": "metrics are logged in steps",
    "data_seed": "training.seed orders the data too",
    "hub_model_id": "nothing is uploaded",
    "push_to_hub": "nothing is uploaded",
    "hub_strategy": "nothing is uploaded",
    "hub_private_repo": "nothing is uploaded",
    "save_only_model": "checkpoints can always be resumed from",
    "save_safetensors": "always",
    "greater_is_better": "the evaluation loss decides, lower is better",
    "use_liger_kernel": "not there today",
    "liger_kernel_config": "not there today",
    "include_num_input_tokens_seen": "tokens are always counted",
    "include_tokens_per_second": "always shown",
    "average_tokens_across_devices": "always so",
    "bf16_full_eval": "evaluation has the precision of training",
    "fp16_full_eval": "evaluation has the precision of training",
    "fp16_opt_level": "apex is not used",
    "half_precision_backend": "torch's autocast is used",
    "torch_empty_cache_steps": "not there today",
    "eval_accumulation_steps": "only the loss is kept in evaluation",
    "batch_eval_metrics": "only the loss is kept in evaluation",
    "prediction_loss_only": "only the loss is kept in evaluation",
    "eval_on_start": "not there today",
    "eval_delay": "not there today",
    "disable_tqdm": "logging.progress",
    "log_level": "not there today",
    "optim_args": "not there today",
    "lr_scheduler_kwargs": "not there today (cosine_with_min_lr ends at a tenth)",
    "auto_find_batch_size": "the plan estimates memory beforehand",
    "torch_compile_backend": "torch's default",
    "torch_compile_mode": "torch's default",
}


def convert_trainer(draft: Draft) -> None:
    """Everything that TrainingArguments says, defaults included (transformers 5)."""
    draft.rename(RENAMED)
    if draft.has("learning_rate"):
        draft.translated("learning_rate", "training.learning_rate", number(draft.take("learning_rate")))
    steps = draft.take("max_steps")
    if steps is not None and steps > 0:
        draft.translated("max_steps", "training.max_steps", steps)
    elif steps is not None:
        draft.none("max_steps", "negative: num_train_epochs holds")
    _warmup(draft)
    optimizer(draft, "optim")
    scheduler(draft, "lr_scheduler_type")
    report_to(draft)
    whole_steps(draft, "logging_steps", "training.logging_steps")
    resume(draft)
    metric = draft.take("metric_for_best_model")
    if metric in ("loss", "eval_loss"):
        draft.none("metric_for_best_model", "always the evaluation loss")
    elif metric is not None:
        draft.changed("metric_for_best_model", "", None, "the evaluation loss decides")
    draft.default("training.per_device_train_batch_size", 8, "per_device_train_batch_size")
    if draft.get("training.max_steps") is None:
        draft.default("training.num_train_epochs", 3, "num_train_epochs")
    draft.default("training.lr_scheduler_type", "linear", "lr_scheduler_type")
    if draft.get("training.save_total_limit") is None:
        draft.default("training.save_total_limit", None, "save_total_limit (all are kept)")
    draft.drop(NO_EQUIVALENT)


def number(value: Any) -> Any:
    """``"1e-4"`` as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _warmup(draft: Draft) -> None:
    ratio, steps = draft.take("warmup_ratio"), draft.take("warmup_steps")
    if isinstance(steps, float) and 0 < steps < 1:  # transformers 5 reads a fraction as a ratio
        ratio, steps = steps, None
        draft.translated("warmup_steps", "training.warmup_ratio", ratio)
    elif steps:
        draft.translated("warmup_steps", "training.warmup_steps", int(steps))
        if ratio is not None:
            draft.none("warmup_ratio", "warmup_steps wins")
    elif steps is not None:
        draft.none("warmup_steps", "is 0: warmup_ratio holds")
    if ratio is not None and not steps:
        draft.translated("warmup_ratio", "training.warmup_ratio", ratio)
    if not ratio and not steps:
        draft.default("training.warmup_ratio", 0.0, "warmup_ratio")


def optimizer(draft: Draft, key: str) -> None:
    """The optimizer; 8-bit and paged ones become plain AdamW."""
    draft.words(
        key, "training.optim", OPTIMIZERS, "adamw", "AdamW takes its place, with moments that are not quantised"
    )


def scheduler(draft: Draft, key: str) -> None:
    """The schedule."""
    table = {name: name for name in SCHEDULERS}
    draft.words(key, "training.lr_scheduler_type", table, "cosine", "cosine takes its place")


def grouping(draft: Draft) -> None:
    """Rows of like length together, which is off there unless it is asked for; call it when packing is known."""
    asked, strategy = draft.take("group_by_length"), draft.take("train_sampling_strategy")
    grouped = bool(asked) or strategy == "group_by_length"
    packed = bool(draft.get("data.packing"))
    for key, value in (("group_by_length", asked), ("train_sampling_strategy", strategy)):
        if value is not None and packed:
            draft.none(key, "rows are packed")
        elif strategy == "sequential":
            draft.changed(key, "data.group_by_length", False, "data is shuffled every epoch")
        elif value is not None:
            draft.translated(key, "data.group_by_length", grouped)
    if not packed:
        draft.default("data.group_by_length", False, "group_by_length")


def report_to(draft: Draft) -> None:
    """Loggers, those that exist here."""
    if "report_to" not in draft.left:
        return
    asked = draft.take("report_to")
    names = [asked] if isinstance(asked, str) else list(asked or [])
    kept = [name for name in names if name in ("tensorboard", "wandb")]
    lost = [name for name in names if name not in (*kept, "none", "None")]
    if lost:
        draft.changed(
            "report_to", "logging.report_to", kept, f"{', '.join(map(str, lost))}: not there; metrics.jsonl is"
        )
    else:
        draft.translated("report_to", "logging.report_to", kept)


def whole_steps(draft: Draft, key: str, ours: str) -> None:
    """A period in steps; a fraction of the run cannot be said here."""
    value = draft.take(key)
    if value is None:
        return
    if isinstance(value, int | float) and value >= 1:
        draft.translated(key, ours, int(value))
    else:
        _share(draft, key, ours, value)


def _share(draft: Draft, key: str, ours: str, value: Any) -> None:
    """A period that is a share of the run: a number of steps where the run's length is known, else once per epoch."""
    total, share = draft.get("training.max_steps"), number(value)
    if not isinstance(share, float) or not 0 < share < 1:
        draft.changed(key, "", None, f"{value} is no period: the default holds")
    elif total is not None:
        draft.translated(key, ours, max(1, round(share * total)))
    elif ours == "training.logging_steps":
        draft.changed(key, "", None, f"{value} of the run, whose length is not known here: every step is logged")
    else:
        why = f"{value} of the run, whose length is not known here: once per epoch; a number of steps works too"
        draft.changed(key, ours, "epoch", why)


def resume(draft: Draft) -> None:
    """Where to go on from."""
    if "resume_from_checkpoint" not in draft.left:
        return
    value = draft.take("resume_from_checkpoint")
    if isinstance(value, str) and value.lower() not in ("true", "false", "none"):
        draft.none("resume_from_checkpoint", "checkpoints of another framework cannot be resumed from here")
    elif value in (None, False):
        draft.none("resume_from_checkpoint", "a broken-off run goes on by itself; resume: never prevents that")
    else:
        draft.translated("resume_from_checkpoint", "training.resume", "auto")


def periods(draft: Draft, *, evaluates: bool, per_steps: bool = True) -> None:
    """``eval_strategy``, ``save_strategy`` and their steps; call it when the data is known."""
    for key in ("evaluation_strategy", "eval_strategy"):
        strategy, steps = draft.take(key), draft.left.get("eval_steps")
        if strategy is None and key in draft.source:
            draft.none(key, "is null")
        elif strategy == "steps" and evaluates and steps is None:
            draft.translated(key, "training.eval_steps", 500)
        elif strategy == "steps" and evaluates:
            whole_steps(draft, "eval_steps", "training.eval_steps")
            draft.translated(key, "training.eval_steps", draft.get("training.eval_steps") or "epoch")
        elif strategy == "epoch" and evaluates:
            draft.translated(key, "training.eval_steps", "epoch")
        elif strategy is not None:
            no = strategy in ("no", False)
            draft.none(
                key, "there is evaluation where there is evaluation data" if no else "there is no evaluation data"
            )
    if "eval_steps" in draft.left:
        if draft.get("training.eval_steps") not in (None, "epoch"):
            draft.translated("eval_steps", "training.eval_steps", draft.get("training.eval_steps"))
        else:
            draft.none("eval_steps", "evaluation is not in steps")
    _saves(draft)
    draft.default("training.save_steps", 500 if per_steps else "epoch", "save_steps")


def _saves(draft: Draft) -> None:
    strategy = draft.take("save_strategy")
    if strategy is not None:
        table = {"no": "end", False: "end", "epoch": "epoch", "steps": 500}
        if strategy == "steps" and draft.has("save_steps"):
            whole_steps(draft, "save_steps", "training.save_steps")
            table["steps"] = draft.get("training.save_steps") or "epoch"
        draft.translated("save_strategy", "training.save_steps", table.get(strategy, "epoch"))
        if "save_steps" in draft.left and strategy != "steps":
            draft.none("save_steps", f"save_strategy is {strategy}")
    whole_steps(draft, "save_steps", "training.save_steps")
