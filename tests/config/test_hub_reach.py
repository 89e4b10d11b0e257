"""A hub id on a machine without a network is refused at once."""

from __future__ import annotations

import socket

import huggingface_hub
import pytest

from halftune.config.facts.config_file import config_file
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError


def test_a_hub_without_an_address_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def download(name: str, *_: object, **__: object) -> str:
        asked.append(name)
        raise OSError("refused")

    for variable in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    model = ModelSection(name_or_path="org/no-such-model")
    with pytest.raises(ModelError, match="the hub is out of reach"):
        config_file(model)
    assert not asked
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a proxy looks the name up itself
    with pytest.raises(ModelError, match="could not be fetched: refused"):
        config_file(model)
    assert asked == ["org/no-such-model"]
