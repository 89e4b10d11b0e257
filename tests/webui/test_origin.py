"""Requests of other sites, rebound names and open addresses are refused."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from halftune.core.errors import ConfigError
from halftune.core.loopback import is_loopback
from halftune_webui.access.origin import SameOrigin
from halftune_webui.settings import check_address, read_auth


def answer(bound: str, method: str = "POST", kind: str = "http", signed_in: bool = True, **headers: str) -> int:
    """The status that a web UI ``bound`` to an address answers a request with these headers with."""
    sent: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    path = headers.pop("path", "/")
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "method": method, "path": path, "headers": raw}
    web_ui = SameOrigin(inner, bound, lambda scope: signed_in)
    # nothing in there waits; a loop of its own could not run in a thread where a browser's is at work
    with suppress(StopIteration):
        web_ui(scope, None, send).send(None)  # pyright: ignore
    if sent[0].get("status") == 200:
        assert dict(sent[0]["headers"])[b"x-frame-options"] == b"DENY"
    return sent[0].get("status") or sent[0]["code"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:7860"}, 200),
        ({"host": "localhost:7860", "origin": "http://localhost:7860", "sec_fetch_site": "same-origin"}, 200),
        ({"host": "[::1]:7860"}, 200),
        ({"host": "evil.example:7860"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost:7860", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:7860", "origin": "null"}, 403),
        ({"host": "localhost:7860", "origin": "http://localhost:9999"}, 403),
        ({"host": "localhost:7860", "sec_fetch_site": "cross-site"}, 403),
        ({"host": "localhost:7860", "sec_fetch_site": "same-site"}, 403),
        ({"host": "localhost:7860", "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}, 403),
        ({}, 403),
    ],
)
def test_posts_to_a_web_ui_on_this_machine(headers: dict[str, str], status: int) -> None:
    assert answer("127.0.0.1", **headers) == status


def test_a_link_from_elsewhere_may_open_the_page_and_nothing_else() -> None:
    visit = {"host": "localhost", "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert answer("127.0.0.1", "GET", **visit) == 200
    assert answer("127.0.0.1", "GET", **{**visit, "sec_fetch_mode": "no-cors"}) == 403
    assert answer("127.0.0.1", "GET", **visit, sec_fetch_dest="document") == 200
    assert answer("127.0.0.1", "GET", **visit, sec_fetch_dest="iframe") == 403  # nor to be clicked on through a frame


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/file=x",
        "/gradio_api//upload",
        "/proxy=http://x",
        "/gradio_api/vibe-edit",
        "/openapi.json",
    ],
)
def test_nothing_is_served_or_taken_beside_the_page(path: str) -> None:
    assert answer("127.0.0.1", "GET", host="localhost", path=path) == 403
    assert answer("127.0.0.1", "GET", host="localhost", path="/gradio_api/queue/data") == 200


def test_web_ui_for_others_answers_under_any_name_but_one_origin() -> None:
    assert answer("0.0.0.0", host="box.lan:7860", origin="http://box.lan:7860") == 200
    assert answer("0.0.0.0", host="box.lan:7860", origin="http://evil.example") == 403


def test_websockets_are_closed() -> None:
    assert answer("127.0.0.1", kind="websocket", host="evil.example") == 1008


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.5", "::", "box.lan", ""])
def test_open_address_needs_a_password(host: str) -> None:
    with pytest.raises(ConfigError, match="no password"):
        check_address(host, None)
    check_address(host, ("me", "long"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_needs_none(host: str) -> None:
    assert is_loopback(host)
    check_address(host, None)


@pytest.mark.parametrize("text", ["", "me", "me:", ":secret"])
def test_half_a_password_is_none(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_auth(text)
    assert "secret" not in str(refused.value)


def test_password_may_hold_colons() -> None:
    assert read_auth("me:a:b:long-one") == ("me", "a:b:long-one")


def test_command_refuses_before_gradio_is_imported() -> None:
    code = (
        "import sys\nfrom halftune.cli import main\n"
        "try:\n    main(['webui', '--host', '0.0.0.0'])\n"
        "except SystemExit as end:\n    print(end.code, 'gradio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 False"
    assert "--auth" in done.stderr


@pytest.mark.parametrize("path", ["/gradio_api/heartbeat/x", "/heartbeat/x", "//gradio_api//cancel"])
def test_what_gradio_leaves_open_needs_the_password(path: str) -> None:
    assert answer("0.0.0.0", "GET", host="b:1", path=path) == 200
    assert answer("0.0.0.0", "GET", signed_in=False, host="b:1", path=path) == 403
