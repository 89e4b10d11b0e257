"""Recognises configs of other frameworks by their keys."""

from __future__ import annotations

from typing import Any

from halftune.config.run import RunConfig

# Top-level keys specific to a framework; common ones such as learning_rate are excluded.
MARKS: dict[str, frozenset[str]] = {
    "LLaMA-Factory": frozenset(
        {"stage", "finetuning_type", "cutoff_len", "lora_target", "lora_rank", "template", "do_train", "dataset_dir",
         "preprocessing_num_workers", "plot_loss", "overwrite_cache", "overwrite_output_dir", "neat_packing",
         "quantization_bit", "flash_attn", "val_size", "mask_history", "train_on_prompt", "pref_beta", "infer_backend"}
    ),
    "LLaMA-Factory v1": frozenset(
        {"train_dataset", "model_class", "dist_config", "peft_config", "kernel_config", "quant_config", "init_config",
         "optim_config", "lr_scheduler_config", "sample_backend", "batching_strategy", "batching_workers", "cutoff_len",
         "enable_activation_checkpointing", "global_batch_size", "micro_batch_size", "cp_size"}
    ),
    "axolotl": frozenset(
        {"base_model", "sequence_len", "micro_batch_size", "sample_packing", "pad_to_sequence_len", "val_set_size",
         "datasets", "adapter", "lora_r", "lora_target_linear", "lora_target_modules", "num_epochs", "optimizer",
         "load_in_4bit", "load_in_8bit", "train_on_inputs", "flash_attention", "gradient_checkpointing_kwargs",
         "dataset_prepared_path", "special_tokens", "chat_template", "lora_model_dir", "wandb_project",
         "evals_per_epoch",
         "saves_per_epoch", "strict", "model_type", "tokenizer_type", "lr_scheduler", "group_by_length"}
    ),
    "TRL": frozenset(
        {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "use_peft",
         "lora_target_modules",
         "lora_r", "model_name_or_path", "attn_implementation", "torch_dtype", "dtype", "max_length", "max_seq_length",
         "packing_strategy", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eos_token",
         "dataset_num_proc", "gradient_checkpointing_kwargs", "eval_strategy", "load_in_4bit", "lora_task_type",
         "push_to_hub", "report_to", "bnb_4bit_quant_type", "dataset_mixer", "run_name"}
    ),
}  # fmt: skip
OURS = frozenset(RunConfig.model_fields)


def recognise(values: Any) -> str | None:
    """Return the framework whose config this is; None for a recipe, or if unknown."""
    if not isinstance(values, dict):
        return None
    if isinstance(values.get("model"), dict) and (
        isinstance(values.get("training"), dict) or isinstance(values.get("data"), dict)
    ):
        return None
    scores = {name: len(marks & values.keys()) for name, marks in MARKS.items()}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= 2 and scores[best] > len((OURS - {"adapter"}) & values.keys()) else None
