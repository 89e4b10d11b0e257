"""Keys of transformers' TrainingArguments, which LLaMA-Factory and TRL share, and words that all three use."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from halftune.config.facts.families import causal_types
from halftune.config.facts.folder import read_json
from halftune.config.optimizers import OPTIMIZERS, SCHEDULES
from halftune.config.sections.training import Logger
from halftune.convert.draft import Draft, is_off, listed, number, table
from halftune.convert.optimizers import optimizer
from halftune.convert.sections import sections
from halftune.core.errors import ModelError


def convert_trainer(draft: Draft, folder: Path) -> None:
    """Everything that TrainingArguments says, defaults included (transformers 5)."""
    if "max_grad_norm" in draft.left and not draft.has("max_grad_norm"):
        draft.translated("max_grad_norm", "training.max_grad_norm", 0, "null: transformers 4 does not clip then")
    if draft.has("save_total_limit") and draft.left["save_total_limit"] <= 0:
        draft.none("save_total_limit", "not above 0: all checkpoints are kept")
    draft.follow("trainer.shared", "trainer.arguments")
    if draft.has("max_steps") and not draft.left["max_steps"] > 0:
        draft.none("max_steps", "negative: num_train_epochs holds")
    draft.move("max_steps", "training.max_steps")
    optimizer(draft, "optim")
    scheduler(draft, "lr_scheduler_type")
    warmup(draft)
    report_to(draft)
    loggers(draft, ("swanlab",))
    draft.follow("trainer.noise")
    whole_steps(draft, "logging_steps", "training.logging_steps")
    draft.follow("trainer.resume", "trainer.defaults")
    sections(draft, folder)
    remote_code(draft)
    drop_trainer(draft)


def best_metric(draft: Draft) -> None:
    """The metric of the best evaluation: ``eval_NAME_loss`` there is ``eval_loss_NAME`` here."""
    key = "metric_for_best_model"
    name = eval_name(str(draft.left.get(key)).removeprefix("eval_").removesuffix("_loss"))
    draft.follow("trainer.best_metric")
    if str(draft.left.get(key)).endswith("_loss") and name in [one.get("name") for one in draft.get("data.eval") or []]:
        draft.translated(key, "training.metric_for_best", f"eval_loss_{name}")
    draft.drop(key, "the evaluation loss decides", "changed")


def eval_name(name: str) -> str:
    """A name of a data set as ``data.eval`` accepts it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[-40:]


def drop_trainer(draft: Draft) -> None:
    """Label smoothing, and the keys of TrainingArguments without an equivalent; call it when the method is known."""
    draft.follow("trainer.exact")
    draft.drop_listed("trainer")


def warmup(draft: Draft) -> None:
    """Warm-up in steps; transformers 5 reads a fraction of one as a ratio of the run. Call it after ``scheduler``."""
    if not warms_up(draft):
        draft.drop("warmup_ratio warmup_steps", "the schedule has no warm-up")
        return
    ratio, steps = draft.take("warmup_ratio"), number(draft.take("warmup_steps"))
    if isinstance(steps, float) and 0 < steps < 1:
        draft.translated("warmup_steps", "training.warmup_ratio", steps)
    elif steps:
        draft.translated("warmup_steps", "training.warmup_steps", int(steps))
    elif steps is not None:
        draft.none("warmup_steps", "is 0: warmup_ratio holds")
    if ratio is not None and steps:
        draft.none("warmup_ratio", "warmup_steps wins")
    elif ratio is not None:
        draft.translated("warmup_ratio", "training.warmup_ratio", ratio)
    if draft.get("training.warmup_steps") is None:
        draft.default("training.warmup_ratio", 0.0, "warmup_ratio")


def warms_up(draft: Draft) -> bool:
    """Whether the schedule has a warm-up."""
    return SCHEDULES[draft.get("training.lr_scheduler_type") or "linear"].warmup


