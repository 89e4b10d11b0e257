"""Answers in OpenAI's form, whole and in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from halftune.serve.answers import Piece
from halftune.serve.engine import Engine, Served
from halftune.serve.requests import ChatRequest, CompletionRequest
from halftune.serve.sampling import Token


class Reply:
    """What a client gets for a request.

    Args:
        served: the model that answers.
        request: the request.
        prompt: its tokens.

    Attributes:
        made: tokens of the answer so far.
        finish: why it ended.
    """

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, served: Served, request: ChatRequest | CompletionRequest, prompt: list[int]) -> None:
        self.served, self.request, self.prompt = served, request, prompt
        self.made, self.finish = 0, ""
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}

    @property
    def _counts(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of prompt and answer."""
        made = self.made
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": made,
            "total_tokens": len(self.prompt) + made,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer as one object."""
        for piece in pieces:
            self._note(piece)
        choice = {"index": 0, **self._choice(pieces), "finish_reason": self.finish}
        if self.request.return_token_ids:
            choice |= {"token_ids": self._ids(pieces), "prompt_token_ids": self.prompt}
        return {**self._head, "object": self.kind, "choices": [choice], "usage": self.usage}

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The parts of a stream for a piece."""
        self._note(piece)
        for part in self._parts(piece):
            yield self._chunk([{"index": 0, "finish_reason": None, **part}])

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """What comes before the first piece."""
        yield from ()

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last part of a stream, if the client asked for it."""
        return {**self._chunk([]), "usage": self.usage} if self._counts else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        made = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**made, "usage": None} if self._counts else made

    def _note(self, piece: Piece) -> None:
        self.made += 0 if piece.echo else len(piece.tokens)
        self.finish = piece.finish

    def _ids(self, pieces: Sequence[Piece]) -> list[int]:
        return [token.id for piece in pieces if not piece.echo for token in piece.tokens]

    def _token(self, token: int) -> str:
        """A token's text; its number where the client asks for numbers, since texts are ambiguous."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return str(self.served.tokenizer.decode([token]))

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        raise NotImplementedError

    def _parts(self, piece: Piece) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class ChatReply(Reply):
    """Of ``/v1/chat/completions``; calls of tools are taken from the text where transformers knows their form."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, engine: Engine, served: Served, request: ChatRequest, prompt: list[int]) -> None:
        super().__init__(served, request, prompt)
        self._parser, self._calls = None, 0
        if request.offered:
            from transformers.cli.serving.utils import build_response_parser  # half a second that few requests need

            self._parser = build_response_parser(served.tokenizer, engine.shared.causal, prompt, request.offered)

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        yield self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for piece in pieces:
            for delta in self._deltas(piece):
                for key, value in delta.items():
                    message[key] = message.get(key, type(value)()) + value
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [{key: value for key, value in one.items() if key != "index"} for one in calls]
            message["content"] = message["content"] or None
        return {"message": message, "logprobs": self._logprobs([one for piece in pieces for one in piece.tokens])}

    def _parts(self, piece: Piece) -> Iterator[dict[str, Any]]:
        deltas = list(self._deltas(piece)) or [{}]
        for delta in deltas[:-1]:
            yield {"delta": delta}
        last = {"delta": deltas[-1], "finish_reason": self.finish or None, "logprobs": self._logprobs(piece.tokens)}
        yield last | ({"token_ids": self._ids([piece])} if self.request.return_token_ids else {})

    def _deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """What a piece adds to the message: text, reasoning, calls."""
        if self._parser is None:
            if piece.text:
                yield {"content": piece.text}
            return
        from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

        events = self._parser.feed(piece.text) + (self._parser.finalize()[1] if piece.finish else [])
        for one in response_events_to_chunks(events):
            if isinstance(one, ToolCall):
                yield {"tool_calls": [self._call(one.name, one.arguments)]}
            else:
                yield {"reasoning_content" if isinstance(one, ReasoningText) else "content": str(one)}
        if piece.finish == "stop" and self._calls:
            self.finish = "tool_calls"

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        function, number = {"name": name, "arguments": arguments}, self._calls
        self._calls += 1
        return {"index": number, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.request.top is None:
            return None
        return {"content": [self._entry(one.id, one.logprob, one.top) for one in tokens]}

    def _entry(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] | None) -> dict[str, Any]:
        text = self._token(token)
        made: dict[str, Any] = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        return made if top is None else made | {"top_logprobs": [self._entry(*one, None) for one in top]}


class CompletionReply(Reply):
    """Of ``/v1/completions``."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, engine: Engine, served: Served, request: CompletionRequest, prompt: list[int]) -> None:
        super().__init__(served, request, prompt)
        self._offset = 0

    def _choice(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        tokens = [one for piece in pieces for one in piece.tokens]
        return {"text": "".join(piece.text for piece in pieces), "logprobs": self._logprobs(tokens)}

    def _parts(self, piece: Piece) -> Iterator[dict[str, Any]]:
        made = {"text": piece.text, "logprobs": self._logprobs(piece.tokens), "finish_reason": self.finish or None}
        yield made | ({"token_ids": self._ids([piece])} if self.request.return_token_ids else {})

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.request.top is None:
            return None
        texts, offsets = [self._token(one.id) for one in tokens], []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        top = [
            {self._token(token): value for token, value in ((one.id, one.logprob), *one.top)} if one.top else None
            for one in tokens
        ]
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def event(data: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
