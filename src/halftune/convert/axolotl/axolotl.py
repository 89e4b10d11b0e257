"""Translates an axolotl config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from halftune.convert import audio, images, preference, reinforcement
from halftune.convert.axolotl.adapter import adapter, quantised_experts
from halftune.convert.axolotl.data import data
from halftune.convert.draft import Draft, is_off
from halftune.convert.formats import attention, listed, precision, quantization
from halftune.convert.optimizers import optimizer
from halftune.convert.trainer import (
    SHARED,
    drop_trainer,
    embedding_noise,
    evaluates,
    loggers,
    lora_plus,
    lowest_rate,
    number,
    offload,
    periods,
    remote_code,
    resume,
    scheduler,
    warmup,
    whole_steps,
)

RENAMED = {
    **SHARED,
    "base_model": "model.name_or_path",
    "revision_of_model": "model.revision",
    "tokenizer_config": "model.tokenizer",
    "num_epochs": "training.num_train_epochs",
    "max_steps": "training.max_steps",
    "micro_batch_size": "training.per_device_train_batch_size",
    "eval_batch_size": "training.per_device_eval_batch_size",
    "early_stopping_patience": "training.early_stopping_patience",
    "loss_watchdog_threshold": "training.stop_above_loss",
    "loss_watchdog_patience": "training.stop_above_loss_steps",
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
ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "unk_token": ""}
# Plugins whose loss changes nothing that is learned; each other one may.
PLUGINS = {"CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "ExpertParallelPlugin", "SwanLabPlugin",
           "LMEvalPlugin"}  # fmt: skip


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        Refusal: reinforcement learning, another adapter than (Q)LoRA, or no data to train on.
    """
    method = preference.of_axolotl(draft)
    if is_off(draft.left.get("datasets")) and is_off(draft.left.get("pretraining_dataset")):
        raise draft.refuse("datasets", "names no data to train on")
    draft.idle({"save_total_limit": 0}, "is 0: the default holds")
    draft.rename(RENAMED)
    draft.move("learning_rate", "training.learning_rate", number)
    precision(draft, default="auto")
    _attention(draft)
    adapter(draft)
    quantization(draft, "base_model")
    quantised_experts(draft)
    _plugins(draft)
    images.of_axolotl(draft, method)
    audio.of_axolotl(draft, method)
    data(draft, method)
    _training(draft)
    reinforcement.dropout(draft)
    if method == "grpo":
        reinforcement.finish_grpo(draft)
    else:
        preference.finish(draft, method)
    _logging(draft)
    offload(draft, folder)
    remote_code(draft)
    _tokens(draft)
    _model_config(draft)
    if (draft.left.get("model_quantization_config_kwargs") or {}).get("dequantize"):
        for key in ("model_quantization_config", "model_quantization_config_kwargs"):
            draft.none(key, "weights are widened on load")
    _without_effect(draft, method)
    draft.drop_listed("axolotl")
    drop_trainer(draft)


def _without_effect(draft: Draft, method: str) -> None:
    """Keys that do nothing there without another one."""
    schedule, lowest = draft.get("training.lr_scheduler_type"), number(draft.source.get("cosine_min_lr_ratio"))
    cosine = schedule in (None, "cosine", "cosine_with_min_lr")
    draft.idle({"cosine_constant_lr_ratio": 1}, "is 1: the rate falls to the end")
    if not draft.get("training.weight_decay"):  # there, embeddings with a rate of their own do not decay
        draft.idle({"embedding_lr": draft.source.get("learning_rate"), "embedding_lr_scale": 1}, "is learning_rate")
    parts = {
        "lisa_n_layers": not is_off(draft.left.get("lisa_n_layers")),
        "the embedding, which is not trained": draft.get("adapter.type") == "none"
        or bool(draft.get("adapter.modules_to_save") or re.search("embed|head", str(draft.get("adapter")))),
        "relora": "relora" not in draft.source or not is_off(draft.source["relora"]),
        "processor_type": not is_off(draft.source.get("processor_type")),
        "cosine_min_lr_ratio": cosine and bool(lowest),
        "lr_scheduler: cosine": cosine and draft.get("training.warmup_ratio") != 0,
        "rl": bool(method),
        "min_sample_len": number(draft.left.get("min_sample_len") or 0) > 2,
    }
    for key, part in (
        ("lisa_step_interval", "lisa_n_layers"),
        ("lisa_layers_attribute", "lisa_n_layers"),
        ("embedding_lr", "the embedding, which is not trained"),
        ("embedding_lr_scale", "the embedding, which is not trained"),
        ("relora_prune_ratio", "relora"),
        ("relora_steps", "relora"),
        ("image_size", "processor_type"),
        ("cosine_constant_lr_ratio", "cosine_min_lr_ratio"),
        ("lr_quadratic_warmup", "lr_scheduler: cosine"),
        ("trl", "rl"),
        ("min_sample_len", "min_sample_len"),
    ):
        if not parts[part]:
            draft.drop({key: "every row is longer" if key == part else f"belongs to {part}"})


