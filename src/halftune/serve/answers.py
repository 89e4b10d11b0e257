"""From a request to the pieces of its answer: the prompt's tokens, room in the context, text as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from halftune.core.errors import HalftuneError
from halftune.model.generate import conversation_inputs
from halftune.model.message_parts import read_content
from halftune.serve.engine import Engine, Served
from halftune.serve.requests import ApiError, ChatRequest, CompletionRequest, read_messages
from halftune.serve.sampling import End, Job, Token
from halftune.serve.text import TextStream

Inputs = tuple[list[int], dict[str, torch.Tensor]]


class Piece(NamedTuple):
    """A part of an answer.

    Attributes:
        text: what is sent.
        tokens: from which it came.
        finish: why the answer ends here, ``stop`` or ``length``; empty if it goes on.
        echo: whether it repeats the prompt.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish: str = ""
    echo: bool = False


def find_model(engine: Engine, name: str) -> Served:
    """The model of a name.

    Raises:
        ApiError: there is none.
    """
    if name not in engine.models:
        known = ", ".join(engine.models)
        raise ApiError(404, f"no model {name!r} here; there are: {known}", "model_not_found", "model")
    return engine.models[name]


def prompt_of(engine: Engine, served: Served, request: ChatRequest | CompletionRequest) -> Inputs:
    """A prompt's tokens, and the model's inputs for its images.

    Raises:
        ApiError: the template refuses the messages, or the prompt has no tokens or unknown ones.
    """
    try:
        if isinstance(request, ChatRequest):
            return _conversation(engine, served, request)
        ids = request.prompt
        if isinstance(ids, str):
            found = served.tokenizer(ids, add_special_tokens=request.add_special_tokens)["input_ids"]
            ids = list(found)  # pyright: ignore[reportArgumentType]
    except HalftuneError as error:
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise ApiError(400, error.what, error.code, param) from error
    if not ids:
        raise ApiError(400, "the prompt has no tokens", "infer.no_prompt", "prompt")
    vocabulary = engine.shared.causal.config.get_text_config().vocab_size
    if max(ids) >= vocabulary:  # would end the engine's thread, on a GPU the process
        raise ApiError(400, f"token {max(ids)} is none of {vocabulary:,}", "model.token_without_embedding", "prompt")
    return ids, {}


def _conversation(engine: Engine, served: Served, request: ChatRequest) -> Inputs:
    developer = "developer" if "developer" in str(served.tokenizer.chat_template) else "system"
    read = read_messages(request.messages, developer=developer)
    messages = [{**one, "content": read_content(one["content"], engine.media)} for one in read]
    variables: dict[str, Any] = {
        **served.run.loaded.run.model.chat_template_kwargs,
        **(request.chat_template_kwargs or {}),
    }
    if request.offered:
        variables["tools"] = request.offered
    causal = engine.shared.causal
    prompt_1T, inputs = conversation_inputs(causal, served.tokenizer, messages, variables, engine.images, causal.device)
    return prompt_1T[0].tolist(), inputs


def room_for(engine: Engine, served: Served, request: ChatRequest | CompletionRequest, length: int) -> int:
    """Tokens that the answer to a prompt of ``length`` tokens may have.

    Raises:
        ApiError: prompt and answer are longer than the limit.
    """
    room, wanted = engine.max_tokens - length, request.most
    if room < (1 if wanted is None else wanted):
        asked = "" if wanted is None else f" and the answer may have {wanted:,}"
        message = f"the prompt has {length:,} tokens{asked}; both together may have {engine.max_tokens:,}"
        raise ApiError(400, message, "context_length_exceeded", request.limited_by)
    return min(served.run.loaded.run.generation.max_new_tokens, room) if wanted is None else wanted


async def answer(
    engine: Engine, served: Served, request: ChatRequest | CompletionRequest, inputs: Inputs, room: int
) -> AsyncIterator[Piece]:
    """The pieces of an answer as they come; the last one has a ``finish``. Closing it stops the generation.

    Raises:
        ApiError: the engine failed.
    """
    ids, seen = inputs
    if isinstance(request, CompletionRequest) and request.echo:
        yield await asyncio.to_thread(_echo, engine, served, request, ids)
    if not room:
        yield Piece("", finish="length")
        return
    queue: asyncio.Queue[Token | End] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emit(item: Token | End) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(queue.put_nowait, item)

    ends = (frozenset() if request.ignore_eos else served.ends) | set(request.stop_token_ids or ())
    settings = request.settings(served.run.loaded.run.generation)
    job = Job(ids, room, ends, settings, emit, request.top, request.seed, seen)
    served.lane.submit(job)
    try:
        async for piece in _pieces(served, request, job, queue):
            yield piece
    finally:
        served.lane.release(job)


async def _pieces(
    served: Served, request: ChatRequest | CompletionRequest, job: Job, queue: asyncio.Queue[Token | End]
) -> AsyncIterator[Piece]:
    chat = isinstance(request, ChatRequest)
    raw = chat and bool(request.offered)  # calls are found by special tokens
    skip = request.skip_special_tokens and not raw
    text = TextStream(served.tokenizer, request.stops(), skip_special=skip, strip=chat and not raw)
    waiting: list[Token] = []
    last = -1
    while not isinstance(item := await queue.get(), End):
        waiting.append(item)
        last, new = item.id, text.add(item.id)
        if text.stopped:
            yield Piece(new, tuple(waiting), "stop")
            return
        if new:
            yield Piece(new, tuple(waiting))
            waiting = []
    if item.error:
        raise ApiError(500, item.error, "generation_failed")
    yield Piece(text.end(), tuple(waiting), "stop" if last in job.ends else "length")


def _echo(engine: Engine, served: Served, request: CompletionRequest, ids: list[int]) -> Piece:
    text = request.prompt if isinstance(request.prompt, str) else str(served.tokenizer.decode(ids))
    if request.top is None:
        return Piece(text, tuple(map(Token, ids)), echo=True)
    return Piece(text, tuple(engine.shared.read(ids, served.adapter, request.top)), echo=True)
