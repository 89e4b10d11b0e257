"""The process: streams over a real connection, 32 clients, draining, a second signal, headers that do not come."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from patience import LIMIT, until
from tiny_model import checkpoint, finished_run

from halftune.cli.verbs import webui as webui_verb
from halftune.cli.verbs.results import serve as serve_verb
from halftune.serve import server as server_module
from halftune.serve.middleware import Access
from halftune.serve.server import listen, serve

PROMPT = [9, 300, 41, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("process")
    return finished_run(place / "one", checkpoint(place / "base", vocab_size=4096, max_position_embeddings=1 << 16))


class Process:
    """``halftune serve`` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "halftune", "serve", str(folder), "--port", "0", *arguments]
        self.log = folder.parent / "log"
        self.program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True)
        assert self.program.stdout is not None
        said = self.program.stdout.readline()
        assert said, self.log.read_text()
        self.url = said.split()[0]
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=LIMIT)

    def stream(self, tokens: int) -> Any:
        more: Any = {"model": "one", "prompt": PROMPT, "max_tokens": tokens, "stream": True}
        return self.client.completions.create(**more, extra_body={"ignore_eos": True})

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.program.send_signal(number)

    def status(self) -> int:
        try:
            return httpx.get(self.url.replace("/v1", "/health"), timeout=LIMIT).status_code
        except httpx.HTTPError:
            return 0


@pytest.fixture
def processes(folder: Path) -> Iterator[Any]:
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(Process(folder, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.client.close()
        one.program.kill()
        one.program.wait(LIMIT)
        assert one.program.stdout is not None
        one.program.stdout.close()


@pytest.mark.slow
def test_clients_at_once_one_that_leaves_and_memory(processes: Any) -> None:
    server = processes()
    more: Any = {"model": "one", "prompt": PROMPT, "max_tokens": 16, "extra_body": {"ignore_eos": True}}

    def text(_: int) -> str:
        return server.client.completions.create(**more).choices[0].text

    alone = text(0)
    assert "".join(part.choices[0].text for part in server.stream(16)) == alone
    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(text, range(32))) == {alone}
        with server.stream(30_000) as leaving:
            next(iter(leaving))
        until(lambda: "finish gone" in server.log.read_text(), "the end of the stream nobody reads")
        process = psutil.Process(server.program.pid)
        before = process.memory_info().rss
        list(pool.map(text, range(200)))
    grown = process.memory_info().rss - before
    assert grown < 64 << 20, f"{grown >> 20} MiB"
    log = server.log.read_text()
    assert "model one prompt 4" in log
    assert alone not in log
    server.signal(signal.SIGINT)
    assert server.program.wait(LIMIT) == 0


@pytest.mark.slow
def test_a_signal_lets_running_requests_end(processes: Any) -> None:
    server = processes()
    running = iter(server.stream(400))
    parts = [next(running)]
    server.signal()
    until(lambda: server.status() == 503, "the refusal of new requests")
    with pytest.raises(openai.InternalServerError) as caught:
        server.stream(1)
    assert caught.value.status_code == 503
    parts += list(running)
    assert parts[-1].choices[0].finish_reason == "length"
    assert server.program.wait(LIMIT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False], ids=["second", "grace"])
def test_a_second_signal_or_the_end_of_grace_cuts_requests_off(again: bool, processes: Any) -> None:
    server = processes("--grace", "100000" if again else "1")
    running = iter(server.stream(30_000))
    next(running)
    server.signal()
    if again:
        until(lambda: server.status() == 503, "the refusal of new requests")
        server.signal()
    assert server.program.wait(LIMIT) == 1
    assert "Traceback" not in server.log.read_text()
    with pytest.raises((httpx.HTTPError, openai.APIError)):
        list(running)


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEADER_SECONDS", 0.2)
    access = Access(app=no_routes, key="", most=1)
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    thread = threading.Thread(target=serve, args=(access, listening, 1, lambda _: None))
    thread.start()
    try:
        with socket.create_connection(address, timeout=LIMIT) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: lo")
            assert slow.recv(1) == b""
        with socket.create_connection(address, timeout=LIMIT) as twice:  # a second request on one connection, too
            twice.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert twice.recv(1 << 16).startswith(b"HTTP/1.1 204")
            twice.sendall(b"GET /health HTTP/1.1\r\nHost: lo")
            assert twice.recv(1) == b""
    finally:
        access.draining = True
        thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_thread_that_renders_does_not_keep_the_server() -> None:
    began, free = threading.Event(), threading.Event()

    def render() -> None:
        began.set()
        free.wait(LIMIT)

    async def app(*_: Any) -> None:
        await asyncio.to_thread(render)

    access, listening = Access(app=app, key="", most=1), listen("127.0.0.1", 0)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(serve, access, listening, 0.1, lambda _: None)
        try:
            with socket.create_connection(listening.getsockname(), timeout=LIMIT) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
                assert began.wait(LIMIT)
                access.draining = True
                assert cut.result(LIMIT) == 1
                assert not free.is_set()
        finally:
            free.set()


async def no_routes(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("verb", [serve_verb, webui_verb])
def test_ports_end_at_65535(verb: Any) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    verb.add_arguments(parser)
    arguments = ["run"] if verb is serve_verb else []
    assert parser.parse_args([*arguments, "--port", "65535"]).port == 65535
    for text in ("65536", "99999", "-1"):
        with pytest.raises(argparse.ArgumentError):
            parser.parse_args([*arguments, f"--port={text}"])


@pytest.mark.slow
def test_an_address_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "halftune", "serve", str(folder), "--port", port]
        said = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=os.environ)
    assert said.returncode == 2
    assert "serve.cannot_listen" in said.stderr
