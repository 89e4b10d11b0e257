"""Listens until a signal: the first one drains, the second one ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.serve.middleware import Access

log = get_logger(__name__)
_HEADER_SECONDS = 15
_KEEP_ALIVE_SECONDS = 15
_POLL = 0.05  # seconds


class _Protocol(H11Protocol):
    """Closes connections on which a request's header does not arrive in time."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting and self._due is not None:
            self._due.cancel()
            self._due = None
        elif waiting and self._due is None:
            self._due = self.loop.call_later(_HEADER_SECONDS, self._close)

    def _close(self) -> None:
        self._due = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


class _Threads(ThreadPoolExecutor):
    """Of the application's loop, which waits for its threads at its end; a template may run for hours."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class Server(uvicorn.Server):
    """A server that drains.

    Args:
        config: uvicorn's.
        access: refuses new requests while running ones end.
        grace: seconds that running requests may take.

    Attributes:
        cut_off: running requests that were not waited for.
    """

    def __init__(self, config: uvicorn.Config, access: Access, grace: float) -> None:
        super().__init__(config)
        self.access, self.grace, self.cut_off = access, grace, 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGTERM and SIGINT."""
        if self.access.draining:
            self.cut_off, self.force_exit, self.should_exit = self.access.inside, True, True
            return
        self.access.draining = True
        log.info("shutting down: %d requests may take %g s", self.access.inside, self.grace)

    async def main_loop(self) -> None:
        """Serve, then wait for running requests."""
        asyncio.get_running_loop().set_default_executor(_Threads())
        serving = asyncio.ensure_future(super().main_loop())
        while not self.access.draining and not serving.done():
            await asyncio.sleep(_POLL)
        end = asyncio.get_running_loop().time() + self.grace
        while self.access.inside and not self.should_exit and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL)
        self.cut_off = self.access.inside
        if self.cut_off:
            log.warning("cut off: %d requests", self.cut_off)
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it has a traceback for each of them
        self.should_exit = True
        self.force_exit = self.force_exit or bool(self.cut_off)
        await serving


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ConfigError(what, where="--port", remedy="choose another --port", code="serve.cannot_listen") from error


def serve(access: Access, listening: socket.socket, grace: float, ready: Callable[[str], None]) -> int:
    """Serve until a signal.

    Args:
        access: the application.
        listening: the socket.
        grace: seconds that running requests may take after the first signal.
        ready: called with the address once requests are answered.

    Returns:
        The number of requests that were cut off. Their threads may go on, and would keep the interpreter.
    """
    config = uvicorn.Config(
        access,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    server = Server(config, access, grace)
    host, port = listening.getsockname()[:2]
    ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    server.run(sockets=[listening])
    return server.cut_off
