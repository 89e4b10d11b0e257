"""The routes: models, chat, completions, health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from halftune.core.log import get_logger
from halftune.serve.answers import Piece, answer, find_model, prompt_of, room_for
from halftune.serve.engine import Engine
from halftune.serve.middleware import FACTS, Access, error_response
from halftune.serve.requests import ApiError, ChatRequest, CompletionRequest, read_request
from halftune.serve.responses import ChatReply, CompletionReply, Reply, event

log = get_logger(__name__)
_SECONDS = 30  # for a body
_DISCARDED = 64  # times the limit of a body that are read, so that the client gets to read the answer
T = TypeVar("T")


def build_app(engine: Engine, *, key: str, body: int, queue: int) -> Access:
    """The application.

    Args:
        engine: answers.
        key: of clients; empty: none is needed.
        body: bytes of a request at most.
        queue: requests at the same time, running or waiting.
    """
    routes = _Routes(engine, body)
    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _failed},  # pyright: ignore
    )
    return Access(app, key, queue)


async def _refused(_: Request, error: ApiError) -> Response:
    return error_response(error)


async def _no_route(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, what, "no_such_route"))


async def _failed(_: Request, error: Exception) -> Response:
    log.error("%s: %s", type(error).__name__, error)
    return error_response(ApiError(500, "the server failed; its log says why", "internal_error"))


class _Routes:
    def __init__(self, engine: Engine, body: int) -> None:
        self.engine, self.body = engine, body

    async def health(self, _: Request) -> Response:
        """Whether requests would be answered."""
        if self.engine.alive:
            return JSONResponse({"status": "ok"})
        return error_response(ApiError(503, "the engine has stopped; restart the server", "engine_stopped"))

    async def models(self, _: Request) -> Response:
        """The models by name."""
        return JSONResponse({"object": "list", "data": [self._facts(name) for name in self.engine.models]})

    async def model(self, request: Request) -> Response:
        """One model."""
        return JSONResponse(self._facts(find_model(self.engine, request.path_params["name"]).name))

    def _facts(self, name: str) -> dict[str, Any]:
        limit = self.engine.max_tokens
        return {"id": name, "object": "model", "created": 0, "owned_by": "halftune", "max_model_len": limit}

    async def chat(self, request: Request) -> Response:
        """The answer to a conversation."""
        return await self._answer(request, read_request(ChatRequest, await self._read(request)))

    async def completions(self, request: Request) -> Response:
        """The continuation of a text."""
        return await self._answer(request, read_request(CompletionRequest, await self._read(request)))

    async def _read(self, request: Request) -> bytes:
        """The body of a request.

        Raises:
            ApiError: it is no JSON by its header, too large, or does not arrive.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # a page of a browser may send anything else to this machine without asking
            raise ApiError(415, "Content-Type is not application/json", "invalid_request")
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size <= self.body:
                        parts.append(part)
                    elif size > self.body * _DISCARDED:
                        break
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive in {_SECONDS} s", "body_timeout") from None
        if size > self.body:
            raise ApiError(413, f"the body has more than {self.body:,} bytes", "body_too_large")
        return b"".join(parts)

    async def _answer(self, request: Request, asked: ChatRequest | CompletionRequest) -> Response:
        engine, facts = self.engine, request.scope[FACTS]
        served = find_model(engine, asked.model)
        facts["model"] = served.name
        inputs = await asyncio.to_thread(prompt_of, engine, served, asked)
        facts["prompt"] = len(inputs[0])
        pieces = answer(engine, served, asked, inputs, room_for(engine, served, asked, len(inputs[0])))
        kind = ChatReply if isinstance(asked, ChatRequest) else CompletionReply
        reply: Reply = kind(engine, served, asked, inputs[0])  # pyright: ignore[reportArgumentType]
        if asked.stream:
            return StreamingResponse(_stream(reply, pieces, facts), media_type="text/event-stream")
        found = await _unless_gone(request, _all(pieces))
        if found is None:
            facts["gone"] = True
            return Response(status_code=499)  # nobody reads it
        whole = reply.whole(found)
        facts |= {"answer": reply.made, "finish": reply.finish}
        return JSONResponse(whole)


async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    async with aclosing(pieces):  # pyright: ignore[reportArgumentType]
        return [piece async for piece in pieces]


async def _stream(reply: Reply, pieces: AsyncIterator[Piece], facts: dict[str, Any]) -> AsyncIterator[bytes]:
    """The events of a stream; a client that goes away closes it."""
    try:
        async with aclosing(pieces):  # pyright: ignore[reportArgumentType]
            for chunk in reply.first_chunks():
                yield event(chunk)
            async for piece in pieces:
                for chunk in reply.chunks(piece):
                    yield event(chunk)
        if (usage := reply.usage_chunk()) is not None:
            yield event(usage)
        yield event("[DONE]")
    except ApiError as error:
        yield event(error.body)
    finally:
        facts |= {"answer": reply.made, "finish": reply.finish or "gone"}


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None if the client goes away before, which cancels it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)
