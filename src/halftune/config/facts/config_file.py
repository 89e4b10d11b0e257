"""Where a model's config.json is: in its folder, in the hub's cache, or on the hub."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError


def config_file(model: ModelSection) -> Path:
    """config.json of a model: in its folder, or of a hub repository.

    Raises:
        ModelError: there is none.
    """
    name = model.name_or_path
    folder = Path(name)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder / "config.json"
        if (folder / "adapter_config.json").is_file():
            remedy = "model.name_or_path is the base model; merge the adapter first with `halftune export`"
            raise ModelError("this folder holds an adapter, not a model", where=name, remedy=remedy)
        raise ModelError("there is no config.json in the model's folder", where=name)
    if folder.is_file() or name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith("/"):
        remedy = "write an existing folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or builtin:<name>"
        raise ModelError(f"there is no model folder {name}", where="model.name_or_path", remedy=remedy)
    return _from_hub(name, model.revision)


def _from_hub(name: str, revision: str | None) -> Path:
    """config.json of a hub repository: the cached one, else downloaded (some kilobytes)."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if not constants.HF_HUB_OFFLINE and not hub_has_address():
            raise OfflineModeIsEnabled(f"{constants.ENDPOINT} has no address")
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a folder nor a hub id", where="model.name_or_path") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        what = f"there is no folder {name} here; as a hub id: not in the hub's cache, and the hub is out of reach"
        remedy = "go online once (HF_HUB_OFFLINE unset), name a local folder, or use builtin:qwen2-tiny"
        raise ModelError(what, where="model.name_or_path", remedy=remedy) from error
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:  # not there, gated, no home folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = (
            "check the name and the network (HF_HUB_OFFLINE, HF_ENDPOINT, a token for gated models), or give a folder"
        )
        raise ModelError(
            f"there is no folder {name} here; as a hub id, its config.json could not be fetched: {reason}",
            where="model.name_or_path",
            remedy=remedy,
        ) from error


def hub_has_address() -> bool:
    """Whether a download can begin: asked first, as the hub's client tries five times over, for half a minute."""
    from huggingface_hub import constants

    if getproxies():  # which look it up themselves
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except socket.gaierror:
        return False
    return True
