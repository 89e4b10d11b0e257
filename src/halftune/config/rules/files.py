"""Rules about files and folders: they exist, can be read, and are what the key needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path as FilePath

from halftune.config.builtin_data import BUILTIN_DATA
from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.rules.finding import HUB_ID, Context, Finding, looks_local
from halftune.config.run import RunConfig
from halftune.config.sections.data import SourceSection
from halftune.config.shape import Path
from halftune.core.table import did_you_mean

BUILTIN = "builtin:"
EFFECTIVE = os.access in os.supports_effective_ids  # whether rights can be asked for as whom we act
DATA_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".rst", ".py")
WEIGHT_ENDINGS = (".gguf", ".bin", ".pt", ".pth", ".safetensors", ".ckpt")


def data_exists(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Every source is a builtin set, a readable file or folder with data, or can be a hub id."""
    if not context.look_at_files:
        return
    for part, sources in (("train", run.data.train), ("eval", run.data.eval)):
        for index, source in enumerate(sources):
            yield from _source(("data", part, index), source)


def _source(key: Path, source: SourceSection) -> Iterator[Finding]:
    name, at = source.path, (*key, "path")
    local = True
    if not name.strip() or "\0" in name:
        yield Finding(at, "is no path", "a file, a folder, a hub data set id, or builtin:<name>")
    elif name.startswith(BUILTIN):
        known = {BUILTIN + each for each in BUILTIN_DATA}
        if name not in known:
            yield Finding(at, f"there is no data set {name}", did_you_mean(name, known))
    elif os.path.isdir(name):
        yield from _folder(at, name)
    elif os.path.exists(name):
        yield from _file(at, name)
    elif os.path.islink(name):
        yield Finding(at, f"{name} is a link to {os.readlink(name)}, which is not there", "mend the link")
    elif looks_local(name) or _ending(name) in DATA_ENDINGS or not HUB_ID.fullmatch(name.split(":")[0]):
        yield Finding(at, f"no such file or folder: {name}", _near(name))
    else:
        local = False
    if local and source.split != "train":
        yield Finding((*key, "split"), "has no effect: only hub data sets have splits", "remove it")


def _folder(at: Path, path: str) -> Iterator[Finding]:
    for _, _, names in os.walk(path):
        if any(_ending(name) in DATA_ENDINGS and not name.startswith(".") for name in names):
            return
    yield Finding(at, f"the folder {path} holds no data file", f"known endings: {', '.join(DATA_ENDINGS)}")


def _file(at: Path, path: str) -> Iterator[Finding]:
    if _ending(path) not in DATA_ENDINGS:
        known = ", ".join(DATA_ENDINGS)
        yield Finding(at, f"unknown kind of file: {path}", f"known endings: {known} (each also with .gz)")
    elif not os.path.isfile(path):
        yield Finding(at, f"{path} is a pipe or a device, and data is read more than once", "write it into a file")
    elif not os.access(path, os.R_OK, effective_ids=EFFECTIVE):
        yield Finding(at, f"the file {path} may not be read", "change its permissions")
    elif os.path.getsize(path) == 0:
        yield Finding(at, f"the file {path} is empty", "fill it, or name another one")


def _ending(path: str) -> str:
    stem = path[:-3] if path.lower().endswith(".gz") else path
    return os.path.splitext(stem)[1].lower()


def _near(path: str) -> str:
    """The nearest name in the same folder, else where the missing part of the path begins."""
    if "*" in path:
        return "a * stands for nothing here: name the folder, whose files are all read, or list the files"
    folder, name = os.path.split(os.path.abspath(path))
    if os.path.isdir(folder):
        close = get_close_matches(name, os.listdir(folder)[:2000], n=1, cutoff=0.6)
        shown = os.path.join(os.path.dirname(path), close[0]) if close else ""
        return (
            f"did you mean {shown}?" if close else "relative paths start in the working directory, or beside the YAML"
        )
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):
        name, folder = os.path.basename(folder), os.path.dirname(folder)
    return f"there is no {name} in {folder}"


def model_exists(run: RunConfig, context: Context) -> Iterator[Finding]:
    """The model is builtin, a folder of a model, made by a recipe before this one, or can be a hub id."""
    for field in ("name_or_path", "tokenizer"):
        name: str | None = getattr(run.model, field)
        if name is not None:
            yield from _model(("model", field), name, context)


