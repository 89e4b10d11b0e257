"""Rules about files and folders: they exist, are readable, and have the required kind."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path as FilePath

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.config_file import config_in
from halftune.config.reading.names import HUB_ID, looks_local
from halftune.config.rules.rule import Context, Violation, rule
from halftune.config.run import RunConfig
from halftune.config.sections.data import BUILTIN_DATA, SourceSection
from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import REWARDS, RewardFunctionSection
from halftune.config.tree import KeyPath
from halftune.core.errors import ModelError
from halftune.core.files import SMALL_JSON, read_limited
from halftune.core.optional import extra_line, version_of
from halftune.core.table import did_you_mean

BUILTIN = "builtin:"
EFFECTIVE = os.access in os.supports_effective_ids  # whether access can be checked for the effective user
DATA_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".rst", ".py")
_NO_PATH = re.compile(r"[\x00-\x1f\x7f-\x9f]|^[A-Za-z][\w+.-]*://")  # control characters, and addresses
_PART_OF_RUN = re.compile(r"final|set-aside|checkpoint-\d+")  # what a run compares, replaces or removes
WEIGHT_ENDINGS = (".gguf", ".bin", ".pt", ".pth", ".safetensors", ".ckpt")


@rule("data.not_found", "data.train", "data.eval", "data.media_folder")
def data_exists(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Every source is a builtin set, a readable file or folder with data, or can be a hub id."""
    if not context.look_at_files:
        return
    if _NO_PATH.search(run.data.media_folder or ""):
        at = ("data", "media_folder")
        yield Violation(at, "invalid path", "use the folder of the media", code="config.not_a_path")
    for part, sources in (("train", run.data.train), ("eval", run.data.eval)):
        for index, source in enumerate(sources):
            yield from _source(("data", part, index), source)


@rule("config.bad_reward", "method")
def rewards_exist(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Reward functions are known, or their files exist; regular expressions are valid."""
    method = run.method
    if not isinstance(method, GrpoMethod):
        return
    for index, reward in enumerate(method.rewards):
        at = ("method", "rewards", index)
        if reward.file is None:
            yield from _own_reward(method, reward, at, context)
        elif context.look_at_files and not os.path.isfile(reward.file):
            yield _absent((*at, "file"), reward.file, "file")
        elif context.look_at_files and (wrong := _wrong_in(reward.file, reward.function)):
            yield Violation((*at, "file"), f"{reward.file}: {wrong}", "correct the file, or the function's name")
        try:
            re.compile(reward.pattern or "")
        except re.error as error:
            yield Violation((*at, "pattern"), str(error), "correct the regular expression")


def _own_reward(
    method: GrpoMethod, reward: RewardFunctionSection, at: KeyPath, context: Context
) -> Iterator[Violation]:
    """A function that comes with halftune, and what it needs."""
    if reward.function not in REWARDS:
        remedy = did_you_mean(reward.function, REWARDS) or f"use {', '.join(REWARDS)}, or name its file"
        yield Violation((*at, "function"), f"no reward function {reward.function}", remedy)
    if reward.function == "passes_tests" and not reward.run_code:
        what = "passes_tests runs the model's code on this machine"
        yield Violation((*at, "run_code"), what, "set run_code: true to allow it", code="config.code_not_allowed")
    if reward.function == "overlong" and reward.soft_tokens > method.max_completion_length:
        what = f"is more than method.max_completion_length ({method.max_completion_length})"
        yield Violation((*at, "soft_tokens"), what, "use fewer tokens", code="config.out_of_range")
    if reward.function == "same_maths" and context.look_at_files and version_of("math-verify") is None:
        what = "same_maths requires the package math-verify"
        yield Violation((*at, "function"), what, f"run {extra_line('maths')}", code="core.package_missing")


def _wrong_in(path: str, function: str) -> str:
    """Why a Python file cannot have a function, without running it; empty if it may have it."""
    try:
        tree = ast.parse(read_limited(FilePath(path), SMALL_JSON))
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f"not a Python file: {error}"
    bound = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return "" if bound & {function, "*", "__getattr__"} else f"no function {function}"


def _source(key: KeyPath, source: SourceSection) -> Iterator[Violation]:
    name, at = source.path, (*key, "path")
    local = True
    if not name.strip() or "\0" in name:
        remedy = "use a file, a folder, a hub data set id, or builtin:<name>"
        yield Violation(at, "invalid path", remedy, code="config.not_a_path")
    elif name.startswith(BUILTIN):
        known = {BUILTIN + each for each in BUILTIN_DATA}
        if name not in known:
            yield Violation(at, f"unknown data set {name}", did_you_mean(name, known), code="core.unknown_builtin")
    elif os.path.isdir(name):
        yield from _folder(at, name)
    elif os.path.exists(name):
        yield from _file(at, name)
    elif os.path.islink(name) or _is_no_hub_id(name):
        yield _absent(at, name, "file or folder")
    else:
        local = False
    if local and source.split != "train":
        what = "has no effect: only hub data sets have splits"
        yield Violation((*key, "split"), what, "remove it", code="config.no_effect")


def _is_no_hub_id(name: str) -> bool:
    return looks_local(name) or _ending(name) in DATA_ENDINGS or not HUB_ID.fullmatch(name.split(":")[0])


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name belongs to a program: a cache, version control, what macOS packs."""
    return name.startswith(".") or name == "__MACOSX"


def _folder(at: KeyPath, path: str) -> Iterator[Violation]:
    for _, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not is_hidden(name)]
        if any(_ending(name) in DATA_ENDINGS and not is_hidden(name) for name in names):
            return
    remedy = f"known endings: {', '.join(DATA_ENDINGS)}; folders that are links are not entered: list their targets"
    yield Violation(at, f"no data files in folder {path}", remedy, code="data.no_data_files")


