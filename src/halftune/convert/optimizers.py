"""Optimizers of transformers and axolotl, and their arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from halftune.convert.draft import Draft, listed, number, table

_ADAMW = re.compile(r"(paged_|ao_)?adamw(_bnb|_torch)?(_8bit|_4bit|_32bit|_fp8|_bnb_8bit)")
_PROJECTED = re.compile(r"(galore|apollo)_adamw(_layerwise)?")
# Optimizers that read `optim_args` there.
_READ = ("sgd", "adagrad", "stable_adamw", "adamw_schedule_free", "muon")
OPTIMIZERS = {theirs: ours for ours, names in table("trainer", "optimizers").items() for theirs in names}


def optimizer(draft: Draft, key: str) -> None:
    """The optimizer and its arguments. AdamW in a form that does not exist here becomes plain AdamW."""
    ours, value = "training.optim", str(draft.take(key) or "")
    projected = _PROJECTED.fullmatch(value)
    if value in OPTIMIZERS:
        draft.translated(key, ours, OPTIMIZERS[value])
    elif projected:
        _projected(draft, key, projected[1], layerwise=bool(projected[2]))
    elif _ADAMW.fullmatch(value):
        draft.changed(key, ours, "adamw", f"{value}: the moments of AdamW are not quantised or paged here")
    elif value:
        draft.put(ours, "adamw")
        draft.refused(key, f"{value} is not supported yet; accepted, AdamW takes its place")
    if draft.get(ours) not in _READ:
        draft.drop("optim_args optim_target_modules", "this optimizer does not read it")


def _projected(draft: Draft, key: str, name: str, *, layerwise: bool) -> None:
    """GaLore and APOLLO, on the matrices of attention and feed-forward layers."""
    usual, targets = table("trainer", "projections")[name], listed(draft.take("optim_target_modules") or [])
    given = _arguments(draft.take("optim_args"))
    every, words = targets in (["all-linear"], ["all_linear"]), usual["words"]
    draft.put("training.optim", name)
    other = [one for one in given if one not in usual["numbers"] and given[one] != words.get(one)]
    if other or not (every or re.search("attn.*mlp|mlp.*attn", " ".join(targets))):
        named = ", ".join(other) or "optim_target_modules"
        draft.refused(key, f"{named}: attention and feed-forward layers are projected, with the default options")
        return
    project(draft, given, usual["numbers"], layerwise=layerwise)
    if every:
        draft.changed(key, "training.optim", name, "the output layer is updated by AdamW; there, as hidden matrices")
    else:
        draft.translated(key, "training.optim", name)


def project(draft: Draft, given: Mapping[str, Any], usual: Mapping[str, float], *, layerwise: bool) -> None:
    """Rank, interval and scale of GaLore and APOLLO, of which ``usual`` holds the names there and the defaults."""
    rank, interval, scale = (given.get(option) or value for option, value in usual.items())
    draft.put("training.projection_rank", int(rank))
    draft.put("training.projection_interval", int(interval))
    draft.put("training.projection_scale", number(scale))
    if layerwise:  # updates come before gradients could be clipped
        draft.put("training.max_grad_norm", 0)


def _arguments(given: Any) -> dict[str, str]:
    """``optim_args``: ``"rank=64, scale=0.1"``, or a mapping."""
    if isinstance(given, dict):
        return {str(option): str(value) for option, value in given.items()}
    pairs = (part.partition("=") for part in listed(given or []))
    return {option.strip(): value.strip() for option, _, value in pairs}
