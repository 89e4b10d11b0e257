"""Preference methods and reward models of the other frameworks: their keys and their rows."""

from __future__ import annotations

from typing import Any, get_args

from halftune.config.sections.method import DpoLoss
from halftune.convert import reinforcement
from halftune.convert.draft import Draft, table

METHODS = {"dpo": "dpo", "kto": "kto", "rm": "reward"}
FORMATS = {"kto": "rated", **dict.fromkeys(("dpo", "reward", "simpo", "orpo"), "preference")}
LOSSES = set(get_args(DpoLoss))  # DPO's losses, with TRL's names


def of_axolotl(draft: Draft) -> str:
    """Type of the method that ``rl`` or ``reward_model`` asks for, or "".

    Raises:
        Refusal: reinforcement learning, or a preference method that is not supported.
    """
    draft.follow("preference.axolotl_reward")
    kind = str(draft.left.get("rl") or "").lower()
    if draft.get("method.type") == "reward":
        return "reward"
    if kind == "grpo":
        reinforcement.of_axolotl(draft)
        return kind
    if kind not in ("dpo", "ipo", "kto", "simpo", "orpo"):
        draft.follow("preference.axolotl_none")
        return ""
    if kind == "ipo":
        draft.put("method.loss", kind)
    draft.left["rl"] = kind
    draft.follow("preference.axolotl")
    if kind == "simpo":
        draft.assume("cpo_alpha", 1.0)
        draft.follow("preference.axolotl_simpo")
    draft.follow("preference.axolotl_kto", "preference.precomputed")
    if kind in ("dpo", "ipo"):
        _losses(draft, "dpo_loss_type", "dpo_loss_weights")
        draft.follow("preference.rpo", "preference.axolotl_smoothing")
    draft.follow("preference.axolotl_parts")
    return draft.get("method.type")


def axolotl_source(entry: dict[str, Any], source: dict[str, Any], method: str) -> tuple[dict[str, Any], str]:
    """The source of a data set of preference rows: (our source, what changed)."""
    kind = str(entry.get("type") or "")
    given = table("preference", "axolotl_columns")[method].get(kind.rpartition(".")[2])
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
    draft.follow("preference.llamafactory")
    if draft.left.get("ref_model") == draft.left.get("model_name_or_path") and stage != "rm":
        draft.drop("ref_model", "the reference is the model before training, if there is one")
    draft.follow("preference.llamafactory_more")
    if draft.get("method.type") == "simpo":
        draft.take("pref_loss")
        draft.follow("preference.llamafactory_simpo")
    if draft.get("method.type") == "dpo":
        _losses(draft, "pref_loss")
    draft.follow("preference.llamafactory_parts", "preference.llamafactory_refused")
    draft.drop(f"{table('preference', 'llamafactory_keys')} ref_model", f"stage is {stage}")


def listed_columns(entry: dict[str, Any], stage: str) -> dict[str, Any]:
    """Format and columns of a data set of dataset_info.json with preference rows."""
    form, alpaca = FORMATS[METHODS[stage]], entry.get("formatting", "alpaca") == "alpaca"
    names = table("preference", "columns")[form if alpaca else "turns"]
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
    found = {method for key, method in table("preference", "trl_keys").items() if key in draft.left}
    found |= {"kto"} if alone in ("kto", "apo_zero_unpaired") else {"dpo"} if alone in LOSSES else set()
    if len(found) != 1:
        return ""
    (method,) = found
    draft.put("method.type", method)
    draft.move("beta", "method.beta", float)
    if method == "kto":
        draft.move("loss_type", "method.loss", lambda _: alone)
    if method == "dpo":
        _losses(draft, "loss_type", "loss_weights")
        draft.follow("preference.rpo", "preference.trl_smoothing")
    draft.follow("preference.trl", "preference.precomputed", "preference.trl_parts", "preference.trl_refused")
    return method


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
        why = "the chosen answer's cross-entropy is a mean per answer; there, per token of a micro-batch"
        draft.changed(f"{key}: sft", "method.sft_weight", float(shares[1]), why)


def finish(draft: Draft, method: str, *, dropout: bool = False) -> None:
    """What follows from the method for other keys: no dropout, and KTO's groups of rows.

    Args:
        method: type of the method; nothing is done if it is none of these.
        dropout: whether dropout stays.
    """
    if method not in FORMATS:
        return
    if draft.left.get("disable_dropout") is False and not dropout:
        draft.none("disable_dropout", "dropout as written")
    elif draft.get("adapter.dropout") and not dropout:
        draft.put("adapter.dropout", 0.0)
        draft.none("dropout of the adapter", "dropout is off in this method there")
    draft.drop("disable_dropout", "dropout is off here, too")
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