def _file(at: KeyPath, path: str) -> Iterator[Violation]:
    if not os.path.isfile(path):
        what = f"{path} is a pipe or a device; data is read more than once"
        yield Violation(at, what, "save it as a file", code="data.not_a_regular_file")
    elif _ending(path) not in DATA_ENDINGS:
        remedy = f"known endings: {', '.join(DATA_ENDINGS)} (each also with .gz)"
        yield Violation(at, f"unknown file type: {path}", remedy, code="data.unknown_file_type")
    elif not os.access(path, os.R_OK, effective_ids=EFFECTIVE):
        yield Violation(at, f"no permission to read {path}", "change its permissions", code="core.unreadable")
    elif os.path.getsize(path) == 0:
        yield Violation(at, f"{path} is empty", "use another file", code="data.empty")


def _ending(path: str) -> str:
    stem = path[:-3] if path.lower().endswith(".gz") else path
    return os.path.splitext(stem)[1].lower()


def _is_absent(at: KeyPath, name: str) -> bool:
    """Whether it is a tokenizer's name without an owner, as ``gpt2``, that cannot be had while the hub is off."""
    if at[-1] != "tokenizer" or "/" in name:
        return False
    from huggingface_hub import constants, try_to_load_from_cache  # few runs name such a tokenizer

    return constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)


def _absent(at: KeyPath, path: str, wanted: str) -> Violation:
    """A path where there is no file, or no folder, as ``wanted``."""
    if os.path.exists(path):
        got = "a folder" if os.path.isdir(path) else "a pipe or a device"
        return Violation(at, f"expected a {wanted}, got {got}: {path}", f"use a {wanted}")
    if os.path.islink(path):
        what = f"{path} is a broken symbolic link to {os.readlink(path)}"
        return Violation(at, what, "fix the symbolic link", code="core.broken_link")
    return Violation(at, f"no such {wanted}: {path}", _near(path))


def _near(path: str) -> str:
    """A similar name in the same folder, else the first missing folder of the path."""
    if "*" in path:
        return "wildcards are not supported: use the folder, or list the files"
    folder, name = os.path.split(os.path.abspath(path))
    if os.path.isdir(folder):
        close = get_close_matches(name, os.listdir(folder)[:2000], n=1, cutoff=0.6)
        shown = os.path.join(os.path.dirname(path), close[0]) if close else ""
        return (
            f"did you mean {shown}?" if close else "paths are relative to the working directory or the recipe's folder"
        )
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        name, folder = os.path.basename(folder), os.path.dirname(folder)
    return f"there is no {name} in {folder}"


