"""Limits before the password: how much of a request is read, and how fast passwords can be tried."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from typing import Any

from halftune.core.log import get_logger
from halftune_webui.access.origin import Application, Receive, Scope, Send, refuse

log = get_logger(__name__)
MAX_BODY = 16 * 2**20  # bytes of a request: a chat sends all images and sounds of its messages with each question
MAX_FORM = 8192  # bytes of the sign-in form
FREE_TRIES, LONGEST = 5, 300.0  # wrong passwords without a pause; seconds of the longest pause
_REMEMBERED = 10_000  # addresses


class Gate:
    """ASGI layer that counts bodies and wrong passwords.

    A request without the password may carry no body but the sign-in form. After ``FREE_TRIES`` wrong passwords an
    address (of IPv6: a /64 network) waits 2, 4, 8 … seconds, at most ``LONGEST``.

    Args:
        app: what the request is passed on to.
        signed_in: whether a request comes from somebody who gave the password; None where there is none.
        large: path prefix → bytes, where a request may carry more than ``MAX_BODY``.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        app: Application,
        signed_in: Callable[[Scope], bool] | None,
        large: dict[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._signed_in, self._large, self._clock = app, signed_in, large or {}, clock
        self._wrong: dict[str, tuple[int, float]] = {}  # address → wrong tries, and when the next one may come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401, 413 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._signed_in is None or self._signed_in(scope):
            limits = (most for prefix, most in self._large.items() if scope["path"].startswith(prefix))
            await self._limited(scope, receive, send, next(limits, MAX_BODY), 413)
        elif scope["method"] == "POST" and scope["path"].rstrip("/") == "/login":
            await self._sign_in(scope, receive, send)
        else:
            await self._limited(scope, receive, send, 0, 401)

    async def _limited(self, scope: Scope, receive: Receive, send: Send, most: int, status: int) -> None:
        """Passes on at most ``most`` bytes; answers ``status`` where there are more."""
        reason = "halftune: sign in first" if status == 401 else f"halftune: more than {most:,} bytes"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > most:
            await refuse(send, status, reason)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            return {"type": "http.disconnect"} if seen > most else message

        async def sent(message: Any) -> None:
            if seen <= most:
                await send(message)

        await self._app(scope, counted, sent)
        if seen > most:
            await refuse(send, status, reason)

    async def _sign_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, now = _network(scope), self._clock()
        tries, until = self._wrong.get(address, (0, 0.0))
        if now < until:
            wait = str(int(until - now) + 1).encode()
            await refuse(send, 429, "halftune: too many wrong passwords, try again later", (b"retry-after", wait))
            return
        if len(self._wrong) >= _REMEMBERED:
            self._wrong.pop(next(iter(self._wrong)))
        tries += 1  # counted before the answer: tries at the same time count, too
        pause = min(LONGEST, 2.0 ** (tries - FREE_TRIES)) if tries > FREE_TRIES else 0.0
        self._wrong[address] = tries, now + pause

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 200:
                    self._wrong.pop(address, None)
                else:
                    log.warning("sign-in refused for %s: wrong try %d, next in %.0f s", address, tries, pause)
            await send(message)

        await self._limited(scope, receive, sent, MAX_FORM, 413)


def _network(scope: Scope) -> str:
    """Whom tries are counted for: a host has one IPv4 address, and as many of a /64 as it likes."""
    host = (scope.get("client") or ("unknown", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))