def _tokens(draft: Draft) -> None:
    """Special tokens by their role, and added ones, which also train what is next to a LoRA."""
    if isinstance(tokens := draft.left.get("special_tokens"), dict):
        _special_tokens(draft, tokens)
    if isinstance(draft.left.get("tokens"), list):
        _add(draft, "tokens", draft.take("tokens"))


def _add(draft: Draft, key: str, tokens: list[Any]) -> None:
    why = "only the chat template writes them: in a message they stay plain text"
    saved = {str(one).rpartition(".")[2] for one in draft.get("adapter.modules_to_save") or ()}
    if draft.get("adapter.type") == "lora" and not {"embed_tokens", "lm_head"} <= saved:
        why += "; with LoRA, the embedding and the output layer are trained in full"
    draft.changed(key, "model.tokens.add", [*(draft.get("model.tokens.add") or ()), *map(str, tokens)], why)


def _special_tokens(draft: Draft, tokens: dict[str, Any]) -> None:
    given = {key: token for key, token in tokens.items() if token is not None}
    tokens = {key: token for key, token in given.items() if key != "additional_special_tokens"}
    if added := given.get("additional_special_tokens"):
        _add(draft, "special_tokens: additional_special_tokens", listed(added))
    if tokens.keys() <= {"pad_token"}:
        draft.none("special_tokens", "padding is masked by position, whatever its token")
    elif tokens.keys() <= ROLES.keys():
        named = {ROLES[key]: token for key, token in tokens.items() if ROLES[key]}
        why = "no text becomes the unknown token that is named here" if "unk_token" in tokens else ""
        draft.translated("special_tokens", "model.tokens.special", named, why)


def _model_config(draft: Draft) -> None:
    """Changes of config.json: the loss of experts' routers, and nothing else."""
    changes = draft.left.get("model_config")
    if is_off(changes) or changes == {"use_cache": False}:
        draft.drop({"model_config": "answers are generated with a cache, or without: they are the same"})
        return
    asked = isinstance(changes, dict) and changes.get("output_router_logits")
    if not asked or changes.keys() - {"output_router_logits", "router_aux_loss_coef"}:
        draft.refused("model_config", "the model's own settings hold: another model would be trained")
    else:
        coefficient = changes.get("router_aux_loss_coef", "model")
        draft.translated("model_config", "training.router_aux_loss_coef", coefficient)


def _plugins(draft: Draft) -> None:
    """Plugins change how a step is computed, or what is learned; one that is not known may do anything."""
    if "plugins" not in draft.left:
        return
    names = [str(name) for name in draft.take("plugins") or []]
    if other := [name for name in names if name.rpartition(".")[2] not in PLUGINS]:
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


def _training(draft: Draft) -> None:
    optimizer(draft, "optimizer")
    scheduler(draft, "lr_scheduler")
    lowest_rate(draft)
    lora_plus(draft)
    embedding_noise(draft)
    if draft.left.get("warmup_steps") is None and draft.left.get("warmup_ratio") is None:
        _usual_warmup(draft)
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


def _usual_warmup(draft: Draft) -> None:
    """3 % of the steps, at most 100 of them."""
    steps = draft.get("training.max_steps")
    if isinstance(steps, int):
        draft.default("training.warmup_steps", min(int(0.03 * steps), 100), "warmup_steps (3 %, at most 100)")
    else:
        why = "not written there: 3 % of the steps, at most 100 of them"
        draft.changed("warmup_ratio", "training.warmup_ratio", 0.03, why)


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
    loggers(draft, ("tensorboard", "mlflow", "swanlab", "trackio"))
