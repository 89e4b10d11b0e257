"""Serves the web UI: no analytics, no share, one origin, a password where others can reach it."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.core.optional import quick_imports
from halftune_webui import files
from halftune_webui.access.gate import Gate
from halftune_webui.access.origin import SameOrigin, Scope
from halftune_webui.access.sign_in import SignIn
from halftune_webui.labels import load_words
from halftune_webui.settings import Settings, check_address

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request
    from gradio.routes import App

log = get_logger(__name__)
# Gradio and huggingface_hub read these when they are imported.
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_SHARE": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
POLL = 0.2  # seconds between two looks of Gradio at its queue: its own 0.05 cost a web UI that nobody uses CPU time
# Every address of this machine, which no browser can open → one that this machine's browser can.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve(
    settings: Settings,
    host: str,
    port: int,
    auth: tuple[str, str] | None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Listens until it is interrupted.

    Args:
        settings: limits of the web UI.
        host, port: where; port 0 takes a free one.
        auth: user and password; needed unless ``host`` is this machine alone.
        ready: told an address that can be opened here, once connections are accepted.

    Raises:
        ConfigError: the address is open to others and has no password, or cannot be listened on.
    """
    check_address(host, auth)
    os.environ.update(QUIET)
    listener = _listen(host, port)
    with quick_imports():
        import uvicorn
        from fastapi import FastAPI
        from gradio import mount_gradio_app

        from halftune_webui.app import STYLES, build, script, theme

    port = listener.getsockname()[1]
    blocks = build(settings, sign_out=auth is not None)
    outer = FastAPI(openapi_url=None)
    files.add_routes(outer, settings)
    mount_gradio_app(
        outer,
        blocks,
        path="/",
        auth=auth,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        theme=theme(),
        css_paths=STYLES,
        js=script(settings.language),
        show_error=True,
    )
    mounted = _mounted(outer)
    _refuse_unknown(mounted)
    signed_in = _signed_in(mounted) if auth else None
    page = SignIn(outer, signed_in, load_words(settings.language)) if signed_in else outer
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = POLL
    guarded = SameOrigin(Gate(page, signed_in, files.LARGE), host, signed_in or (lambda scope: True))
    config = uvicorn.Config(guarded, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    shown = _EVERY.get(host, host)
    _run(config, listener, lambda: ready(f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"))


def _run(config: uvicorn.Config, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serves until it is stopped; ``ready`` is called when it can be: whoever hears of it may stop it at once."""
    import uvicorn

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # open pages are cut: each would be an error
            await super().shutdown(sockets=sockets)

    Announced(config).run(sockets=[listener])


def _mounted(outer: FastAPI) -> App:
    """Gradio's own application."""
    from gradio.routes import App
    from starlette.routing import Mount

    mounted = (route.app for route in outer.routes if isinstance(route, Mount))
    return next(app for app in mounted if isinstance(app, App))


def _signed_in(blocks: App) -> Callable[[Scope], bool]:
    """Whether a request carries a cookie that the mounted web UI gave for the password."""
    from starlette.requests import HTTPConnection

    def known(scope: Scope) -> bool:
        cookies = HTTPConnection(scope).cookies
        names = (f"access-token-{kind}{blocks.cookie_id}" for kind in ("", "unsecure-"))
        return any(cookies.get(name) in blocks.tokens for name in names)

    return known


def _refuse_unknown(blocks: App) -> None:
    """Answers calls of functions that the web UI has not; the errors of those that it has come another way."""
    from gradio.route_utils import FnIndexInferError
    from starlette.responses import PlainTextResponse

    def answer(request: Request, error: Exception) -> PlainTextResponse:
        log.warning("refused a call of a function that this web UI has not: %s", str(error)[:200])
        return PlainTextResponse("halftune: this web UI has no such function", 404)

    blocks.add_exception_handler(KeyError, answer)
    blocks.add_exception_handler(FnIndexInferError, answer)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        remedy = "another --port" if error.errno == errno.EADDRINUSE else "an address of this machine"
        what = f"cannot be listened on: {error.strerror}"
        raise ConfigError(what, where=f"{host}:{port}", remedy=remedy, code="webui.cannot_listen") from None
    return listener