@rule("model.not_found", "model.name_or_path", "model.tokenizer", "method.teacher.name_or_path", "depends_on")
def model_exists(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The model is builtin, a model folder, the output of a dependency, or possibly a hub id."""
    for field in ("name_or_path", "tokenizer"):
        name: str | None = getattr(run.model, field)
        if name is not None:
            yield from _model(("model", field), name, context)
    if (teacher := run.method.teacher_model) is not None:
        yield from _model(("method", "teacher", "name_or_path"), teacher.name_or_path, context)


def _model(at: KeyPath, name: str, context: Context) -> Iterator[Violation]:
    if name.startswith(BUILTIN):
        known = {BUILTIN + each for each in BUILTIN_MODELS}
        if name not in known:
            yield Violation(at, f"unknown model {name}", did_you_mean(name, known), code="core.unknown_builtin")
    elif context.made_by_dependency(name) or not context.look_at_files:
        return
    elif os.path.isfile(name):
        got = "weights only" if name.lower().endswith(WEIGHT_ENDINGS) else "a file"
        what = f"expected a model folder, got {got}: {name}"
        yield Violation(at, what, "use the folder with config.json and the tokenizer")
    elif os.path.isdir(name):
        if at[-1] != "tokenizer":
            yield from _model_folder(at, name)
    elif looks_local(name):
        yield _absent(at, name, "folder")
    elif not HUB_ID.fullmatch(name) or "--" in name or ".." in name or _is_absent(at, name):
        remedy = "use a hub id such as Qwen/Qwen2.5-0.5B-Instruct, a folder, or builtin:<name>"
        yield Violation(at, f"{name!r} is neither a folder nor a hub id", remedy)


def _model_folder(at: KeyPath, name: str) -> Iterator[Violation]:
    try:
        config_in(FilePath(name))
    except ModelError as error:
        yield Violation(at, error.what, error.remedy, error.code)


@rule("config.bad_chat_template", "model.chat_template")
def template_exists(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The chat template is a file or a known name."""
    name = run.model.chat_template
    if name is None or not context.look_at_files or os.path.isfile(name):
        return
    from halftune.config.chat_templates import find_template, template_names  # few runs need the table

    if find_template(name):
        return
    what = f"neither a chat template's name nor a file: {name}"
    close = get_close_matches(name, template_names(), n=1)
    remedy = f"did you mean {close[0]}?" if close else "use a name of docs/reference/chat-templates.md, or a Jinja file"
    if "{%" in name or "{{" in name:
        what, remedy = "expected a name or a file, got a template", "write it to a Jinja file, and give its path"
    yield Violation(("model", "chat_template"), what, remedy)


@rule("config.output_dir_unusable", "training.output_dir", "model.name_or_path", "data.train", "data.eval")
def output_is_writable(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The run folder can be created, holds no base model, and is not in a folder that is read, or in another run."""
    name, at = run.training.output_dir, ("training", "output_dir")
    if not name.strip() or _NO_PATH.search(name):
        yield Violation(at, "invalid path", "use for example runs/my-first-run", code="config.not_a_path")
        return
    path = os.path.realpath(name)
    if long := [part for part in path.split(os.sep) if len(os.fsencode(part)) > 255]:
        yield Violation(at, f"folder name too long: {len(long[0])} characters", "shorten it")
        return
    if what := _not_creatable(path, look=context.look_at_files):
        yield Violation(at, what, "choose another folder")
    yield from _holds_inputs(run, path, at, context.recipe.resolve())
    if part := part_of_run(FilePath(path)):
        yield Violation(at, f"is inside a part of another run: {part}", "choose another folder")


def _not_creatable(path: str, *, look: bool) -> str:
    """Why a folder cannot be created; empty if it can. ``look``: also whether the user may write there."""
    existing = path
    while not os.path.lexists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        return f"{existing} is a file, not a folder"
    if not look or os.access(existing, os.W_OK | os.X_OK, effective_ids=EFFECTIVE):
        return ""
    read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
    return f"{existing} is on a read-only file system" if read_only else f"no permission to write {existing}"


def _holds_inputs(run: RunConfig, path: str, at: KeyPath, recipe: FilePath) -> Iterator[Violation]:
    """The base model in the run folder, or the run folder in a data folder or a model's, unless the recipe is there."""
    model = os.path.realpath(run.model.name_or_path)
    if os.path.isdir(model) and (path == model or model.startswith(path + os.sep)):
        yield Violation(at, "contains the base model, which training would overwrite", "choose another folder")
    teacher, begun = run.method.teacher_model, getattr(run.adapter, "name_or_path", None)
    for read in (run.model.name_or_path, run.model.tokenizer, teacher and teacher.name_or_path, begun):
        folder = os.path.realpath(read) if read and os.path.isdir(read) else path
        if FilePath(path).parent.is_relative_to(folder) and not recipe.is_relative_to(folder):
            yield Violation(at, f"is inside a folder that the run reads: {read}", "choose a folder outside it")
            break
    for source in (*run.data.train, *run.data.eval):
        if os.path.isdir(source.path) and FilePath(path).is_relative_to(os.path.realpath(source.path)):
            what = f"is inside the data folder {source.path}, whose files are all read as data"
            yield Violation(at, what, "choose a folder outside it")
            break


def part_of_run(path: FilePath) -> FilePath | None:
    """The result or checkpoint of a run that a path (without symbolic links) is, or lies in."""
    for part in (path, *path.parents):
        if _PART_OF_RUN.fullmatch(part.name) and (part.parent / "resolved.yaml").is_file():
            return part
    return None


@rule("train.checkpoint_not_found", "training.resume")
def checkpoint_exists(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The checkpoint to resume from exists."""
    name = run.training.resume
    if name in ("auto", "never") or not context.look_at_files:
        return
    if not os.path.isdir(name):
        words = {"true": "auto", "yes": "auto", "false": "never", "no": "never"}
        remedy = f"did you mean {words[name.lower()]}?" if name.lower() in words else "use auto, never, or a checkpoint"
        yield Violation(("training", "resume"), f"no such checkpoint: {name}", remedy)
