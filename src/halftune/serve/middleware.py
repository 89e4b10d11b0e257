"""In front of the routes: keys, limits of requests at a time, draining, one log line for each request."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halftune.core.log import get_logger
from halftune.core.loopback import is_loopback
from halftune.serve.requests import ApiError

log = get_logger(__name__)
_OPEN = ("/health",)  # paths that need no key
_AGAIN = 1  # seconds after which a client may try again
FACTS = "halftune"  # in a request's scope: what is logged about it


@dataclass
class Access:
    """The application behind limits of access.

    Attributes:
        app: the routes.
        key: what clients must send as ``Authorization: Bearer KEY``; empty: nothing.
        most: requests at the same time, running or waiting.
        draining: whether new requests are refused, since the server is about to end.
        inside: requests that run or wait.
    """

    app: ASGIApp
    key: str = field(repr=False)
    most: int
    draining: bool = False
    inside: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer why not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, facts = time.perf_counter(), scope.setdefault(FACTS, {})

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
            await send(message)

        try:
            await self._let_in(scope, receive, noting)
        finally:
            shown = " ".join(f"{name} {value}" for name, value in facts.items())
            log.info("%s %s · %s · %.2f s", scope["method"], scope["path"], shown, time.perf_counter() - began)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        counted = scope["method"] == "POST"
        self.inside += counted
        try:
            await self.app(scope, receive, send)
        finally:
            self.inside -= counted

    def _check(self, scope: Scope) -> None:
        """Raises ApiError: the key is wrong, the server drains, or it has as many requests as it may."""
        headers = Request(scope).headers
        if not self.key and not is_loopback(urlsplit(f"//{headers.get('host', '')}").hostname or ""):
            # a page of another site may have this machine's address by a name of its own (DNS rebinding)
            raise ApiError(403, "without a key, this server answers for localhost only", "wrong_host")
        if self.key and scope["path"] not in _OPEN:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
                raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")
        if self.draining:
            raise ApiError(503, "the server is shutting down", "shutting_down", retry_after=_AGAIN)
        if scope["method"] == "POST" and self.inside >= self.most:
            message = f"{self.inside} requests are running or waiting, as many as this server takes"
            raise ApiError(429, message, "too_many_requests", retry_after=_AGAIN)


def error_response(error: ApiError) -> JSONResponse:
    """The answer to a refused request."""
    headers: dict[str, Any] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413, 503):
        headers["Connection"] = "close"
    return JSONResponse(error.body, error.status, headers)
