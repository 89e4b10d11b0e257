"""Before the password: no body is read but a short sign-in form, and wrong passwords slow their sender down."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from halftune.core.errors import ConfigError
from halftune_webui.access.gate import FREE_TRIES, LONGEST, MAX_BODY, MAX_FORM, Gate
from halftune_webui.access.sign_in import SignIn
from halftune_webui.labels import load_words
from halftune_webui.settings import SHORTEST_PASSWORD, read_auth


class Inner:
    """Stands for Gradio: reads the whole body, answers ``status``."""

    def __init__(self) -> None:
        self.read, self.status = 0, 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            self.read += len(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Clock:
    """Seconds that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(gate: Gate, path: str = "/", size: int = 0, declared: bool = True, host: str = "10.0.0.1", **scope: Any) -> int:
    """The status of a request with a body of that size, sent in pieces of a kibibyte."""
    sent: list[dict[str, Any]] = []
    left = size

    async def receive() -> dict[str, Any]:
        nonlocal left
        piece = min(left, 1024)
        left -= piece
        return {"type": "http.request", "body": b"x" * piece, "more_body": left > 0}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-length", str(size).encode())] if declared else []
    whole = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": (host, 1), **scope}
    with ThreadPoolExecutor(1) as pool:  # a browser's loop may run in this thread
        pool.submit(lambda: asyncio.run(gate(whole, receive, send))).result()
    assert len([message for message in sent if message["type"] == "http.response.start"]) == 1
    return sent[0]["status"]


@pytest.mark.parametrize("declared", [True, False], ids=["by its header", "counted"])
def test_without_the_password_no_body_is_read(declared: bool) -> None:
    inner = Inner()
    gate = Gate(inner, lambda scope: False)
    assert ask(gate, "/gradio_api/queue/join", 60 * 2**20, declared) == 401
    assert ask(gate, "/login", MAX_FORM + 2048, declared) == 413
    assert inner.read <= MAX_FORM
    assert ask(gate, "/", 0, declared, method="GET") == 200


@pytest.mark.parametrize("declared", [True, False], ids=["by its header", "counted"])
def test_bodies_have_a_limit_of_their_path(declared: bool) -> None:
    inner = Inner()
    gate = Gate(inner, None, {"/large/": 3 * MAX_BODY})
    assert ask(gate, "/small", MAX_BODY, declared) == 200
    assert ask(gate, "/small", MAX_BODY + 1024, declared) == 413
    assert ask(gate, "/large/x", 2 * MAX_BODY, declared) == 200
    assert ask(gate, "/large/x", 4 * MAX_BODY, declared) == 413
    assert inner.read <= (1 + 1 + 2 + 3) * MAX_BODY


@pytest.mark.parametrize("length", [b"-1", b"x", b"1e3"])
def test_a_length_that_is_no_number_is_refused(length: bytes) -> None:
    assert ask(Gate(Inner(), None), headers=[(b"content-length", length)]) == 413


def test_wrong_passwords_wait_longer_and_longer(caplog: pytest.LogCaptureFixture) -> None:
    inner, clock = Inner(), Clock()
    gate = Gate(inner, lambda scope: False, clock=clock)
    inner.status = 400
    with caplog.at_level(logging.WARNING):
        assert [ask(gate, "/login", 20) for _ in range(FREE_TRIES)] == [400] * FREE_TRIES
    assert len([record for record in caplog.records if "10.0.0.1" in record.getMessage()]) == FREE_TRIES
    assert ask(gate, "/login", 20) == 400
    pauses = []
    for _ in range(12):
        began = clock.now
        while ask(gate, "/login", 20) == 429:
            clock.now += 1
        pauses.append(clock.now - began)
    assert pauses == sorted(pauses)
    assert pauses[0] == 2
    assert pauses[-1] == LONGEST
    inner.status = 200
    assert ask(gate, "/login", 20) == 429  # the right one waits, too
    assert ask(gate, "/login", 20, host="10.0.0.2") == 200  # nobody else does
    clock.now += LONGEST
    assert ask(gate, "/login", 20) == 200
    inner.status = 400
    assert ask(gate, "/login", 20) == 400  # and all is forgotten
    assert ask(gate, "/login", 20) == 400


def test_a_network_of_ipv6_counts_as_one() -> None:
    inner = Inner()
    inner.status, gate = 400, Gate(inner, lambda scope: False, clock=Clock())
    found = [ask(gate, "/login", 20, host=f"2001:db8:1:2::{number:x}") for number in range(FREE_TRIES + 2)]
    assert found[-1] == 429
    assert ask(gate, "/login", 20, host="2001:db8:1:3::1") == 400


@pytest.mark.parametrize("password", ["a", "x" * (SHORTEST_PASSWORD - 1)])
def test_short_passwords_are_refused(password: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_auth(f"me:{password}")
    assert str(SHORTEST_PASSWORD) in str(refused.value)


@pytest.mark.parametrize(
    ("method", "path", "signed_in", "page"),
    [
        ("GET", "/", False, b"password"),
        ("HEAD", "/", False, b""),
        ("GET", "/", True, None),
        ("POST", "/login", False, None),
        ("GET", "/theme.css", False, None),
    ],
)
def test_who_has_not_signed_in_gets_the_page_that_asks(
    method: str, path: str, signed_in: bool, page: bytes | None
) -> None:
    """Instead of the web UI, and instead of nothing else: the Gate guards all other addresses."""
    passed, sent = list[str](), list[dict[str, Any]]()

    async def inner(scope: Any, _receive: Any, _send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    sign_in = SignIn(inner, lambda _: signed_in, load_words("en"))
    with ThreadPoolExecutor(1) as pool:  # a browser test may have left a loop in this thread
        pool.submit(asyncio.run, sign_in({"type": "http", "method": method, "path": path}, receive, send)).result()
    if page is None:
        assert (passed, sent) == ([path], [])
    else:
        assert (passed, [message.get("status") for message in sent]) == ([], [200, None])
        assert page in sent[1]["body"]
        assert bool(page) == bool(sent[1]["body"])
