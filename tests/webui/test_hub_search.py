"""The search on the hub: against a server of this machine in its place."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

from halftune.core.errors import HalftuneError
from halftune_webui import hub

ASKED: list[dict[str, list[str]]] = []


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        place, found = urlsplit(self.path), {}
        if place.path == "/api/models":  # the client's library asks for things of its own, too
            ASKED.append(parse_qs(place.query))
            found = [{"id": "someone/tiny-chat"}, {"id": "other/tiny"}]
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "kept.json"))  # what its client keeps
    yield server
    server.shutdown()
    server.server_close()


def test_models_are_found_by_name(endpoint: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.clear()
    assert hub.search("tiny") == ["someone/tiny-chat", "other/tiny"]
    assert ASKED[0]["search"] == ["tiny"]
    assert ASKED[0]["filter"] == ["text-generation"]


def test_no_network_is_told_and_offline_asks_nobody(endpoint: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.shutdown()
    endpoint.server_close()
    with pytest.raises(HalftuneError, match="cannot be reached"):
        hub.search("tiny")
    ASKED.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HalftuneError, match="HF_HUB_OFFLINE"):
        hub.search("tiny")
    assert not ASKED
