"""A hub id on a machine without a network is refused at once."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from patience import LIMIT

from halftune.cli import main
from halftune.config.facts import config_file as config_file_module
from halftune.config.facts.config_file import config_file, hub_answers
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.core.errors import DataError, ModelError
from halftune.data.preflight import validate_data


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config_file_module._answers.cache_clear()
    monkeypatch.setattr(config_file_module, "_PATIENCE", LIMIT)
    monkeypatch.setattr("urllib.request._opener", None)  # which keeps the proxies of its first call
    yield
    config_file_module._answers.cache_clear()


@pytest.fixture
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network: every name is unknown."""

    found = socket.getaddrinfo

    def unknown(host: str, *more: Any, **named: Any) -> Any:
        if host == "127.0.0.1":
            return found(host, *more, **named)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    without_proxy(monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)


def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("no_proxy", "localhost")  # no proxy by itself


class Tunnel(BaseHTTPRequestHandler):
    """A proxy; it connects to nothing."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("silence", ["no name", "no answer"])
def test_a_hub_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch, silence: str) -> None:
    without_proxy(monkeypatch)
    monkeypatch.setattr(config_file_module, "_PATIENCE", 0.4)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("it was asked"))
    released = Event()
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections are taken by the system, and nobody answers
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        if silence == "no name":
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(LIMIT) and [])
        with pytest.raises(ModelError) as caught:
            config_file(ModelSection(name_or_path="org/no-such-model"))
        released.set()
    assert caught.value.code == "model.hub_unreachable"


@pytest.mark.usefixtures("no_address")
def test_a_hub_without_an_address_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, *_: object, **__: object) -> str:
        asked.append(name)
        raise OSError("refused")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = ModelSection(name_or_path="org/no-such-model")
    with pytest.raises(ModelError, match="the hub is unreachable"):
        config_file(model)
    assert not asked
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:9")  # a proxy looks the name up itself
    with pytest.raises(ModelError, match="hub failed: refused"):
        config_file(model)
    assert asked == ["org/no-such-model"]


@pytest.mark.usefixtures("no_address")
@pytest.mark.parametrize(
    ("proxies", "answers"),
    [
        ({}, False),
        ({"https": "http://127.0.0.1:{port}"}, False),  # of another protocol than the hub's
        ({"http": "http://127.0.0.1:{port}"}, True),
        ({"http": "http://127.0.0.1:{closed}"}, False),  # where nobody listens
        ({"http": "socks5://127.0.0.1:9"}, True),  # which only the hub's client can ask
        ({"all": "http://127.0.0.1:9"}, True),
    ],
)
def test_the_hub_is_asked_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, proxies: dict[str, str], answers: bool
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.invalid")
    with HTTPServer(("127.0.0.1", 0), Tunnel) as server, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can
        Thread(target=server.serve_forever, daemon=True).start()
        for scheme, proxy in proxies.items():
            monkeypatch.setenv(f"{scheme}_proxy", proxy.format(port=server.server_port, closed=silent.getsockname()[1]))
        assert hub_answers() == answers
        server.shutdown()


@pytest.mark.usefixtures("no_address")
@pytest.mark.parametrize("key", ["train", "eval"])
def test_a_data_set_of_the_hub_is_looked_for_in_the_cache_alone(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    asked: list[tuple[str, bool]] = []

    def load_dataset(name: str, *_: object, **__: object) -> None:
        asked.append((name, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("not cached")

    datasets = SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace(HF_HUB_OFFLINE=False))
    monkeypatch.setattr("halftune.data.sources.hub.need", lambda *_, **__: datasets)
    data = {"train": "builtin:python-docs", key: "org/no-such-set"}
    config = RunConfig.model_validate({
        "model": {"name_or_path": "builtin:qwen2-tiny"}, "data": data, "training": {"output_dir": "unused"},
    })  # fmt: skip
    with pytest.raises(DataError) as caught:
        validate_data(config)
    assert (caught.value.where, asked) == ("org/no-such-set", [("org/no-such-set", True)])
    assert not datasets.config.HF_HUB_OFFLINE
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:9")
    validate_data(config)
    assert len(asked) == 1


@pytest.mark.usefixtures("no_address")
@pytest.mark.parametrize("verb", ["data", "plan"])
def test_a_model_of_the_hub_is_refused_before_anything_heavy_is_imported(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {{name_or_path: org/none}}\ndata: {{train: builtin:python-docs}}\n"
                      f"training: {{output_dir: {tmp_path / 'out'}}}\n")  # fmt: skip
    monkeypatch.setitem(sys.modules, "halftune.model.tokenizer.tokenizer", None)  # an import of it fails
    with pytest.raises(SystemExit) as left:
        main([verb, "--config", str(recipe)])
    assert left.value.code == ModelError.exit_code
    assert "unreachable" in capsys.readouterr().err
