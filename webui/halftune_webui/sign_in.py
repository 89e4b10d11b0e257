"""The page that asks for the password: the board's own, since Gradio's empties its fields and says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from importlib.resources import files

from halftune_webui.labels import Words
from halftune_webui.origin import Application, Receive, Scope, Send


def sign_in_page(words: Words) -> str:
    """The whole page, in the board's language."""
    page = files("halftune_webui").joinpath("assets", "sign_in.html").read_text(encoding="utf-8")
    texts = {"language": words.language, "title": words("board.title"), "tagline": words("board.tagline")}
    texts |= {name: words(f"sign_in.{name}") for name in ("user", "password", "sign_in")}
    for name, text in texts.items():
        page = page.replace(f"{{{name}}}", escape(text))
    return page.replace("{words}", json.dumps(words.below("sign_in")))


class SignIn:
    """ASGI layer that shows the sign-in page instead of the board to whoever has not given the password.

    Args:
        app: the board.
        signed_in: whether a request comes from somebody who has.
        words: the labels.
    """

    def __init__(self, app: Application, signed_in: Callable[[Scope], bool], words: Words) -> None:
        self._app, self._signed_in, self._page = app, signed_in, sign_in_page(words).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers with the page."""
        visit = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if not visit or self._signed_in(scope):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._page if scope["method"] == "GET" else b""})
