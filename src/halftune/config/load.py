"""Loads a recipe from YAML and command line into a validated, frozen configuration, or reports every problem.

Configs of other frameworks are recognised by their keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from halftune.config.reading.overrides import apply_overrides, expand, translate_spellings
from halftune.config.reading.yaml_source import Tree, parse, read_text
from halftune.config.recipes import find
from halftune.config.rules import files, keys, methods  # noqa: F401  (their rules enter RULES)
from halftune.config.rules.rule import RULES, Context, Violation, make_absolute, outputs_of_dependencies
from halftune.config.run import RunConfig
from halftune.config.shape import KeyPath, child, dotted, related
from halftune.config.validate import validate
from halftune.core.errors import ConfigError, HalftuneError


def check(run: RunConfig, context: Context, broken: set[KeyPath]) -> list[Violation]:
    """Return the violations of all rules. Rules that read a key in ``broken`` are skipped, unless only an entry of a
    list is broken."""
    findings: list[Violation] = []
    for rule in RULES:
        if not any(_unreadable(read, path) for read in rule.reads for path in broken):
            findings += (found._replace(code=found.code or rule.code) for found in rule.check(run, context))
    return [finding for finding in findings if not any(related(finding.key, path) for path in broken)]


def _unreadable(read: KeyPath, broken: KeyPath) -> bool:
    """Whether a rule cannot read a key because a key on the way to it, or a section below it, is broken."""
    in_list = any(isinstance(part, int) for part in broken)
    return related(read, broken) and (len(broken) <= len(read) or not in_list)


# Top-level keys specific to a framework; common ones such as learning_rate are excluded.
MARKS: dict[str, frozenset[str]] = {
    "LLaMA-Factory": frozenset(
        {"stage", "finetuning_type", "cutoff_len", "lora_target", "lora_rank", "template", "do_train", "dataset_dir",
         "preprocessing_num_workers", "plot_loss", "overwrite_cache", "overwrite_output_dir", "neat_packing",
         "quantization_bit", "flash_attn", "val_size", "mask_history", "train_on_prompt", "pref_beta", "infer_backend"}
    ),
    "LLaMA-Factory v1": frozenset(
        {"train_dataset", "model_class", "dist_config", "peft_config", "kernel_config", "quant_config", "init_config",
         "optim_config", "lr_scheduler_config", "sample_backend", "batching_strategy", "batching_workers", "cutoff_len",
         "enable_activation_checkpointing", "global_batch_size", "micro_batch_size", "cp_size"}
    ),
    "axolotl": frozenset(
        {"base_model", "sequence_len", "micro_batch_size", "sample_packing", "pad_to_sequence_len", "val_set_size",
         "datasets", "adapter", "lora_r", "lora_target_linear", "lora_target_modules", "num_epochs", "optimizer",
         "load_in_4bit", "load_in_8bit", "train_on_inputs", "flash_attention", "gradient_checkpointing_kwargs",
         "dataset_prepared_path", "special_tokens", "chat_template", "lora_model_dir", "wandb_project",
         "evals_per_epoch",
         "saves_per_epoch", "strict", "model_type", "tokenizer_type", "lr_scheduler", "group_by_length"}
    ),
    "TRL": frozenset(
        {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "use_peft",
         "lora_target_modules",
         "lora_r", "model_name_or_path", "attn_implementation", "torch_dtype", "dtype", "max_length", "max_seq_length",
         "packing_strategy", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eos_token",
         "dataset_num_proc", "gradient_checkpointing_kwargs", "eval_strategy", "load_in_4bit", "lora_task_type",
         "push_to_hub", "report_to", "bnb_4bit_quant_type", "dataset_mixer", "run_name"}
    ),
}  # fmt: skip
OURS = frozenset(RunConfig.model_fields)


def recognise(values: Any) -> str | None:
    """Return the framework whose config this is; None for a recipe, or if unknown."""
    if not isinstance(values, dict):
        return None
    if isinstance(values.get("model"), dict) and (
        isinstance(values.get("training"), dict) or isinstance(values.get("data"), dict)
    ):
        return None
    scores = {name: len(marks & values.keys()) for name, marks in MARKS.items()}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= 2 and scores[best] > len((OURS - {"adapter"}) & values.keys()) else None


DEFAULT = "default"
MAX_PROBLEMS = 60
PATHS_IN_MODEL = ("name_or_path", "tokenizer", "chat_template")
PATHS_IN_TRAINING = ("output_dir", "resume")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the origin of each value.

    Attributes:
        run: the configuration.
        path: the YAML file.
        text: its original content.
        origins: dotted key of every value → ``file:line``, ``command line`` or ``default``.
    """

    run: RunConfig
    path: Path
    text: str
    origins: dict[str, str]


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, look_at_files: bool = True
) -> LoadedConfig:
    """Load and validate a recipe, without importing torch.

    Relative paths under ``data`` and ``model`` are searched in the working directory, then in the YAML file's folder;
    ``depends_on`` only in the YAML file's folder. ``~`` is expanded in all of them.

    Args:
        path: the YAML file; if it does not exist, the shipped recipe of that name (``quickstart.yaml``,
            ``configs/quickstart.yaml``).
        overrides: ``training.learning_rate=1e-4`` …, which override the file.
        look_at_files: whether data, model folders and packages of the recipe must exist. False for finished runs.

    Raises:
        ConfigError: contains every problem found, each with its place.
    """
    file = find(Path(path))
    draft = read_draft(file, read_text(file), overrides, look_at_files=look_at_files, download=True)
    run = draft.run
    if draft.problems or run is None:
        raise ConfigError(_first(list(draft.problems), draft.tree.label))
    origins = {dotted(key): _origin(draft.tree, key) for key in _leaves(run)}
    return LoadedConfig(run, file, draft.text, origins)


