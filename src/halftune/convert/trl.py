"""Translates a TRL config: that of a trainer, ModelConfig and ScriptArguments in one YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halftune.convert import preference, reinforcement
from halftune.convert.draft import Draft, is_off, not_taken, table
from halftune.convert.formats import attention, precision, quantization
from halftune.convert.trainer import convert_trainer, grouping, periods


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        Refusal: reinforcement learning, or a preference method that is not supported.
    """
    method = _method(draft)
    if draft.has("beta"):  # also 0, which is GRPO's usual beta
        raise draft.refuse("beta", "the trainer is not named: add loss_type, sigmoid for DPO or kto for KTO")
    _template(draft)
    draft.follow("trl.model")
    draft.put("method.type", method)
    precision(draft, default="bf16")
    attention(draft, "attn_implementation")
    _adapter(draft)
    if not is_off(draft.left.get("load_in_4bit")):
        draft.left.setdefault("use_bnb_nested_quant", False)
    quantization(draft, "model_name_or_path")
    _dtypes(draft)
    reinforcement.dropout(draft)
    _data(draft)
    if method == "sft":
        _loss(draft)
    draft.follow("trl.checkpointing")
    convert_trainer(draft, folder)
    draft.default("training.logging_steps", 10, "logging_steps")
    draft.default("training.learning_rate", table("trl", "rates").get(method, 2.0e-5), "learning_rate")
    draft.default("training.output_dir", "trainer_output", "output_dir")
    periods(draft)
    preference.finish(draft, method)
    if method == "grpo":
        reinforcement.finish_grpo(draft)
    draft.drop_listed("trl")


def _method(draft: Draft) -> str:
    """Type of the method, whose keys are dealt with."""
    answers, taught = reinforcement.is_grpo(draft), reinforcement.is_gkd(draft)
    if answers:
        reinforcement.of_trl(draft)
    elif taught:
        reinforcement.of_gkd(draft)
    else:
        return preference.of_trl(draft) or "sft"
    return draft.get("method.type")


def _template(draft: Draft) -> None:
    """A file with a chat template, or a model whose template and tokens are taken."""
    key = "chat_template_path"
    if str(draft.left.get(key)).endswith((".jinja", ".j2")):
        draft.move(key, "model.chat_template")
    why = "the chat template of another model: write it to a file and name it in model.chat_template"
    draft.drop(key, why, "changed")


def _dtypes(draft: Draft) -> None:
    """The dtype in which weights are loaded: frozen ones have that of compute here, trained ones fp32 or bf16."""
    compute, full = draft.get("precision.compute"), draft.get("adapter.type") == "none"
    for key in ("dtype", "torch_dtype"):
        dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(draft.left.get(key)))
        if full and dtype == "bf16" == compute:
            draft.translated(key, "precision.trainable", "bf16")
        elif dtype == ("fp32" if full else compute) and not draft.get("model.quantization"):
            draft.none(key, "the same here")
        elif key in draft.left:
            why = f"{draft.left[key]}: frozen weights are loaded in the dtype of compute, trained ones in fp32"
            draft.drop(key, why, "changed")


def _adapter(draft: Draft) -> None:
    draft.left.setdefault("use_peft", None)
    draft.follow("trl.adapter")
    draft.follow("trl.full" if draft.get("adapter.type") == "none" else "trl.lora")


def _data(draft: Draft) -> None:
    _named_set(draft)
    if draft.has("datasets"):
        made = [_of_mixture(entry) for entry in draft.take("datasets")]
        changed = "; ".join(filter(None, (left for _, left in made)))
        draft.translated("datasets", "data.train", [source for source, _ in made], changed=changed)
    _text_field(draft)
    draft.follow("trl.length")
    _packing(draft)
    grouping(draft)


def _named_set(draft: Draft) -> None:
    parts = ("dataset_config", "dataset_train_split", "dataset_test_split")
    if not draft.has("dataset_name"):
        draft.drop(" ".join(parts), "there is no dataset_name")
        return
    name, (config, train, test) = str(draft.take("dataset_name")), map(draft.left.get, parts)
    path, local = f"{name}:{config}" if config else name, Path(name).exists()
    draft.translated("dataset_name", "data.train", [_with_split(path, None if local else train)])
    asked = draft.left.get("eval_strategy") or draft.left.get("evaluation_strategy")
    if asked not in (None, "no", False) and not local:
        draft.put("data.eval", [_with_split(path, test or "test")])
    for key, where in zip(parts, ("data.train", "data.train", "data.eval"), strict=True):
        if draft.get(where) is not None:
            draft.move(key, where, lambda _, where=where: draft.get(where))
        draft.drop(key, "there is no evaluation")


def _text_field(draft: Draft) -> None:
    if (field := draft.left.get("dataset_text_field")) not in (None, "text"):
        for source in draft.get("data.train") or []:
            source["columns"] = {"text": field}
        draft.changed("dataset_text_field", "", None, "becomes columns of each source")
    draft.drop("dataset_text_field", "the format is found from the columns")


def _packing(draft: Draft) -> None:
    draft.follow("trl.packing")
    key, packed = "packing_strategy", draft.get("data.packing")
    strategy = draft.left.get(key)
    if strategy in ("bfd", "bfd_split"):
        draft.translated(key, "data.packing", packed)
    elif packed:
        draft.drop(key, f"{strategy}: rows are packed best-fit, and samples never see each other", "changed")
    draft.drop(key, "packing is off")


def _with_split(path: str, split: Any) -> dict[str, Any]:
    return {"path": path, "split": split} if split not in (None, "train") else {"path": path}


def _of_mixture(entry: Any) -> tuple[dict[str, Any], str]:
    """An entry as one of ours, and what of it is not taken over."""
    if not isinstance(entry, dict):
        return {"path": str(entry)}, ""
    files = entry.get("data_files")
    path, read = (files, ("data_files",)) if isinstance(files, str) else (str(entry.get("path")), ())
    if entry.get("name"):
        path += f":{entry['name']}"
    return _with_split(path, entry.get("split")), not_taken(entry, ("path", "name", "split", *read))


def _loss(draft: Draft) -> None:
    """TRL trains whole conversations unless it is told not to; which one a data set needs cannot be seen here."""
    keys = ("assistant_only_loss", "completion_only_loss")
    answers = any(map(draft.left.get, keys))
    for key in keys:
        draft.move(key, "method.train_on", lambda _: "assistant" if answers else "all")
    if draft.get("method.train_on") is None:
        why = "answers only are trained; TRL trains whole conversations (train_on: all) unless this is true"
        draft.changed("assistant_only_loss", "method.train_on", "assistant", why)
    draft.follow("trl.loss")
    loss = draft.left.get("loss_type")
    draft.drop("loss_type", f"{loss} is not supported yet; accepted, cross-entropy takes its place", "refused")
