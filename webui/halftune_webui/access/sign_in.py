"""The page that asks for the password: the web UI's own, since Gradio's empties its fields and says nothing."""

from __future__ import annotations

from collections.abc import Callable

from halftune_webui.access.origin import Application, Receive, Scope, Send
from halftune_webui.html import render
from halftune_webui.labels import Words


class SignIn:
    """ASGI layer that shows the sign-in page instead of the web UI until the password was given.

    Args:
        app: the web UI.
        signed_in: whether a request is authenticated.
        words: the labels.
    """

    def __init__(self, app: Application, signed_in: Callable[[Scope], bool], words: Words) -> None:
        self._app, self._signed_in, self._page = app, signed_in, render("sign_in", words=words).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers with the page."""
        visit = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if not visit or self._signed_in(scope):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._page if scope["method"] == "GET" else b""})
