"""Chat for programs: JSON lines, requests on standard input and events on standard output.

In: ``{"id": 1, "messages": [{"role": "user", "content": "…"}], "adapter": true, "generation": {"temperature": 0.7}}``;
``content`` may be a list of parts: ``{"type": "text", "text": "…"}`` and, of a model trained on images,
``{"type": "image_url", "image_url": {"url": "data:…"}}``, of one trained on videos the same with ``video_url``, of one
trained on audio ``{"type": "input_audio", "input_audio": {"data": "<base64>"}}``; files and addresses are refused.
``{"stop": true}`` stops the current answer. After the end of input, pending requests are answered, then the chat exits.

Out: ``{"event": "ready", …}`` once; then for each request ``{"event": "text", "id": 1, "text": "…"}`` per piece, and
``{"event": "end", "id": 1, "answer": "…", "stopped": false, "seconds": 1.2, "tokens": 9}`` or ``{"event": "error",
"id": 1, "message": "…"}``. ``tokens`` is the number of tokens in the answer.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import Any, TextIO

from pydantic import ValidationError

from halftune.config.sections.training import GenerationSection
from halftune.core.errors import HalftuneError, ModelError
from halftune.infer.session import ChatSession
from halftune.model.message_parts import read_content

Request = dict[str, Any]


class _Stopped(Exception):
    """The current answer was stopped by a request."""


def serve(session: ChatSession, requests: TextIO, events: TextIO) -> None:
    """Answer requests until the end of input."""
    waiting: queue.Queue[Request | None] = queue.Queue()
    stop = threading.Event()
    threading.Thread(target=_read, args=(requests, waiting, stop), daemon=True).start()
    precision, own = session.run.plan.precision, session.generation
    kinds = session.images.settings.kinds if session.images is not None else ()
    ready = {
        "base": session.run.loaded.run.model.name_or_path,
        "adapter": session.run.is_adapter,
        "compute": precision.compute.value,
        "storage": precision.storage.value,
        "device": session.run.plan.device.value,
        "generation": own.model_dump(),
        "images": "image" in kinds,
        "videos": "video" in kinds,
        "audio": "audio" in kinds,
    }
    _emit(events, event="ready", **ready)
    while (request := waiting.get()) is not None:
        try:
            _answer(session, own, request, stop, events)
        except HalftuneError as error:
            _emit(events, event="error", id=request.get("id"), message=str(error), code=error.code)


def _read(requests: TextIO, waiting: queue.Queue[Request | None], stop: threading.Event) -> None:
    for line in requests:
        try:
            request = json.loads(line)
        except ValueError:
            request = {"broken": line[:200]}
        if isinstance(request, dict) and request.get("stop"):
            stop.set()
        elif line.strip():
            waiting.put(request if isinstance(request, dict) else {"broken": line[:200]})
    waiting.put(None)


def _answer(
    session: ChatSession, own: GenerationSection, request: Request, stop: threading.Event, events: TextIO
) -> None:
    number, said, began = request.get("id"), list[str](), time.perf_counter()
    stop.clear()
    messages = _messages(request, session)
    session.generation = _generation(own, request.get("generation") or {})

    def on_text(piece: str) -> None:
        if stop.is_set():
            raise _Stopped
        said.append(piece)
        _emit(events, event="text", id=number, text=piece)

    stopped = False
    try:
        answer = session.reply(messages, tuned=bool(request.get("adapter", True)), on_text=on_text)
    except _Stopped:
        answer, stopped = "".join(said), True
    seconds = round(time.perf_counter() - began, 3)
    tokens = len(session.tokenizer.encode(answer, add_special_tokens=False))
    _emit(events, event="end", id=number, answer=answer, stopped=stopped, seconds=seconds, tokens=tokens)


def _messages(request: Request, session: ChatSession) -> list[dict[str, Any]]:
    messages = request.get("messages")
    right = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str | list)
        for one in messages
    )
    if not messages or not right:
        raise _invalid("the request has no valid messages")
    return [{**one, "content": read_content(one["content"], session.media)} for one in messages]


def _invalid(what: str) -> ModelError:
    return ModelError(what, remedy='send {"messages": [{"role": "user", "content": "…"}]}', code="infer.bad_request")


def _generation(own: GenerationSection, changes: dict[str, Any]) -> GenerationSection:
    try:
        return GenerationSection.model_validate({**own.model_dump(), **changes})
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(("generation", *map(str, first["loc"])))
        raise ModelError(
            first["msg"], where=where, remedy="see `generation` in the configuration", code="infer.bad_request"
        ) from error


def _emit(events: TextIO, **values: Any) -> None:
    events.write(json.dumps(values, ensure_ascii=False) + "\n")
    events.flush()
