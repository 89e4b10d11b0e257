"""Preference methods and reward models of the other frameworks: their keys and their rows."""

from __future__ import annotations

from typing import Any, get_args

from halftune.config.sections.method import DpoLoss
from halftune.convert import reinforcement
from halftune.convert.draft import Draft, is_off

METHODS = {"dpo": "dpo", "kto": "kto", "rm": "reward"}
FORMATS = {"kto": "rated", **dict.fromkeys(("dpo", "reward", "simpo", "orpo"), "preference")}
LOSSES = set(get_args(DpoLoss))  # DPO's losses, with TRL's names
_SMOOTHED = ("robust", "exo_pair")
_MEAN = "the chosen answer's cross-entropy is a mean per answer; there, per token of a micro-batch"
_PART = "this part of the loss is not supported yet"
_DROPOUT = "dropout is off in this method there"
# axolotl: what follows the dot in the type of a data set → columns with other names than ours.
COLUMNS: dict[str, dict[str, dict[str, str]]] = {
    "dpo": {
        "default": {},
        "argilla_chat": {},
        "icr": {"prompt": "input"},
        "intel": {"prompt": "question"},
        "prompt_pairs": {},
        "ultra": {},
    },
    "kto": {"argilla": {"prompt": "instruction"}, "intel": {"prompt": "question"}, "prompt_pairs": {}, "ultra": {}},
    "reward": {"chat_template": {"prompt": "input"}},
}
COLUMNS["simpo"], COLUMNS["orpo"] = COLUMNS["dpo"], {"argilla": {}, "chat_template": {}}
# LLaMA-Factory: columns of dataset_info.json → ours.
LISTED = {"messages": "messages", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label", "system": "system"}
LISTED_ALPACA = {
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"},
    "rated": {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "label", "system": "system"},
}
# TRL: keys that only one of its configs has → its method.
TRL_KEYS = {
    "center_rewards_coefficient": "reward",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "label_smoothing": "dpo",
    "loss_weights": "dpo",
    "discopop_tau": "dpo",
    "f_divergence_type": "dpo",
    "use_weighting": "dpo",
    "ld_alpha": "dpo",
}
LLAMAFACTORY_KEYS = ("pref_beta", "pref_loss", "pref_ftx", "pref_bco_weight", "dpo_label_smoothing", "ld_alpha",
                     "kto_chosen_weight", "kto_rejected_weight", "simpo_gamma")  # fmt: skip
TRL_LOSSES = {**dict.fromkeys(LOSSES, "dpo"), "kto": "kto", "apo_zero_unpaired": "kto"}
TRL_RATES = {"dpo": 1.0e-6, "kto": 1.0e-6, "reward": 1.0e-4}


def of_axolotl(draft: Draft) -> str:
    """Type of the method that ``rl`` or ``reward_model`` asks for, or "".

    Raises:
        Refusal: reinforcement learning, or a preference method that is not supported.
    """
    draft.unsupported(("process_reward_model",), "models that reward single steps are not supported yet")
    if not is_off(draft.left.get("reward_model")):
        draft.changed("reward_model", "method.type", "reward", "the score head is computed in fp32")
        if draft.left.get("num_labels") == 1:
            draft.none("num_labels", "a reward model has one score")
        return "reward"
    draft.unsupported(("reward_model",), "")
    kind = str(draft.left.get("rl") or "").lower()
    if kind == "grpo":
        reinforcement.of_axolotl(draft)
        return kind
    if kind not in ("dpo", "ipo", "kto", "simpo", "orpo"):
        draft.unsupported(("rl",), "not converted: dpo, ipo, kto, simpo, orpo and grpo are")
        return ""
    if kind == "ipo":
        draft.put("method.loss", kind)
        kind = "dpo"
    _of_axolotl(draft, kind)
    return kind


def _of_axolotl(draft: Draft, kind: str) -> None:
    """The keys of a preference method."""
    draft.move("rl_beta", "method.beta", float)
    if kind == "orpo":
        draft.move("orpo_alpha", "method.beta", float)
        draft.changed("rl", "method.type", kind, "answers have labels; there, prompts of chosen answers have them, too")
    else:
        draft.translated("rl", "method.type", kind)
    if kind == "simpo":
        _simpo(draft, "rl_beta")
        _of_cpo(draft)
    draft.move("kto_desirable_weight", "method.desirable_weight", lambda given: float(given or 1))
    draft.move("kto_undesirable_weight", "method.undesirable_weight", lambda given: float(given or 1))
    _precomputed(draft)
    if kind == "dpo":
        _losses(draft, "dpo_loss_type", "dpo_loss_weights")
        _rpo(draft)
        _smoothing(draft, "dpo_label_smoothing")
    names = ("dpo_loss_type", "dpo_use_weighting", "dpo_norm_loss", "dpo_label_smoothing", "dpo_loss_weights")
    draft.drop(dict.fromkeys(names, _PART), "refused")


def _of_cpo(draft: Draft) -> None:
    """SimPO is a loss of TRL's CPO, whose own part is not zero by default."""
    share = draft.take("cpo_alpha")
    if share == 0:
        draft.translated("cpo_alpha", "method.sft_weight", 0.0)
    else:
        draft.changed("cpo_alpha", "method.sft_weight", 1.0 if share is None else float(share), _MEAN)


def axolotl_source(entry: dict[str, Any], source: dict[str, Any], method: str) -> tuple[dict[str, Any], str]:
    """The source of a data set of preference rows: (our source, what changed)."""
    kind = str(entry.get("type") or "")
    given = COLUMNS[method].get(kind.rpartition(".")[2])
    columns = dict(given or {})
    for ours, key in (("messages", "field_messages"), ("chosen", "field_chosen"), ("rejected", "field_rejected")):
        if entry.get(key) not in (None, ours):
            columns[ours] = entry[key]
    unknown = "" if given is not None else "; the columns are found by their usual names"
    source = {**source, "format": FORMATS[method], "columns": columns}
    why = f"answers are rendered by the chat template; there, type {kind or 'none'} writes the tokens around them"
    return {key: value for key, value in source.items() if value}, why + unknown


def of_llamafactory(draft: Draft, stage: str) -> None:
    """The method of ``stage``: dpo, kto or rm."""
    method = METHODS[stage]
    if method == "reward":
        why = "there, the score head has a bias and dropout, and is saved in a file of its own"
        draft.changed("stage", "method.type", method, why)
    else:
        loss = draft.left.get("pref_loss")
        method = loss if method == "dpo" and loss in ("simpo", "orpo") else method
        draft.translated("stage", "method.type", method)
        draft.move("pref_beta", "method.beta", float)
        if method in ("simpo", "orpo") or draft.left.get("ref_model") == draft.left.get("model_name_or_path"):
            draft.drop({"ref_model": "the reference is the model before training, if there is one"})
        draft.drop({"ref_model": "the reference is the model before training"}, "refused")
    if method == "kto":
        draft.move("kto_chosen_weight", "method.desirable_weight", float)
        draft.move("kto_rejected_weight", "method.undesirable_weight", float)
    if method == "simpo":
        _simpo(draft, "pref_beta")
    if method == "dpo":
        _losses(draft, "pref_loss")
        draft.drop({"pref_loss": "this loss is not supported"}, "refused")
        if draft.get("method.loss") in (None, "sigmoid"):
            draft.move("dpo_label_smoothing", "method.label_smoothing", float)
    if method in ("dpo", "simpo"):
        draft.move("pref_ftx", "method.sft_weight", float)
    draft.idle({"ld_alpha": 1}, "is 1: every token counts")
    parts = {"dpo": ("pref_ftx", "pref_bco_weight", "dpo_label_smoothing", "ld_alpha"), "kto": ("pref_ftx",)}
    draft.drop(dict.fromkeys(parts.get(stage, ()), _PART), "refused")
    draft.drop(dict.fromkeys((*LLAMAFACTORY_KEYS, "ref_model"), f"stage is {stage}"))


def listed_columns(entry: dict[str, Any], stage: str) -> dict[str, Any]:
    """Format and columns of a data set of dataset_info.json with preference rows."""
    form, alpaca = FORMATS[METHODS[stage]], entry.get("formatting", "alpaca") == "alpaca"
    names = LISTED_ALPACA[form] if alpaca else LISTED
    given = (entry.get("columns") or {}).items()
    columns = {names[key]: name for key, name in given if names.get(key, name) != name}
    if alpaca and form == "preference":
        columns.setdefault("prompt", "instruction")
    if not alpaca and columns.get("messages") == "conversations":
        del columns["messages"]  # found by itself
    return {"format": form, "columns": columns} if columns else {"format": form}


def of_trl(draft: Draft) -> str:
    """Type of the method whose config this is, or ""; the trainer is named on TRL's command line, not here."""
    losses = draft.left.get("loss_type")
    alone = str(losses[0] if isinstance(losses, list) and losses else losses)
    found = {method for key, method in TRL_KEYS.items() if key in draft.left}
    found.update({TRL_LOSSES[alone]} if alone in TRL_LOSSES else ())
    if len(found) != 1:
        return ""
    (method,) = found
    draft.put("method.type", method)
    draft.move("beta", "method.beta", float)
    if method == "kto":
        draft.move("loss_type", "method.loss", lambda _: alone)
    if method == "dpo":
        _losses(draft, "loss_type", "loss_weights")
        _rpo(draft)
        _smoothing(draft, "label_smoothing")
    draft.move("desirable_weight", "method.desirable_weight", float)
    draft.move("undesirable_weight", "method.undesirable_weight", float)
    draft.move("center_rewards_coefficient", "method.center_coefficient", float)
    _precomputed(draft)
    draft.drop({"precompute_ref_batch_size": "per_device_eval_batch_size"})
    draft.idle({"ld_alpha": 1}, "is 1: every token counts")
    names = ("loss_type", "label_smoothing", "loss_weights", "use_weighting", "ld_alpha", "sync_ref_model")
    draft.drop(dict.fromkeys(names, _PART), "refused")
    if draft.left.get("f_divergence_type") == "reverse_kl":
        draft.none("f_divergence_type", "the reverse KL divergence always")
    draft.drop({"f_divergence_type": _PART}, "refused")
    sets = ("discopop_tau", "f_alpha_divergence_coef", "ref_model_mixup_alpha", "ref_model_sync_steps")
    draft.drop(dict.fromkeys(sets, "belongs to a part of the loss that is off"))
    return method


def _rpo(draft: Draft) -> None:
    """The share of the chosen answer's cross-entropy, as TRL named it before it was a loss of its own."""
    if draft.left.get("rpo_alpha"):
        draft.changed("rpo_alpha", "method.sft_weight", float(draft.take("rpo_alpha")), _MEAN)
    draft.drop({"rpo_alpha": "no cross-entropy is added"})


def _losses(draft: Draft, key: str, weights: str = "") -> None:
    """DPO's loss; of a list, the first one, and ``sft`` as its second. Others stay for a refusal."""
    given = draft.left.get(key)
    names = given if isinstance(given, list) else [given] if given else []
    shares = draft.left.get(weights) or [1.0] * len(names)
    if not names or names[0] not in LOSSES or names[1:] not in ([], ["sft"]) or len(shares) != len(names):
        return
    if shares[0] != 1:  # a factor of everything
        return
    draft.take(weights)
    draft.move(key, "method.loss", lambda _: names[0])
    if names[1:]:
        draft.changed(f"{key}: sft", "method.sft_weight", float(shares[1]), _MEAN)


def _smoothing(draft: Draft, key: str) -> None:
    """Label smoothing of TRL, which has it in some losses only; in sigmoid, as axolotl pins it, up to a version."""
    loss = draft.get("method.loss") or "sigmoid"
    if loss == "sigmoid" and not is_off(draft.left.get(key)):
        why = "older versions of TRL smooth this loss, newer ones do not"
        draft.changed(key, "method.label_smoothing", float(draft.take(key)), why)
    elif loss in _SMOOTHED:
        draft.move(key, "method.label_smoothing", float)
    else:
        draft.drop({key: "TRL does not smooth this loss"})


def _simpo(draft: Draft, beta: str) -> None:
    """SimPO with the defaults of TRL and LLaMA-Factory."""
    draft.take("pref_loss")
    draft.move("simpo_gamma", "method.gamma", float)
    draft.default("method.beta", 0.1, beta)
    draft.default("method.gamma", 0.5, "simpo_gamma")


def _precomputed(draft: Draft) -> None:
    key = "precompute_ref_log_probs"
    draft.move(key, "method.reference", lambda before: "precomputed" if before else "auto")


def finish(draft: Draft, method: str, *, dropout: bool = False) -> None:
    """What follows from the method for other keys: no dropout, and KTO's groups of rows.

    Args:
        method: type of the method; "" if it is none of these.
        dropout: whether dropout stays.
    """
    if not method:
        return
    if not dropout and (draft.get("adapter.dropout") or draft.left.get("disable_dropout") is False):
        if draft.left.get("disable_dropout") is False:
            draft.none("disable_dropout", "dropout as written")
        else:
            draft.put("adapter.dropout", 0.0)
            draft.none("dropout of the adapter", _DROPOUT)
    draft.drop({"disable_dropout": "dropout is off here, too"})
    if method == "kto":
        _groups(draft)


def _groups(draft: Draft) -> None:
    """KTO's KL divergence is estimated on a micro-batch there, on a group of rows here, which is one example."""
    key, steps = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    rows, passes = int(draft.get(key) or 1), int(draft.get(steps) or 1)
    if rows == 1 and passes > 1:
        size = next(size for size in (4, 2, passes) if passes % size == 0)
        draft.put(steps, passes // size)
    else:
        size = max(2, rows)
    draft.put(key, 1)
    why = "the KL divergence is estimated on fixed groups of rows; there, on each micro-batch"
    if draft.get("method.loss") == "apo_zero_unpaired":
        draft.translated("kto", "method.group_size", size, "rows of a batch together; this loss has no KL divergence")
    else:
        draft.changed("kto", "method.group_size", size, why)
    if rows == passes == 1:
        draft.changed("batch of one row", "", None, "a group has at least two rows: so does a batch")
