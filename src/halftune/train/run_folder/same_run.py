"""Whether two configurations are of one run: what differs, what may, and what makes a finished run go on."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from halftune.config.run import RunConfig
from halftune.core.errors import ConfigError
from halftune.core.files import MOST_JSON, open_file
from halftune.core.packaged import read_written

# Keys that may change between two launches of one run: they do not touch what is computed.
LENGTH = ("training.num_train_epochs", "training.max_steps")
HARMLESS = {
    *LENGTH,
    "training.logging_steps",
    "training.save_steps",
    "training.save_total_limit",
    "training.eval_steps",
    "training.early_stopping_patience",
    "training.stop_above_loss",
    "training.stop_above_loss_steps",
    "training.load_best",
    "training.per_device_eval_batch_size",
    # The global batch must stay the same, which is checked where a checkpoint is restored; its split may change.
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.on_non_finite",
    "training.on_out_of_memory",
    "training.ignore_memory_estimate",
    "data.num_workers",
    "data.cache",
    "data.cache_features",
    "method.server.url",  # a server's answers are not reproducible
    "method.server.timeout_seconds",
}
PLACES = ("training.output_dir", "training.resume", "training.allow_changes")  # where and whether, not what
# Keys that may change with an entry of training.allow_changes.
ALLOWED = {
    "model": ("model.name_or_path", "model.revision"),
    "adapter": ("adapter.name_or_path",),
    "tokenizer": ("model.tokenizer",),
    "template": ("model.chat_template", "model.chat_template_kwargs"),
    "processor": (),
    "train_data": ("data.train",),
    "eval_data": ("data.eval",),
    "rewards": ("method.rewards",),
    "teacher": ("method.teacher.name_or_path", "method.teacher.revision"),
}
HARMLESS_SECTIONS = ("distributed.", "logging.", "generation.", "depends_on")
# Keys with which a run that is finished has something to do again.
REOPENING = (
    *LENGTH,
    "training.early_stopping_patience",
    "training.stop_above_loss",
    "training.stop_above_loss_steps",
    "training.load_best",
)


def recorded(resolved: Path) -> dict[str, object]:
    """The flat configuration of a run folder, with today's defaults for keys that are younger than the run.

    Args:
        resolved: its ``resolved.yaml``.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open_file(resolved) as file:
            text = file.read(MOST_JSON).decode()
        tree = read_written(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(resolved, str(error).splitlines()[0]) from error
    if not isinstance(tree, dict):
        raise _unreadable(resolved, "it is no mapping")
    try:
        return flat(RunConfig.model_validate(tree).model_dump(mode="json"))
    except ValidationError:  # of another version: compared as it is written
        return flat(tree)


def _unreadable(resolved: Path, why: str) -> ConfigError:
    remedy = "put the file back, or choose another training.output_dir"
    what = f"what the run in this folder is cannot be read: {why}"
    return ConfigError(what, where=str(resolved), remedy=remedy, code="train.run_folder_damaged")


def refuse_differences(before: dict[str, object], now: dict[str, object], path: Path) -> None:
    """Raises where two flat configurations are not of one run.

    Raises:
        ConfigError: names every key that differs, with both values.
    """
    if changed := differences(before, now, harmless=False):
        raise ConfigError(
            f"the folder contains a run with another configuration: {'; '.join(changed)}",
            where=str(path),
            remedy="choose another training.output_dir, or restore these values",
            code="train.run_changed",
        )


def differences(before: dict[str, object], now: dict[str, object], *, harmless: bool) -> list[str]:
    """Differences of two flat configurations, a clause each: only those that a resumed run may have, or only others."""
    asked = now["training.allow_changes"]
    assert isinstance(asked, list)
    allowed = {key for name in asked for key in ALLOWED[name]}
    return [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in PLACES and harmless == _is_harmless(key, allowed)
    ]


def _is_harmless(key: str, allowed: set[str]) -> bool:
    within = (
        *HARMLESS_SECTIONS,
        *(f"{name}." for name in allowed),
    )  # the variables of a template are keys of their own
    return key in HARMLESS or key in allowed or key.startswith(within)


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """Dotted key → value of every leaf; lists are leaves."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
