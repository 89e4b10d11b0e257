"""Translates a TRL config: SFTConfig, ModelConfig and ScriptArguments in one YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halftune.config.convert.draft import Draft
from halftune.config.convert.formats import attention, listed, precision, quantization
from halftune.config.convert.trainer import convert_trainer, grouping, periods

MODEL = {
    "model_name_or_path": "model.name_or_path",
    "model_revision": "model.revision",
    "chat_template_path": "model.chat_template",
    "dataset_num_proc": "data.num_workers",
}
LORA = {
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save",
    "use_rslora": "adapter.use_rslora",
    "use_dora": "adapter.use_dora",
}
NO_EQUIVALENT = {
    "lora_task_type": "always causal language modelling",
    "lora_target_parameters": "not there today",
    "eos_token": "the tokenizer's own holds",
    "pad_token": "the tokenizer's own holds",
    "pad_to_multiple_of": "always 8",
    "padding_free": "packing does it",
    "eval_packing": "evaluation is packed as training is",
    "truncation_mode": "whole turns are kept from the start",
    "shuffle_dataset": "data is shuffled every epoch",
    "dataset_kwargs": "not there today",
    "dataset_streaming": "data is read whole before training",
    "streaming": "data is read whole before training",
    "model_init_kwargs": "the plan decides how the model is loaded",
    "activation_offloading": "not there today",
    "ignore_bias_buffers": "not needed",
    "use_vllm": "not there today",
    "dataset_mixer": "list the sources under data.train",
    "env": "set environment variables in the shell",
    "tools": "tools come with each conversation",
}
DTYPES = ("dtype", "torch_dtype")


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        ConfigError: a method other than supervised fine-tuning.
    """
    for key in ("beta", "num_generations", "reward_model_path", "reward_funcs", "desirable_weight"):
        if draft.has(key):
            raise draft.refuse(key, "halftune has supervised fine-tuning and pre-training today")
    draft.rename(MODEL)
    draft.put("method.type", "sft")
    precision(draft, default="bf16")
    for key in DTYPES:
        if key in draft.left:
            value = draft.take(key)
            draft.changed(
                key, "", None, f"{value}: frozen weights are loaded in the dtype of compute, trained ones in fp32"
            )
    if draft.has("attn_implementation"):
        attention(draft, "attn_implementation", draft.take("attn_implementation"))
    _adapter(draft)
    quantization(draft)
    _data(draft)
    _loss(draft)
    checkpointing = draft.take("gradient_checkpointing")
    if checkpointing is not None:
        draft.translated("gradient_checkpointing", "training.gradient_checkpointing", checkpointing)
    draft.default("training.gradient_checkpointing", True, "gradient_checkpointing")
    convert_trainer(draft)
    draft.default("training.logging_steps", 10, "logging_steps")
    draft.default("training.learning_rate", 2.0e-5, "learning_rate")
    draft.default("training.output_dir", "trainer_output", "output_dir")
    periods(draft, evaluates=draft.get("data.eval") is not None)
    draft.drop(NO_EQUIVALENT)


def _adapter(draft: Draft) -> None:
    use = draft.take("use_peft")
    draft.translated("use_peft", "adapter.type", "lora" if use else "none")
    if not use:
        for key in (*LORA, "lora_target_modules"):
            if key in draft.left:
                draft.none(key, "use_peft is off: all weights are trained")
        return
    draft.rename(LORA)
    draft.default("adapter.dropout", 0.05, "lora_dropout")
    if draft.has("lora_target_modules"):
        target = draft.take("lora_target_modules")
        alone = [target] if isinstance(target, str) else target
        value = "all-linear" if list(alone) == ["all-linear"] else listed(target)
        draft.translated("lora_target_modules", "adapter.target_modules", value)
    draft.default("adapter.target_modules", ["q_proj", "v_proj"], "lora_target_modules (peft's for this family)")


def _data(draft: Draft) -> None:
    name, config = draft.take("dataset_name"), draft.take("dataset_config")
    train, test = draft.take("dataset_train_split"), draft.take("dataset_test_split")
    if name is not None:
        path = f"{name}:{config}" if config else str(name)
        local = Path(str(name)).exists()
        draft.translated("dataset_name", "data.train", [_with_split(path, None if local else train)])
        asked = draft.left.get("eval_strategy") or draft.left.get("evaluation_strategy")
        if asked not in (None, "no", False) and not local:
            draft.put("data.eval", [_with_split(path, test or "test")])
    for key, value in (("dataset_config", config), ("dataset_train_split", train), ("dataset_test_split", test)):
        if value is not None and name is not None:
            draft.translated(key, "data.train", draft.get("data.train"))
        elif value is not None:
            draft.none(key, "there is no dataset_name")
    mixture = draft.take("datasets")
    if mixture is not None:
        draft.translated("datasets", "data.train", [_of_mixture(entry) for entry in mixture])
    _text_field(draft)
    for key in ("max_length", "max_seq_length"):
        if draft.has(key):
            draft.translated(key, "data.max_length", draft.take(key))
    draft.default("data.max_length", 1024, "max_length")
    _packing(draft)
    grouping(draft)


def _text_field(draft: Draft) -> None:
    field = draft.take("dataset_text_field")
    if field not in (None, "text"):
        for source in draft.get("data.train") or []:
            source["columns"] = {"text": field}
        draft.changed("dataset_text_field", "", None, "becomes columns of each source")
    elif field is not None:
        draft.none("dataset_text_field", "the format is found from the columns")


def _packing(draft: Draft) -> None:
    strategy, packing = draft.take("packing_strategy"), draft.take("packing")
    split = strategy == "bfd_split"
    if packing is not None:
        draft.translated(
            "packing", "data.packing", {"enabled": True, "split": True} if packing and split else bool(packing)
        )
    draft.default("data.packing", False, "packing")
    if strategy in ("bfd", "bfd_split"):
        draft.translated("packing_strategy", "data.packing", draft.get("data.packing"))
    elif strategy is not None:
        draft.changed(
            "packing_strategy", "", None, f"{strategy}: rows are packed best-fit, and samples never see each other"
        )


def _with_split(path: str, split: Any) -> dict[str, Any]:
    return {"path": path, "split": split} if split not in (None, "train") else {"path": path}


def _of_mixture(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        return {"path": str(entry)}
    files = entry.get("data_files")
    path = files if isinstance(files, str) else str(entry.get("path"))
    if entry.get("name"):
        path += f":{entry['name']}"
    return _with_split(path, entry.get("split"))


def _loss(draft: Draft) -> None:
    """TRL trains whole conversations unless it is told not to; which one a data set needs cannot be seen here."""
    assistant, completion = draft.take("assistant_only_loss"), draft.take("completion_only_loss")
    loss = draft.take("loss_type")
    if assistant is not None:
        draft.translated("assistant_only_loss", "method.train_on", "assistant" if assistant else "all")
    if completion is not None:
        draft.translated("completion_only_loss", "method.train_on", "assistant" if completion else "all")
    if assistant is None and completion is None:
        why = "answers only are trained; TRL trains whole conversations (train_on: all) unless this is true"
        draft.changed("assistant_only_loss", "method.train_on", "assistant", why)
    if loss in ("nll", "chunked_nll"):
        draft.none("loss_type", "always the chunked cross-entropy at labelled positions")
    elif loss is not None:
        draft.changed("loss_type", "", None, f"{loss}: cross-entropy takes its place")
