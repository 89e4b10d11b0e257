"""Finds models on the Hugging Face hub when somebody asks for it; the web UI asks no other server for anything."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlparse

from halftune.core.errors import HalftuneError

MOST = 20
_CONNECT = 3.0  # seconds


def search(text: str) -> list[str]:
    """Names of models that can be trained on text, the most downloaded first.

    Raises:
        HalftuneError: the hub is not to be asked, cannot be reached, or answers with an error.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        remedy = "start the web UI without it, or name a local folder"
        raise HalftuneError(
            "HF_HUB_OFFLINE is set: the hub is not contacted", remedy=remedy, code="model.hub_unreachable"
        )
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    address = urlparse(constants.ENDPOINT)
    host, port = str(address.hostname), address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=_CONNECT).close()  # without a network: told at once
        found = HfApi().list_models(search=text, filter="text-generation", sort="downloads", limit=MOST)
        return [model.id for model in found]
    except (OSError, httpx.HTTPError, HfHubHTTPError) as error:
        what = f"{host} cannot be reached: {error}"
        raise HalftuneError(what, remedy="name a local folder", code="model.hub_unreachable") from error