def remote_code(draft: Draft) -> None:
    """Python that comes with a checkpoint is not needed where transformers has the architecture; call it last."""
    key = "trust_remote_code"
    if key not in draft.left:
        return
    if is_off(draft.take(key)):
        draft.none(key, "is off")
        return
    config = Path(str(draft.get("model.name_or_path"))) / "config.json"
    kind = None
    if config.is_file():
        with suppress(ModelError):  # damage is for the plan to tell
            kind = read_json(config).get("model_type")
    if kind is None:
        why = "left out: if transformers does not have this architecture, halftune plan says what to set"
        draft.none(key, why)
    elif kind in causal_types():
        draft.none(key, f"left out: transformers has {kind}")
    else:
        draft.translated(key, "model.trust_remote_code", True)


def scheduler(draft: Draft, key: str) -> None:
    """The schedule."""
    ours, asked = "training.lr_scheduler_type", str(draft.left.get(key) or "")
    if OPTIMIZERS.get(draft.get("training.optim"), OPTIMIZERS["adamw"]).averages and not asked.startswith("constant"):
        draft.changed(key, ours, "constant_with_warmup", "the average of the weights takes the place of a falling rate")
        if "lr_scheduler_kwargs" in draft.left:
            draft.none("lr_scheduler_kwargs", "belongs to the schedule")
        return
    draft.words(key, ours, {name: name for name in SCHEDULES}, "cosine", "cosine takes its place")
    given = draft.left.get("lr_scheduler_kwargs")
    if isinstance(given, str):
        with suppress(ValueError):
            given = json.loads(given)
    if isinstance(given, dict):
        draft.take("lr_scheduler_kwargs")
        for option, value in given.items():
            _option(draft, str(draft.get(ours)), option, number(value))


def _option(draft: Draft, schedule: str, option: str, value: Any) -> None:
    """An option of ``lr_scheduler_kwargs``: lowest rate, cycles, power; what has no key here is refused."""
    key, ours = f"lr_scheduler_kwargs.{option}", table("trainer", "schedules").get(schedule, {}).get(option)
    whole = {"num_decay_steps": "max_steps", "min_lr": "learning_rate", "lr_end": "learning_rate"}.get(option)
    if value is None or value == table("trainer", "usual_options").get(schedule, {}).get(option):
        draft.none(key, "is the default")
        return
    if whole:
        total = number(draft.get(f"training.{whole}"))
        value = value / total if total else None
    if ours is None or value is None:
        draft.refused(key, f"{schedule} has no such option here" if ours is None else f"needs {whole}")
    else:
        draft.translated(key, f"training.{ours}", int(value) if ours == "lr_cycles" else value)


def continued(draft: Draft, key: str, own: str) -> bool:
    """Training that goes on from one adapter, whose config holds the settings ``own``; whether there is one."""
    start = listed(draft.left.get(key) or [])
    if len(start) != 1 or draft.left.get("create_new_adapter"):
        return False
    draft.translated(key, "adapter.name_or_path", start[0])
    draft.drop(own, "the adapter's own config sets it")
    return True


def lora_plus(draft: Draft) -> None:
    """A higher learning rate for LoRA's B (LoRA+)."""
    draft.follow("trainer.lora_plus")
    if not draft.get("adapter.lora_plus_ratio") or "embed" not in str(draft.get("adapter.target_modules")):
        draft.drop("loraplus_lr_embedding", "LoRA+ has no adapter of an embedding here")


def grouping(draft: Draft) -> None:
    """Rows of like length together, which is off there unless it is asked for; call it when packing is known."""
    asked, strategy = draft.take("group_by_length"), draft.take("train_sampling_strategy")
    grouped = bool(asked) or strategy == "group_by_length"
    packed = bool(draft.get("data.packing"))
    for key, value in (("group_by_length", asked), ("train_sampling_strategy", strategy)):
        if value is not None and packed:
            draft.none(key, "rows are packed")
        elif strategy == "sequential":
            draft.changed(key, "data.group_by_length", False, "data is shuffled every epoch")
        elif value is not None:
            draft.translated(key, "data.group_by_length", grouped)
    if not packed:
        draft.default("data.group_by_length", False, "group_by_length")