@dataclass(frozen=True)
class Draft:
    """A recipe as far as it can be parsed, with all its problems.

    Attributes:
        text: its original content.
        tree: its values and their places, with short forms expanded.
        run: the configuration, with defaults and placeholders at ``broken``; None if that is not possible.
        problems: ordered by line.
        broken: the keys with invalid values.
    """

    text: str
    tree: Tree
    run: RunConfig | None
    problems: tuple[HalftuneError, ...]
    broken: frozenset[KeyPath]


def read_draft(
    file: Path, text: str, overrides: Sequence[str] = (), *, look_at_files: bool = True, download: bool = False
) -> Draft:
    """Read a recipe's text, which may be incomplete and need not be saved in ``file``.

    The config of an adapter that training starts from is read, and with ``download`` the hub is asked for it.

    Raises:
        ConfigError: the text is not a YAML mapping, or another framework's config.
    """
    tree = parse(text, str(file))
    if (framework := recognise(tree.values)) is not None:
        remedy = f"run halftune convert {file} -o {file.stem}_halftune.yaml"
        what = f"expected a halftune recipe, got a config of {framework}"
        raise ConfigError(what, where=str(file), remedy=remedy, code="config.foreign_config")
    expand(tree)
    apply_overrides(tree, overrides)
    expand(tree)
    broken = translate_spellings(tree)
    _expand_home(tree)
    _find_beside(tree, file.parent)
    make_absolute(tree, file.parent)
    if look_at_files and isinstance(child(child(tree.values, "adapter"), "name_or_path"), str):
        from halftune.config.facts.adapter import adopt  # few runs start from an adapter

        adopt(tree, download=download)
    run, problems, more = validate(tree)
    problems = tree.problems + problems
    broken |= more
    if run is not None:
        problems += _rules(run, tree, file, broken, look_at_files)
    return Draft(text, tree, run, tuple(sorted(problems, key=_line)), frozenset(broken))