def _model(at: Path, name: str, context: Context) -> Iterator[Finding]:
    kinds = "a hub id such as Qwen/Qwen2.5-0.5B-Instruct, a folder, or builtin:<name>"
    if name.startswith(BUILTIN):
        known = {BUILTIN + each for each in BUILTIN_MODELS}
        if name not in known:
            yield Finding(at, f"there is no model {name}", did_you_mean(name, known))
    elif context.made_by_dependency(name) or not context.look_at_files:
        return
    elif os.path.isfile(name):
        kind = "weights alone are no model" if name.lower().endswith(WEIGHT_ENDINGS) else "is a file"
        yield Finding(at, f"{kind}: {name}", "name the folder that holds config.json and the tokenizer")
    elif os.path.isdir(name):
        yield from _model_folder(at, FilePath(name))
    elif looks_local(name):
        yield Finding(at, f"no such folder: {name}", _near(name))
    elif not HUB_ID.fullmatch(name) or "--" in name or ".." in name:
        yield Finding(at, f"{name!r} is neither a folder nor a hub id", kinds)


def _model_folder(at: Path, folder: FilePath) -> Iterator[Finding]:
    if at[-1] == "tokenizer" or (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        remedy = "name its base model; `halftune export` merges an adapter into one"
        yield Finding(at, f"{folder} holds an adapter, not a model", remedy)
    else:
        yield Finding(at, f"the folder {folder} has no config.json", "name the folder of a model")


def template_exists(run: RunConfig, context: Context) -> Iterator[Finding]:
    """The chat template is a file or the builtin one."""
    name = run.model.chat_template
    if name is None or name == "chatml" or not context.look_at_files:
        return
    if not os.path.isfile(name):
        what = f"no such file: {name}"
        if "{%" in name or "{{" in name:
            what = "holds the template itself"
        yield Finding(("model", "chat_template"), what, "write chatml, or the path of a Jinja file")


def output_is_writable(run: RunConfig, context: Context) -> Iterator[Finding]:
    """The run folder can be made, and is not something else's."""
    name, at = run.training.output_dir, ("training", "output_dir")
    if not name.strip() or "\0" in name:
        yield Finding(at, "is no path", "for example runs/my-first-run")
        return
    path = os.path.abspath(name)
    if long := [part for part in path.split(os.sep) if len(os.fsencode(part)) > 255]:
        yield Finding(at, f"a name of {len(long[0])} characters is too long for a folder", "shorten it")
        return
    existing = path
    while not os.path.lexists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        yield Finding(at, f"{existing} is a file, not a folder", "choose another folder")
    elif context.look_at_files and not os.access(existing, os.W_OK | os.X_OK, effective_ids=EFFECTIVE):
        yield Finding(at, f"{existing} may not be written", "choose another folder")
    model = os.path.abspath(run.model.name_or_path)
    if os.path.isdir(model) and (path == model or model.startswith(path + os.sep)):
        yield Finding(at, "holds the base model, which training would overwrite", "choose another folder")


def checkpoint_exists(run: RunConfig, context: Context) -> Iterator[Finding]:
    """A checkpoint named to go on from is there."""
    name = run.training.resume
    if name in ("auto", "never") or not context.look_at_files:
        return
    if not os.path.isdir(name):
        words = {"true": "auto", "yes": "auto", "false": "never", "no": "never"}
        remedy = f"did you mean {words[name.lower()]}?" if name.lower() in words else "auto, never, or a checkpoint"
        yield Finding(("training", "resume"), f"no such checkpoint: {name}", remedy)


FileRule = Callable[[RunConfig, Context], Iterator[Finding]]
FILE_RULES: tuple[tuple[FileRule, tuple[str, ...]], ...] = (
    (data_exists, ("data.train", "data.eval")),
    (model_exists, ("model.name_or_path", "model.tokenizer", "depends_on")),
    (template_exists, ("model.chat_template",)),
    (output_is_writable, ("training.output_dir", "model.name_or_path")),
    (checkpoint_exists, ("training.resume",)),
)
