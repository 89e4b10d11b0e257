"""Optimizers of transformers and axolotl, and their arguments."""

from __future__ import annotations

import re
from typing import Any

from halftune.convert.draft import Draft
from halftune.convert.formats import listed
from halftune.convert.names import OPTIMIZERS

_ADAMW = re.compile(r"(paged_|ao_)?adamw(_bnb|_torch)?(_8bit|_4bit|_32bit|_fp8|_bnb_8bit)")
_PROJECTED = re.compile(r"(galore|apollo)_adamw(_layerwise)?")
# Options of GaLore and APOLLO, with transformers' defaults; the words are those that hold here.
_NUMBERS = {"rank": 128, "update_proj_gap": 200}
_WORDS = {"galore": {"proj_type": "std"}, "apollo": {"proj_type": "std", "proj": "random", "scale_type": "channel"}}
_SCALE = {"galore": 0.25, "apollo": 1.0}
# Optimizers that read `optim_args` there.
_READ = ("sgd", "adagrad", "stable_adamw", "adamw_schedule_free", "muon")


def optimizer(draft: Draft, key: str) -> None:
    """The optimizer and its arguments. AdamW in a form that does not exist here becomes plain AdamW."""
    ours, value = "training.optim", str(draft.take(key) or "")
    name, projected = OPTIMIZERS.get(value), _PROJECTED.fullmatch(value)
    if name is not None:
        draft.translated(key, ours, name)
    elif projected:
        _projected(draft, key, projected[1], layerwise=bool(projected[2]))
    elif _ADAMW.fullmatch(value):
        draft.changed(key, ours, "adamw", f"{value}: the moments of AdamW are not quantised or paged here")
    elif value:
        draft.put(ours, "adamw")
        draft.refused(key, f"{value} is not supported yet; accepted, AdamW takes its place")
    if draft.get(ours) not in _READ:
        draft.drop(dict.fromkeys(("optim_args", "optim_target_modules"), "this optimizer does not read it"))


def _projected(draft: Draft, key: str, name: str, *, layerwise: bool) -> None:
    """GaLore and APOLLO, on the matrices of attention and feed-forward layers."""
    given, targets = _arguments(draft.take("optim_args")), draft.take("optim_target_modules")
    words = listed(targets or [])
    whole = any("attn" in one for one in words) and any("mlp" in one for one in words)
    every = [one.replace("_", "-") for one in words] == ["all-linear"]
    draft.put("training.optim", name)
    numbers = {**_NUMBERS, "scale": _SCALE[name]}
    other = [option for option, value in given.items() if option not in numbers and value != _WORDS[name].get(option)]
    if other or not (whole or every):
        why = "attention and feed-forward layers are projected, with the default options"
        draft.refused(key, f"{', '.join(other) or 'optim_target_modules'}: {why}")
        return
    rank, steps, scale = (float(given.get(option) or usual) for option, usual in numbers.items())
    draft.put("training.projection_rank", int(rank))
    draft.put("training.projection_interval", int(steps))
    draft.put("training.projection_scale", scale)
    if layerwise:  # updates come before gradients could be clipped
        draft.put("training.max_grad_norm", 0)
    if every:
        draft.changed(key, "training.optim", name, "the output layer is updated by AdamW; there, as hidden matrices")
    else:
        draft.translated(key, "training.optim", name)


def _arguments(given: Any) -> dict[str, str]:
    """``optim_args``: ``"rank=64, scale=0.1"``, or a mapping."""
    if isinstance(given, dict):
        return {str(option): str(value) for option, value in given.items()}
    pairs = (part.partition("=") for part in listed(given or []))
    return {option.strip(): value.strip() for option, _, value in pairs}