def load_run(
    folder: str | os.PathLike[str], overrides: Sequence[str] = (), *, look_at_files: bool = True
) -> LoadedConfig:
    """Load the configuration of a run folder.

    Raises:
        ConfigError: not a run folder, or its configuration is not valid here.
    """
    resolved = Path(folder) / "resolved.yaml"
    if not resolved.is_file():
        what = "not a run folder (no resolved.yaml)" if Path(folder).is_dir() else "no such run folder"
        raise ConfigError(
            what,
            where=str(folder),
            remedy="use the training.output_dir of a run",
            code="config.not_a_run_folder",
        )
    loaded = load_config(resolved, overrides, look_at_files=look_at_files)
    written = Path(folder) / "config.yaml"
    text = read_text(written) if written.is_file() else loaded.text
    return LoadedConfig(loaded.run, loaded.path, text, loaded.origins)


def _rules(run: RunConfig, tree: Tree, file: Path, broken: set[KeyPath], look_at_files: bool) -> list[HalftuneError]:
    outputs, problems = outputs_of_dependencies(tree, file)
    context = Context(file, outputs, look_at_files)
    found = [
        tree.problem(finding.key, finding.what, finding.remedy, code=finding.code)
        for finding in check(run, context, broken)
    ]
    return problems + found


def _find_beside(tree: Tree, folder: Path) -> None:
    """Make relative paths absolute that exist in the YAML file's folder and not in the working directory."""
    for holder, key in _inputs(tree):
        name = holder[key]
        beside = os.path.abspath(folder / name)
        if not os.path.isabs(name) and not os.path.exists(name) and os.path.exists(beside):
            holder[key] = beside


def _expand_home(tree: Tree) -> None:
    """Expand ``~`` and ``~user`` in paths."""
    training = child(tree.values, "training")
    for holder, key in (*_inputs(tree), *_paths((training, key) for key in PATHS_IN_TRAINING)):
        holder[key] = os.path.expanduser(holder[key])


def _inputs(tree: Tree) -> Iterator[tuple[Any, str]]:
    """The places of input paths in the tree, as (section, key)."""
    data, model = child(tree.values, "data"), child(tree.values, "model")
    yield from _paths((model, key) for key in PATHS_IN_MODEL)
    yield from _paths([(child(tree.values, "adapter"), "name_or_path"), (data, "media_folder")])
    method = child(tree.values, "method")
    yield from _paths([(method, "teacher"), (child(method, "teacher"), "name_or_path")])
    rewards = child(method, "rewards")
    yield from _paths((reward, "file") for reward in (rewards if isinstance(rewards, list) else ()))
    for part in ("train", "eval"):
        sources = child(data, part)
        yield from _paths((source, "path") for source in (sources if isinstance(sources, list) else ()))


def _paths(holders: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    """Those whose values can be paths."""
    for holder, key in holders:
        name = child(holder, key)
        if isinstance(name, str) and name and "\0" not in name:
            yield holder, key


def _first(problems: list[HalftuneError], label: str) -> list[HalftuneError]:
    """The first ``MAX_PROBLEMS`` problems."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    return [
        *problems[:MAX_PROBLEMS],
        HalftuneError(f"{more} more problems", where=label, remedy="fix these first", code="config.more_problems"),
    ]


def _line(problem: HalftuneError) -> tuple[int, str]:
    """Sort key: problems of the file by line, then those of the command line."""
    found = re.search(r":(\d+)$", problem.where)
    return (int(found[1]), "") if found else (1 << 30, problem.where)


def _leaves(section: BaseModel, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The path of every value, including those in sections in lists."""
    for name in type(section).model_fields:
        value = section.__dict__[name]
        if isinstance(value, BaseModel):
            yield from _leaves(value, (*path, name))
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from _leaves(item, (*path, name, index))
        else:
            yield (*path, name)


def _origin(tree: Tree, key: KeyPath) -> str:
    value: Any = tree.values
    for part in key:
        if isinstance(value, dict) and part not in value:
            return DEFAULT
        value = child(value, part)
    return tree.place(key).origin
