"""Checks of a model's folder: complete safetensors and JSON; no pickles, no unpinned code."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from halftune.config.facts.config_file import config_in
from halftune.config.facts.safetensors_headers import damaged, read_header, read_headers
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.files import MOST_JSON, read_limited

COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Vocabulary files of all formats that transformers reads.
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json", "sentencepiece*")
CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")

# Files besides the weights that libraries read completely.
_SMALL = (
    *(*VOCABULARIES, *CONFIGS, "merges.txt", "generation_config.json", "added_tokens.json", "special_tokens_map.json"),
    "chat_template.*",
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def _named(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _check_files(folder: Path) -> None:
    """Check that a checkpoint's files are regular files, and that those besides the weights are small.

    Raises:
        ModelError: a broken symbolic link, a folder or a pipe in place of a file, or a file that is too large.
    """
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        small = path.parent != folder or _named(path, _SMALL)
        if not small and not _named(path, _WEIGHTS):
            continue
        if path.is_symlink() and not path.exists():
            what = f"broken symbolic link to {path.readlink()}"
            remedy = "fix the symbolic link, or copy the file itself"
            raise ModelError(what, where=str(path), remedy=remedy, code="core.broken_link")
        if not path.is_file():
            raise damaged("not a regular file", path)
        if small and (size := path.stat().st_size) > MOST_JSON:
            raise damaged(f"file has {size:,} bytes; the maximum is {MOST_JSON:,}", path)


def check_weights(folder: Path) -> None:
    """Check that a folder contains a complete safetensors checkpoint.

    Raises:
        ModelError: weights are missing or pickles; for pickles the remedy is the command that converts them.
    """
    where = str(folder)
    config_in(folder)
    if (folder / "adapter_config.json").is_file():
        what = "the model's folder also contains an adapter, whose base model transformers would load instead"
        remedy = "move adapter_config.json elsewhere, or use the folder of the model alone"
        raise ModelError(what, where=where, remedy=remedy, code="model.adapter_beside_model")
    _check_files(folder)
    if read_headers(folder):
        return
    if pickles := pickles_in(folder):
        what = f"the weights are pickles ({pickles[0]}), which execute code when loaded"
        raise ModelError(
            what, where=where, remedy=f"if you trust them, run: {model_command(folder)}", code="model.pickle_refused"
        )
    if (folder / "model.safetensors").is_file():
        what, remedy = "the file contains no weights", "download it again"
        raise ModelError(what, where=f"{folder}/model.safetensors", remedy=remedy, code="model.weights_missing")
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    what = f"no weights: no model.safetensors and no index of shards{f' (found {others[0]})' if others else ''}"
    raise ModelError(what, where=where, remedy="download the model again", code="model.weights_missing")


def check_adapter(folder: Path) -> None:
    """Check that a folder contains a safetensors adapter.

    Raises:
        ModelError: its config or weights are missing, corrupt or a pickle.
    """
    read_json(folder / "adapter_config.json")
    weights = folder / "adapter_model.safetensors"
    if weights.is_file():
        read_header(weights)
        return
    if (folder / "adapter_model.bin").is_file():
        what = "the adapter is a pickle (adapter_model.bin), which executes code when loaded"
        remedy = f"if you trust it, run: {adapter_command(folder)}"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.pickle_refused")
    what = "the adapter has no adapter_model.safetensors"
    raise ModelError(what, where=str(folder), remedy="restore the file", code="model.adapter_missing")


def pickles_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder that are, or may contain, Python pickles."""
    return sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))


def model_command(folder: Path) -> str:
    """Return the shell command that converts a pickled checkpoint and its tokenizer to safetensors in a new folder."""
    source, target = json.dumps(str(folder)), json.dumps(f"{folder}-safetensors")
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f'M.from_pretrained({source}, dtype="auto").save_pretrained({target}); '
        f"T.from_pretrained({source}).save_pretrained({target})"
    )
    return f"python -c {shlex.quote(code)}"


def adapter_command(folder: Path) -> str:
    """Return the shell command that converts a pickled adapter to safetensors in the same folder."""
    source, target = (json.dumps(str(folder / f"adapter_model.{ending}")) for ending in ("bin", "safetensors"))
    code = (
        "import torch; from safetensors.torch import save_file; "
        f"save_file({{k: v.contiguous() for k, v in torch.load({source}, weights_only=True).items()}}, {target})"
    )
    return f"python -c {shlex.quote(code)}"


def check_tokenizer(folder: Path) -> None:
    """Check that a folder contains a tokenizer: transformers would silently create an empty one.

    Raises:
        ModelError: there is none, or a file is corrupt.
    """
    _check_files(folder)
    if not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        remedy = "copy the tokenizer's files there, or set model.tokenizer"
        what = "the folder has no tokenizer"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.tokenizer_missing")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)


def has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer has a chat template; True also if its code may have one."""
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and read_json(settings).get("chat_template"):
        return True
    patterns = ("chat_template.*", "additional_chat_templates/*", "tekken.json", "*.py")
    return any(path for pattern in patterns for path in folder.glob(pattern))


def fitting_template(folder: Path) -> str | None:
    """Name of the chat template whose tokens a tokenizer without one has; None if no format fits."""
    from halftune.config.chat_templates import template_for  # for base models only

    path = folder / "tokenizer.json"
    added = read_json(path).get("added_tokens") if path.is_file() else None
    tokens = [one.get("content") for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    row = template_for(token for token in tokens if isinstance(token, str))
    return None if row is None else row.name


def check_code(folder: Path, model: ModelSection) -> list[str]:
    """List the remote code of a checkpoint; checks that it is pinned.

    Returns:
        ``file (sha256 …)`` of every Python file in the folder with ``trust_remote_code``; else empty.

    Raises:
        ModelError: a config loads code from another repository, which no revision pins.
    """
    if not model.trust_remote_code:
        return []
    for name in CONFIGS:
        path = folder / name
        if not path.is_file():
            continue
        for entry in _code_of(read_json(path)):
            repository, dashes, _ = entry.partition("--")
            if dashes:
                what = f"remote code from another repository, {repository}, is not pinned ({entry})"
                remedy = f"copy that code into the folder, and remove '{repository}--' from auto_map"
                raise ModelError(what, where=str(path), remedy=remedy, code="model.code_not_pinned")
    files = sorted(folder.rglob("*.py"))
    return [f"{path.relative_to(folder)} (sha256 {_digest(path)[:12]})" for path in files]


def _code_of(raw: Any) -> list[str]:
    """Every class or module in ``auto_map``, including those of sub-configs."""
    if not isinstance(raw, dict):
        return []
    found = [entry for value in raw.values() if isinstance(value, dict) for entry in _code_of(value)]
    mapped = raw.get("auto_map")
    for value in mapped.values() if isinstance(mapped, dict) else [mapped]:
        found += [entry for entry in (value if isinstance(value, list | tuple) else [value]) if isinstance(entry, str)]
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        ModelError: it cannot be read, or is not a JSON object; names the line.
    """
    try:
        raw = json.loads(read_limited(path).decode())
    except json.JSONDecodeError as error:
        raise damaged(f"not valid JSON: {error.msg}", f"{path}:{error.lineno}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number too long, nested too deeply
        raise damaged(f"not valid JSON: {error}", path) from error
    except OSError as error:
        raise damaged(f"cannot read file: {error.strerror}", path) from error
    if not isinstance(raw, dict):
        raise damaged("expected a JSON object", path)
    return raw