def report_to(draft: Draft) -> None:
    """Loggers, those that exist here."""
    if "report_to" not in draft.left:
        return
    asked = draft.take("report_to")
    names = [asked] if isinstance(asked, str) else list(asked or [])
    kept = [name for name in names if name in get_args(Logger)]
    lost = [name for name in names if name not in (*kept, "none", "None")]
    why = f"{', '.join(map(str, lost))}: not there; metrics.jsonl is" if lost else ""
    draft.translated("report_to", "logging.report_to", kept, why)


def loggers(draft: Draft, names: Iterable[str]) -> None:
    """Loggers that have keys of their own; call it after ``report_to``."""
    for name in names:
        if not is_off(draft.left.get(f"use_{name}")):
            others = [one for one in draft.get("logging.report_to") or () if one != name]
            draft.translated(f"use_{name}", "logging.report_to", [*others, name])
        draft.drop(f"use_{name}", "is off")


def whole_steps(draft: Draft, key: str, ours: str) -> None:
    """A period in steps, or as a share of the run."""
    value = draft.take(key)
    if value is None:
        return
    if isinstance(value, int | float) and value >= 1:
        draft.translated(key, ours, int(value))
    else:
        _share(draft, key, ours, value)


def _share(draft: Draft, key: str, ours: str, value: Any) -> None:
    """A period that is a share of the run, rounded up to whole steps as transformers does."""
    total, share = draft.get("training.max_steps"), number(value)
    if not isinstance(share, float) or not 0 < share < 1:
        draft.none(key, f"{value} is no period: the default holds")
    elif ours != "training.logging_steps":
        draft.translated(key, ours, share)
    elif total is not None:
        draft.translated(key, ours, math.ceil(share * total))
    else:
        draft.none(key, f"{value} of the run, whose length is not known here: every step is logged")


def evaluates(draft: Draft) -> bool:
    """Whether the recipe has evaluation data; call it when the data is known."""
    return draft.get("data.eval") is not None or bool(draft.get("data.eval_split"))


def periods(draft: Draft, *, per_steps: bool = True) -> None:
    """``eval_strategy``, ``save_strategy``, their steps, and the best evaluation; call it when the data is known."""
    best_metric(draft)
    for key in ("evaluation_strategy", "eval_strategy"):
        if draft.has(key):
            _evaluation(draft, key, draft.take(key))
    if "eval_steps" in draft.left:
        if draft.get("training.eval_steps") not in (None, "epoch"):
            draft.translated("eval_steps", "training.eval_steps", draft.get("training.eval_steps"))
        else:
            draft.none("eval_steps", "evaluation is not in steps")
    _saves(draft)
    draft.default("training.save_steps", 500 if per_steps else "epoch", "save_steps")


def _evaluation(draft: Draft, key: str, strategy: Any) -> None:
    if strategy not in ("steps", "epoch"):
        draft.none(key, "there is evaluation where there is evaluation data")
    elif not evaluates(draft):
        draft.none(key, "there is no evaluation data")
    elif strategy == "epoch":
        draft.translated(key, "training.eval_steps", "epoch")
    else:
        usual = "epoch" if draft.has("eval_steps") else 500
        whole_steps(draft, "eval_steps", "training.eval_steps")
        draft.translated(key, "training.eval_steps", draft.get("training.eval_steps") or usual)


def _saves(draft: Draft) -> None:
    strategy = draft.take("save_strategy")
    if strategy is not None:
        table = {"no": "end", False: "end", "epoch": "epoch", "steps": 500}
        if strategy == "steps" and draft.has("save_steps"):
            whole_steps(draft, "save_steps", "training.save_steps")
            table["steps"] = draft.get("training.save_steps") or "epoch"
        draft.translated("save_strategy", "training.save_steps", table.get(strategy, "epoch"))
        if "save_steps" in draft.left and strategy != "steps":
            draft.none("save_steps", f"save_strategy is {strategy}")
    whole_steps(draft, "save_steps", "training.save_steps")
