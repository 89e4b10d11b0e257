"""Refuses what another web site asks of the web UI, also by a name that it points here (DNS rebinding)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from halftune.core.loopback import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
# Of Gradio, and of no use to this page: files of the machine, uploads, requests to other servers on the page's behalf,
# recordings, lists of what there is, and the changing of a running page's program.
_NAMES = (
    *("file", "upload", "proxy", "component_server", "stream", "custom_component", "deep_link", "run_history"),
    *("openapi", "process_recording", "monitoring", "mcp", "dev/", "vibe", "undo-vibe"),
)
_CLOSED = tuple(f"/{name}" for name in _NAMES)
# Answered without a look at the password. A heartbeat keeps its connection open as long as the caller likes; the last
# name is that of the web UI's own addresses.
_SIGNED_IN = tuple(f"/{name}" for name in ("heartbeat", "cancel", "reset", "token", "app_id", "halftune"))
# Nothing from outside, also where a text slips through as markup; and no other site shows the web UI in a frame.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'; base-uri 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def _headers(scope: Scope) -> dict[bytes, list[str]]:
    """The values of each header, by its name in lower case."""
    headers: dict[bytes, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), []).append(value.decode("latin-1"))
    return headers


def _is_foreign(scope: Scope, headers: dict[bytes, list[str]], host: str) -> bool:
    """Whether the request comes from a page of another site, and is more than a plain visit."""
    if any(urlsplit(origin).netloc.lower() != host.lower() for origin in headers.get(b"origin", [])):
        return True
    visit = scope.get("method") in ("GET", "HEAD") and headers.get(b"sec-fetch-mode") == ["navigate"]
    visit = visit and headers.get(b"sec-fetch-dest", ["document"]) == ["document"]  # and in no frame of that site
    return headers.get(b"sec-fetch-site", ["none"]) not in (["same-origin"], ["none"]) and not visit


class SameOrigin:
    """ASGI layer in front of the whole web UI.

    A page of another site can send requests to an address of this machine, and one whose name was re-pointed to it can
    even read the answers. So the ``Host`` must be the web UI's own (behind a password any name may stand there, since a
    rebound name has no cookie), ``Origin`` must be that host, and what the browser marks as cross-site is refused
    unless it is a plain visit of the page.

    Args:
        app: the web UI.
        host: the address that it listens on.
        signed_in: whether a request comes from somebody who gave the password; always true where there is none.
    """

    def __init__(self, app: Application, host: str, signed_in: Callable[[Scope], bool] = lambda scope: True) -> None:
        self._app = app
        self._local = is_loopback(host)
        self._signed_in = signed_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 403."""
        if scope["type"] not in ("http", "websocket") or not (reason := self._objection(scope)):
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refuse(send, 403, reason)

    def _objection(self, scope: Scope) -> str:
        """Why the request is refused; empty where it is not."""
        headers = _headers(scope)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or (self._local and not is_loopback(_name(hosts[0]))):
            return "halftune: this web UI is not served under that name"
        if _is_foreign(scope, headers, hosts[0]):
            return "halftune: refused, the request comes from another site"
        path = re.sub(r"/{2,}", "/", scope.get("path", "")).removeprefix("/gradio_api")
        if path.startswith(_CLOSED):
            return "halftune: this web UI has nothing there"
        if path.startswith(_SIGNED_IN) and not self._signed_in(scope):
            return "halftune: sign in first"
        return ""


async def refuse(send: Send, status: int, reason: str, *headers: tuple[bytes, bytes]) -> None:
    """Answers a request without a look at its body, and closes its connection."""
    plain = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": plain})
    await send({"type": "http.response.body", "body": reason.encode()})


def _with_headers(send: Send) -> Send:
    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await send(message)

    return sent


def _name(host: str) -> str:
    """The host without its port."""
    return urlsplit(f"//{host}").hostname or ""
