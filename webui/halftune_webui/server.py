"""Serves the board: no analytics, no share, one origin, a password where others can reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from halftune.core.errors import ConfigError
from halftune.core.startup import quick_imports
from halftune_webui.origin import SameOrigin
from halftune_webui.settings import Settings, check_address

# Gradio and huggingface_hub read these when they are imported.
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_SHARE": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
MAX_UPLOAD = "1mb"  # a recipe; data files are named by their path


def serve(
    settings: Settings,
    host: str,
    port: int,
    auth: tuple[str, str] | None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Listens until it is interrupted.

    Args:
        settings: limits of the board.
        host, port: where; port 0 takes a free one.
        auth: user and password; needed unless ``host`` is this machine alone.
        ready: told the address once connections are accepted.

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

        from halftune_webui.app import STYLES, build, theme

    port = listener.getsockname()[1]
    board = build(settings)
    app = mount_gradio_app(
        FastAPI(openapi_url=None),
        board,
        path="/",
        auth=auth,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        theme=theme(),
        css_paths=STYLES,
        show_error=True,
        max_file_size=MAX_UPLOAD,
    )
    config = uvicorn.Config(SameOrigin(app, host), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        remedy = "another --port" if "in use" in str(error) else "an address of this machine"
        raise ConfigError(f"cannot be listened on: {error.strerror}", where=f"{host}:{port}", remedy=remedy) from None
    return listener
