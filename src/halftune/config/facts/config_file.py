"""Locates a model's config.json: in its folder, in the hub cache, on the hub, or among those that halftune has."""

from __future__ import annotations

import time
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, urlopen

from halftune.config.facts.published import published_config
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.processes.time_limit import within

_PATIENCE = 6.0  # timeout for the hub in seconds
_DOWNLOAD = 60.0  # timeout for a small file in seconds
_REMEMBERED = 60  # seconds for which the hub's availability is cached


def config_file(model: ModelSection, *, catalogue: bool = True) -> Path:
    """Return the path of a model's config.json: in its folder, or of a hub repository.

    Where the hub is out of reach, or asks for a token, the numbers of well-known models come from halftune itself.

    Args:
        model: names it.
        catalogue: whether halftune's own numbers will do.

    Raises:
        ModelError: there is none.
    """
    name = model.name_or_path
    folder = Path(name)
    if folder.is_dir():
        return config_in(folder)
    if folder.is_file() or name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith("/"):
        remedy = "use an existing folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or builtin:<name>"
        what = f"no such model folder: {name}"
        raise ModelError(what, where="model.name_or_path", remedy=remedy, code="model.not_found")
    try:
        file = from_hub(name, model.revision, "config.json", key="model.name_or_path")
        assert file is not None, "downloaded"
        return file
    except ModelError:
        if catalogue and model.revision is None and (known := published_config(name)) is not None:
            return known
        raise


def config_in(folder: Path) -> Path:
    """Return the config.json of a model's folder.

    Raises:
        ModelError: there is none.
    """
    file = folder / "config.json"
    if file.is_file():
        return file
    key = "model.name_or_path"
    if (folder / "adapter_config.json").is_file():
        what = f"{folder} contains an adapter, not a model"
        remedy = "use its base model, or merge it: halftune export"
        raise ModelError(what, where=key, remedy=remedy, code="model.is_adapter")
    what = f"no config.json in folder {folder}"
    raise ModelError(what, where=key, remedy="use the folder of a model", code="model.config_missing")


def from_hub(name: str, revision: str | None, file: str, *, key: str, download: bool = True) -> Path | None:
    """Return a small file of a hub repository: the cached one, else downloaded (some kilobytes).

    Args:
        name: hub id.
        revision: branch, tag or commit.
        file: its name.
        key: of the recipe, for errors.
        download: whether to ask the hub; else None if the file is not in the cache.

    Raises:
        ModelError: it is not there, or the hub is unreachable.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str) or not download:
            return Path(cached) if isinstance(cached, str) else None
        if not hub_answers():
            raise OfflineModeIsEnabled(f"{constants.ENDPOINT} does not respond")
        return Path(within(_DOWNLOAD, lambda: hf_hub_download(name, file, revision=revision)))
    except HFValidationError as error:
        what = f"{name!r} is neither a folder nor a hub id"
        raise ModelError(what, where=key, code="model.not_found") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        what = f"no local folder {name}; not in the hub cache, and the hub is unreachable"
        remedy = "download it once while online (HF_HUB_OFFLINE unset), use a local folder, or builtin:qwen2-tiny"
        raise ModelError(what, where=key, remedy=remedy, code="model.hub_unreachable") from error
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:  # not there, gated, no home folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "check the name and the network (HF_HUB_OFFLINE, HF_ENDPOINT, a token for gated models), or a folder"
        what = f"no local folder {name}; downloading {file} from the hub failed: {reason}"
        raise ModelError(what, where=key, remedy=remedy, code="model.hub_unreachable") from error


def hub_answers() -> bool:
    """Whether the hub is reachable; checked first, since the hub's client retries for minutes."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if _beyond_urllib(getproxies(), urlsplit(constants.ENDPOINT).scheme):
        return True
    return _answers(constants.ENDPOINT, int(time.monotonic() // _REMEMBERED))


def _beyond_urllib(proxies: dict[str, str], scheme: str) -> bool:
    """Whether the hub's client goes through a proxy that urllib does not: one of another protocol, or of all_proxy."""
    proxy = proxies.get(scheme) or proxies.get("all", "")
    return ("://" in proxy and not proxy.startswith("http://")) or proxy != proxies.get(scheme, "")


@lru_cache(maxsize=1)
def _answers(endpoint: str, _: int) -> bool:
    """Whether a server responds within ``_PATIENCE``."""
    try:
        return within(_PATIENCE, lambda: _asked(endpoint))
    except TimeoutError:
        return False


def _asked(endpoint: str) -> bool:
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=_PATIENCE / 2):  # of each address, and of the answer
            return True
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, SSLError)  # the hub's client reports certificate errors
    except (OSError, ValueError, HTTPException):
        return False
