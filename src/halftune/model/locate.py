"""Turns what the user wrote for a model into a folder on this machine: config, safetensors, tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from halftune.config.facts.config_file import hub_has_address
from halftune.config.facts.folder import check_code, check_weights
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.model.builtin import materialize

log = get_logger(__name__)

BUILTIN = "builtin:"
WEIGHTS = ("*.safetensors",)
# tokenizers and configs in every spelling; JSON includes the index of sharded weights
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "*vocab*.txt")
IGNORED = ("consolidated*", "original/*", "onnx/*", "openvino/*", "*.bin.index.json", "flax*", "tf_*")


def locate(model: ModelSection) -> Path:
    """The folder of a model's files: made (``builtin:``), as given (a folder), or downloaded (a hub id).

    Of a hub repository only safetensors weights, JSON, templates and tokenizer files are fetched (Python files with
    ``trust_remote_code`` only). Pickle checkpoints are refused: loading one runs code.

    Raises:
        ModelError: nothing is there, the hub cannot be reached, a shard is missing, or there are no safetensors.
    """
    name = model.name_or_path
    if name.startswith(BUILTIN):
        return materialize(name.removeprefix(BUILTIN))
    folder = Path(name)
    if folder.is_dir():
        return _checked(folder, model)
    if folder.is_file() or _looks_like_a_path(name):
        raise ModelError(f"no model folder at {name}", remedy="write an existing folder, a hub id or builtin:<name>")
    return _checked(download(name, model, (*WEIGHTS, *SMALL_FILES)), model)


def locate_tokenizer(model: ModelSection) -> Path:
    """The folder of the tokenizer: ``model.tokenizer`` where it is set, else the model's own.

    Of another hub repository no Python file is fetched: ``model.revision`` pins the model's code alone.

    Raises:
        ModelError: as ``locate``.
    """
    if model.tokenizer is None:
        return locate(model)
    if model.tokenizer.startswith(BUILTIN):
        return materialize(model.tokenizer.removeprefix(BUILTIN))
    folder = Path(model.tokenizer)
    if folder.is_dir():
        return folder
    if _looks_like_a_path(model.tokenizer):
        raise ModelError(f"no tokenizer folder at {model.tokenizer}", remedy="correct model.tokenizer")
    apart = model.model_copy(update={"revision": None, "trust_remote_code": False})
    return download(model.tokenizer, apart, SMALL_FILES)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith("/")


def download(name: str, model: ModelSection, patterns: tuple[str, ...]) -> Path:
    """Folder with the files of a hub repository that match ``patterns``, from the hub's cache or from the hub.

    Raises:
        ModelError: with what to do about each way this can fail.
    """
    where = f"{name}@{model.revision}" if model.revision else name
    wanted = [*patterns, *(("*.py",) if model.trust_remote_code else ())]
    try:
        return Path(
            snapshot_download(
                name,
                revision=model.revision,
                allow_patterns=wanted,
                ignore_patterns=list(IGNORED),
                local_files_only=not hub_has_address(),
            )
        )
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a hub id", remedy="check model.name_or_path") from error
    except GatedRepoError as error:
        remedy = "accept its licence on the hub and log in with `hf auth login`"
        raise ModelError("the repository is gated", where=where, remedy=remedy) from error
    except RepositoryNotFoundError as error:
        remedy = "check the spelling; for a private one log in with `hf auth login`"
        what = f"there is no folder {name} here, and no such repository on the hub"
        raise ModelError(what, where=where, remedy=remedy) from error
    except RevisionNotFoundError as error:
        raise ModelError("no such revision on the hub", where=where, remedy="check model.revision") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        remedy = "go online once (HF_HUB_OFFLINE unset), write a local folder, or use builtin:qwen2-tiny"
        what = f"there is no folder {name} here; as a hub id: not in the hub's cache, and the hub is out of reach"
        raise ModelError(what, where=where, remedy=remedy) from error
    except (HfHubHTTPError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        raise ModelError(f"download failed: {first}", where=where, remedy="try again or write a folder") from error


def _checked(folder: Path, model: ModelSection) -> Path:
    """The folder, when it holds a whole checkpoint in safetensors whose code, where it is to run, cannot change.

    Raises:
        ModelError: it does not; the message says what is missing.
    """
    check_weights(folder)
    if code := check_code(folder, model):
        _tell_code(str(folder), tuple(code))
    return folder


@cache
def _tell_code(folder: str, files: tuple[str, ...]) -> None:
    """Says once which Python comes with a checkpoint."""
    log.warning("model.trust_remote_code: Python from %s runs here: %s", folder, ", ".join(files))
