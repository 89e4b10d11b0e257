"""Names of optimizers, schedules and loggers there and here, and whether the schema has what they are translated to."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from halftune.config.run import RunConfig

# transformers' and axolotl's names → ours. A name that the schema lacks is not used, see `accepts`.
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "paged_adamw"),
    **dict.fromkeys(("lion_32bit", "lion", "lion_pytorch"), "lion"),
    "lion_8bit": "lion_8bit",
    "paged_lion_8bit": "paged_lion_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "muon": "muon",
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), "adamw_torch_8bit"),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit"), "adamw_torch_4bit"),
}
SCHEDULERS = {
    name: name
    for name in ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial",
                 "cosine_with_restarts", "warmup_stable_decay", "rex")
}  # fmt: skip
LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio", "comet")
assumed: set[tuple[str, Any]] = set()
"""Pairs of a key and a value that :func:`accepts` takes for known: ``scripts/coverage.py --assume`` fills it."""


def accepts(key: str, value: Any = None) -> bool:
    """Whether the schema has a dotted key, and the value among its words.

    Args:
        key: e.g. ``training.optim``.
        value: a word of a Literal; None to ask for the key only.
    """
    if (key, value) in assumed or any(value is None and known == key for known, _ in assumed):
        return True
    annotation: Any = RunConfig
    for part in key.split("."):
        holder = next((kind for kind in _models(annotation) if part in kind.model_fields), None)
        if holder is None:
            return False
        annotation = holder.model_fields[part].annotation
    return value is None or value in _words(annotation)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in _parts(annotation) for model in _models(part)]


def _words(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in _parts(annotation) for word in _words(part)]


def _parts(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return get_args(annotation)[:1]
    return get_args(annotation) if origin in (Union, types.UnionType, tuple) else ()
