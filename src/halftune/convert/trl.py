"""Translates a TRL config: that of a trainer, ModelConfig and ScriptArguments in one YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halftune.convert import preference, reinforcement
from halftune.convert.draft import Draft, is_off
from halftune.convert.formats import attention, listed, precision, quantization
from halftune.convert.trainer import convert_trainer, grouping, periods

MODEL = {
    "model_name_or_path": "model.name_or_path",
    "model_revision": "model.revision",
    "dataset_num_proc": "data.num_workers",
    "test_split_size": "data.eval_split",
}
LORA = {
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_modules_to_save": "adapter.modules_to_save",
    "use_rslora": "adapter.use_rslora",
    "use_dora": "adapter.use_dora",
    "lora_target_parameters": "adapter.target_parameters",
}
_OVERLONG = {"keep_start": "keep_start"}
DTYPES = ("dtype", "torch_dtype")


def convert(draft: Draft, folder: Path) -> None:
    """Fills the draft.

    Raises:
        Refusal: reinforcement learning, or a preference method that is not supported.
    """
    answers, taught = reinforcement.is_grpo(draft), reinforcement.is_gkd(draft)
    if answers:
        reinforcement.of_trl(draft)
    elif taught:
        reinforcement.of_gkd(draft)
    method = "" if answers or taught else preference.of_trl(draft)
    if draft.has("beta"):  # also 0, which is GRPO's usual beta
        raise draft.refuse("beta", "the trainer is not named: add loss_type, sigmoid for DPO or kto for KTO")
    _template(draft)
    draft.move("eos_token", "model.tokens.special", lambda token: {"eos": str(token)})
    draft.rename(MODEL)
    if not answers and not taught:
        draft.put("method.type", method or "sft")
    precision(draft, default="bf16")
    if draft.has("attn_implementation"):
        attention(draft, "attn_implementation", draft.take("attn_implementation"))
    _adapter(draft)
    if not is_off(draft.left.get("load_in_4bit")):
        draft.left.setdefault("use_bnb_nested_quant", False)
    quantization(draft, "model_name_or_path")
    _dtypes(draft)
    reinforcement.dropout(draft)
    _data(draft)
    if not method and not answers and not taught:
        _loss(draft)
    draft.move("gradient_checkpointing", "training.gradient_checkpointing")
    draft.default("training.gradient_checkpointing", True, "gradient_checkpointing")
    convert_trainer(draft, folder)
    draft.default("training.logging_steps", 10, "logging_steps")
    rate = 1.0e-6 if answers else preference.TRL_RATES.get(method, 2.0e-5)
    draft.default("training.learning_rate", rate, "learning_rate")
    draft.default("training.output_dir", "trainer_output", "output_dir")
    periods(draft)
    preference.finish(draft, method)
    if answers:
        reinforcement.finish_grpo(draft)
    draft.drop_listed("trl")


def _template(draft: Draft) -> None:
    """A file with a chat template, or a model whose template and tokens are taken."""
    key, path = "chat_template_path", str(draft.left.get("chat_template_path") or "")
    if path.endswith((".jinja", ".j2")):
        draft.move(key, "model.chat_template")
    why = "the chat template of another model: write it to a file and name it in model.chat_template"
    draft.drop({key: why}, "changed")


def _dtypes(draft: Draft) -> None:
    """The dtype in which weights are loaded: frozen ones have that of compute here, trained ones fp32 or bf16."""
    compute, full = draft.get("precision.compute"), draft.get("adapter.type") == "none"
    for key in DTYPES:
        dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(draft.left.get(key)))
        if full and dtype == "bf16" == compute:
            draft.translated(key, "precision.trainable", "bf16")
        elif dtype == ("fp32" if full else compute) and not draft.get("model.quantization"):
            draft.none(key, "the same here")
        elif key in draft.left:
            why = f"{draft.left[key]}: frozen weights are loaded in the dtype of compute, trained ones in fp32"
            draft.drop({key: why}, "changed")


def _adapter(draft: Draft) -> None:
    use = draft.take("use_peft")
    draft.translated("use_peft", "adapter.type", "lora" if use else "none")
    if not use:
        draft.drop(dict.fromkeys((*LORA, "lora_target_modules"), "use_peft is off: all weights are trained"))
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
    _named_set(draft)
    draft.move("datasets", "data.train", lambda mixture: [_of_mixture(entry) for entry in mixture])
    _text_field(draft)
    draft.move("max_length", "data.max_length")
    draft.move("max_seq_length", "data.max_length")
    if draft.get("data.max_length") is None and "max_length" in draft.left and draft.get("method.type") != "grpo":
        draft.put("data.max_length", 2048)
        why = "a longer row stops the run: then raise data.max_length; there, the length is not looked at"
        draft.translated("max_length", "data.overlong", "error", why)
    draft.default("data.max_length", 1024, "max_length")
    draft.words("truncation_mode", "data.overlong", _OVERLONG, "keep_start", "the first max_length tokens are kept")
    draft.default("data.overlong", "drop" if draft.get("method.type") == "reward" else "keep_start", "truncation_mode")
    _packing(draft)
    grouping(draft)


def _named_set(draft: Draft) -> None:
    parts = ("dataset_config", "dataset_train_split", "dataset_test_split")
    if not draft.has("dataset_name"):
        draft.drop(dict.fromkeys(parts, "there is no dataset_name"))
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
        draft.drop({key: "there is no evaluation"})


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
    elif strategy is not None and not draft.get("data.packing"):
        draft.none("packing_strategy", "packing is off")
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
    keys = ("assistant_only_loss", "completion_only_loss")
    answers = any(map(draft.left.get, keys))
    for key in keys:
        draft.move(key, "method.train_on", lambda _: "assistant" if answers else "all")
    loss = draft.take("loss_type")
    if draft.get("method.train_on") is None:
        why = "answers only are trained; TRL trains whole conversations (train_on: all) unless this is true"
        draft.changed("assistant_only_loss", "method.train_on", "assistant", why)
    if loss in ("nll", "chunked_nll"):
        draft.none("loss_type", "always the chunked cross-entropy at labelled positions")
    elif loss == "dft":
        draft.translated("loss_type", "method.loss", "dft")
    elif loss is not None:
        draft.refused("loss_type", f"{loss} is not supported yet; accepted, cross-entropy takes its place")
