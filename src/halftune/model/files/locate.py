"""Resolves a model name to a local folder: builtin, local path or hub download."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

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

from halftune.config.facts.config_file import hub_answers
from halftune.config.facts.folder import check_code, check_weights
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.model.files.builtin import materialize

if TYPE_CHECKING:
    from halftune.data.media.processor import MediaSettings

log = get_logger(__name__)

BUILTIN = "builtin:"
WEIGHTS = ("*.safetensors",)
# tokenizer and config files; JSON includes the index of sharded weights
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "*vocab*.txt")
IGNORED = ("consolidated*", "original/*", "onnx/*", "openvino/*", "*.bin.index.json", "flax*", "tf_*")


def locate(model: ModelSection) -> Path:
    """Return the folder of a model: built (``builtin:``), local, or downloaded (a hub id).

    From a hub repository only safetensors, JSON, templates and tokenizer files are downloaded (Python files with
    ``trust_remote_code`` only). Pickle checkpoints are refused: loading one executes code.

    Raises:
        ModelError: not found, the hub is unreachable, a shard is missing, or there are no safetensors.
    """
    name = model.name_or_path
    if name.startswith(BUILTIN):
        return materialize(name.removeprefix(BUILTIN))
    folder = _folder(model, (*WEIGHTS, *SMALL_FILES))
    check_weights(folder)
    if code := check_code(folder, model):
        _warn_remote_code(str(folder), tuple(code))
    return folder


def locate_tokenizer(model: ModelSection) -> Path:
    """Return the tokenizer's folder: ``model.tokenizer`` if set, else the model's.

    No weights are downloaded. From a repository other than the model's no Python files either, since
    ``model.revision`` pins the model's code only.

    Raises:
        ModelError: not found, or the hub is unreachable.
    """
    name = model.tokenizer or model.name_or_path
    if name.startswith(BUILTIN):
        return materialize(name.removeprefix(BUILTIN))
    if model.tokenizer is None:
        return _folder(model, SMALL_FILES)
    folder = Path(name)
    if folder.is_dir():
        return folder
    if _looks_like_a_path(name):
        what = f"no tokenizer folder at {name}"
        raise ModelError(what, remedy="correct model.tokenizer", code="model.tokenizer_missing")
    apart = model.model_copy(update={"revision": None, "trust_remote_code": False})
    return download(name, apart, SMALL_FILES)


def _folder(model: ModelSection, patterns: tuple[str, ...]) -> Path:
    """The model's local folder, or the downloaded files of its hub repository."""
    name = model.name_or_path
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.is_file() or _looks_like_a_path(name):
        what = f"no model folder at {name}"
        raise ModelError(what, remedy="use an existing folder, a hub id or builtin:<name>", code="model.not_found")
    return download(name, model, patterns)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith("/")


def download(name: str, model: ModelSection, patterns: tuple[str, ...]) -> Path:
    """Download the files of a hub repository that match ``patterns``, or find them in the hub's cache.

    Raises:
        ModelError: invalid id, gated, not found, unreachable, or the download failed.
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
                local_files_only=not hub_answers(),
            )
        )
    except HFValidationError as error:
        what = f"{name!r} is neither a folder nor a hub id"
        raise ModelError(what, remedy="check model.name_or_path", code="model.not_found") from error
    except GatedRepoError as error:
        remedy = "accept its licence on the hub and log in with `hf auth login`"
        raise ModelError("the repository is gated", where=where, remedy=remedy, code="model.gated") from error
    except RepositoryNotFoundError as error:
        remedy = "check the spelling; for a private repository log in with `hf auth login`"
        what = f"no local folder {name}, and no such repository on the hub"
        raise ModelError(what, where=where, remedy=remedy, code="model.not_found") from error
    except RevisionNotFoundError as error:
        what = "no such revision on the hub"
        raise ModelError(what, where=where, remedy="check model.revision", code="model.revision_not_found") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        remedy = "download it once while online (HF_HUB_OFFLINE unset), use a local folder, or builtin:qwen2-tiny"
        what = f"no local folder {name}; not in the hub cache, and the hub is unreachable"
        raise ModelError(what, where=where, remedy=remedy, code="model.hub_unreachable") from error
    except (HfHubHTTPError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        raise ModelError(
            f"download failed: {first}",
            where=where,
            remedy="retry, or use a local folder",
            code="model.hub_unreachable",
        ) from error


@cache
def _warn_remote_code(folder: str, files: tuple[str, ...]) -> None:
    """Warn once about a checkpoint's remote code."""
    log.warning("model.trust_remote_code: executing Python from %s: %s", folder, ", ".join(files))


def media_of(config: RunConfig) -> MediaSettings | None:
    """How images of a run become tokens; None without ``data.images``.

    Raises:
        DataError: the model has no image processor.
    """
    if not config.data.media:
        return None
    from halftune.data.media.processor import media_settings  # few runs have images

    return media_settings(config, locate(config.model))
