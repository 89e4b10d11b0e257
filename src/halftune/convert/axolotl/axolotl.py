"""Translates an axolotl config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from halftune.convert import audio, images, preference, reinforcement
from halftune.convert.axolotl.adapter import adapter
from halftune.convert.axolotl.data import data
from halftune.convert.draft import Draft, is_off, listed, number, table
from halftune.convert.formats import attention, precision, quantization
from halftune.convert.optimizers import optimizer
from halftune.convert.sections import sections
from halftune.convert.trainer import (
    drop_trainer,
    evaluates,
    loggers,
    lora_plus,
    periods,
    remote_code,
    scheduler,
    warms_up,
    warmup,
    whole_steps,
)

ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "pad", "unk_token": ""}


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        Refusal: reinforcement learning, another adapter than (Q)LoRA, or no data to train on.
    """
    method = preference.of_axolotl(draft)
    if is_off(draft.left.get("datasets")) and is_off(draft.left.get("pretraining_dataset")):
        raise draft.refuse("datasets", "names no data to train on")
    if draft.left.get("save_total_limit") == 0:
        draft.none("save_total_limit", "is 0: the default holds")
    draft.follow("trainer.shared", "axolotl.names")
    precision(draft, default="auto")
    _attention(draft)
    adapter(draft)
    quantization(draft, "base_model")
    draft.follow("axolotl.experts")
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
    draft.follow("axolotl.logging")
    loggers(draft, ("tensorboard", "mlflow", "swanlab", "trackio"))
    sections(draft, folder)
    remote_code(draft)
    _tokens(draft)
    _model_config(draft)
    if (draft.source.get("model_quantization_config_kwargs") or {}).get("dequantize"):
        draft.none("model_quantization_config", "weights are widened on load")
    _without_effect(draft)
    draft.drop_listed("axolotl")
    drop_trainer(draft)


def _without_effect(draft: Draft) -> None:
    """Keys that do nothing there without another one."""
    draft.follow("axolotl.without_effect")
    _embedding_rates(draft)
    if is_off(draft.source.get("relora", True)):
        draft.drop("relora_prune_ratio relora_steps", "belongs to relora")
    if number(draft.left.get("min_sample_len") or 0) <= 2:
        draft.drop("min_sample_len", "every row is longer")


def _embedding_rates(draft: Draft) -> None:
    if not draft.get("training.weight_decay"):  # there, embeddings with a rate of their own do not decay
        for key, usual in (("embedding_lr", draft.source.get("learning_rate")), ("embedding_lr_scale", 1)):
            if draft.has(key) and draft.left[key] == usual:
                draft.none(key, "is learning_rate")
    trained = draft.get("adapter.modules_to_save") or re.search("embed|head", str(draft.get("adapter")))
    if draft.get("adapter.type") != "none" and not trained:
        draft.drop("embedding_lr embedding_lr_scale", "belongs to the embedding, which is not trained")


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
    tokens = {key: token for key, token in tokens.items() if token is not None}
    if added := tokens.pop("additional_special_tokens", None):
        _add(draft, "special_tokens: additional_special_tokens", listed(added))
    if tokens.keys() <= {"pad_token"}:
        draft.none("special_tokens", "padding is masked by position, whatever its token")
    elif tokens.keys() <= ROLES.keys():
        named = {ROLES[key]: token for key, token in tokens.items() if ROLES[key]}
        why = "no text becomes the unknown token that is named here" if "unk_token" in tokens else ""
        draft.translated("special_tokens", "model.tokens.special", named, why)


def _model_config(draft: Draft) -> None:
    """Changes of config.json: the loss of experts' routers, and nothing else."""
    changes, routers = draft.left.get("model_config"), {"output_router_logits", "router_aux_loss_coef"}
    if isinstance(changes, dict) and changes.get("output_router_logits") and changes.keys() <= routers:
        coefficient = changes.get("router_aux_loss_coef", "model")
        draft.translated("model_config", "training.router_aux_loss_coef", coefficient)
    draft.follow("axolotl.config")


def _plugins(draft: Draft) -> None:
    """Plugins change how a step is computed, or what is learned; one that is not known may do anything."""
    if "plugins" not in draft.left:
        return
    names = [str(name) for name in draft.take("plugins") or []]
    if other := [name for name in names if name.rpartition(".")[2] not in table("axolotl", "plugins")]:
        draft.refused("plugins", f"{', '.join(other)}: may change what is learned")
    else:
        draft.none("plugins", "faster kernels and loggers, with the same result")


def _attention(draft: Draft) -> None:
    for key, name in table("axolotl", "flags").items():
        if draft.left.get(key):
            draft.left[key] = name
            attention(draft, key)
        elif key in draft.left:
            draft.none(key, "is off")
    attention(draft, "attn_implementation", "attention")


def _training(draft: Draft) -> None:
    optimizer(draft, "optimizer")
    scheduler(draft, "lr_scheduler")
    draft.follow("trainer.lowest_rate")
    lora_plus(draft)
    draft.follow("trainer.noise")
    if warms_up(draft) and draft.left.get("warmup_steps") is None and draft.left.get("warmup_ratio") is None:
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
    draft.follow("axolotl.training")
    _periods(draft)
    whole_steps(draft, "logging_steps", "training.logging_steps")
    draft.follow("trainer.resume", "axolotl.defaults")


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
