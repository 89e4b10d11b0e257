"""A server with OpenAI's API in front of plain transformers, with and without what servers may lack."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_LONGEST = 48


class _Model:
    """Greedy answers and log-probabilities, each computed once."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.answer, self.scores = cache(self.answer), cache(self.scores)  # type: ignore[method-assign]

    @torch.no_grad()
    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        made = self.model.generate(torch.tensor([prompt]), max_new_tokens=_LONGEST, do_sample=False, eos_token_id=None)
        return made[0, len(prompt) :].tolist()

    @torch.no_grad()
    def scores(self, ids: tuple[int, ...]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


model_of = cache(_Model)


class Served:
    """Answers as a server does.

    Args:
        folder: of the model.
        dtype: that it computes in.
        echo, logprobs, tokenize, usage: whether it has them.
        content: gives log-probabilities as llama.cpp does.
        tells: gives the ids of a prompt where they are asked for.
        line: text before each rendered conversation; ``system``: before those of the chat endpoint.
        stops: tokens that end an answer; ``stop``: a text that does, at both endpoints; ``chat_stop``: in chat.
        chat: another folder for the chat endpoint.
        cut: tokens of a prompt that are kept.
        tools: whether it renders them.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        known = {"echo": True, "logprobs": True, "tokenize": True, "usage": True, "content": False, "tells": False}
        known |= {"line": "", "system": "", "stops": stops, "stop": "", "chat_stop": "", "chat": folder, "cut": 9999}
        self.options = {**known, "dtype": torch.float32, "tools": True, **options}
        self.model = model_of(folder, self.options["dtype"])
        self.chat = model_of(self.options["chat"], self.options["dtype"])

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/v1/models":
            return {"data": [{"id": "mine"}]}
        if path == "/v1/completions":
            return {"choices": [self.completion(body)]}
        if path == "/v1/chat/completions":
            return self.chatted(body)
        return {"tokens": self.ids(body)} if path == "/tokenize" and self.options["tokenize"] else None

    def chatted(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.ids(body, self.options["system"])
        asked = {"prompt": ids, "max_tokens": body["max_tokens"]}
        made = self.made(self.chat, asked, self.options["chat_stop"] or self.options["stop"])
        given = made["logprobs"] if body.get("logprobs") and self.options["logprobs"] else None
        if given and "content" not in given:
            rows = zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True)
            given = {"content": [
                {"token": token, "logprob": value,
                 "top_logprobs": [{"token": one, "logprob": each} for one, each in tops.items()]}
                for token, value, tops in rows
            ]}  # fmt: skip
        told = {"prompt_token_ids": ids} if self.options["tells"] and body.get("return_token_ids") else {}
        choice = {"message": {"role": "assistant", "content": made["text"]}, "finish_reason": made["finish_reason"]}
        usage = {"usage": {"prompt_tokens": len(ids)}} if self.options["usage"] else {}
        return {"choices": [{**choice, **told, "logprobs": given}], **usage}

    def ids(self, body: dict[str, Any], before: str = "") -> list[int]:
        messages = json.loads(json.dumps(body["messages"]))
        for call in (call for one in messages for call in one.get("tool_calls") or ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if before:
            messages.insert(0, {"role": "system", "content": before})
        tools = body.get("tools") if self.options["tools"] else None
        variables = body.get("chat_template_kwargs") or {}
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
        )
        return self.tokenizer(self.options["line"] + text, add_special_tokens=False)["input_ids"]

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.made(self.model, body, self.options["stop"])

    def made(self, model: Any, body: dict[str, Any], stop: str) -> dict[str, Any]:
        prompt = tuple(body["prompt"][-self.options["cut"] :])
        ids, reason = list(prompt), "length"
        for token in model.answer(prompt)[: body["max_tokens"]]:
            ids.append(token)
            if token in self.options["stops"]:
                reason = "stop"
                break
        shown = 0 if body.get("echo") and self.options["echo"] else len(prompt)
        found: dict[str, Any] = {"logprobs": None}
        if self.options["logprobs"]:
            found["logprobs"] = self.scored(model, ids, shown)
        text = self.tokenizer.decode(ids[shown:], skip_special_tokens=True)
        if stop and stop in text and not body.get("echo"):
            text, reason = text[: text.index(stop)], "stop"
        return {**found, "text": text, "finish_reason": reason}

    def scored(self, model: Any, ids: list[int], shown: int) -> dict[str, Any]:
        values = model.scores(tuple(ids))
        each = [None, *(float(values[at, token]) for at, token in enumerate(ids[1:]))][shown:]
        tokens = [self.tokenizer.decode([one]) for one in ids][shown:]
        best, places = values.topk(5)
        rows = zip(places.tolist(), best.tolist(), strict=True)
        tops = [{}, *({self.tokenizer.decode([t]): v for t, v in zip(p, b, strict=True)} for p, b in rows)]
        tops = tops[shown : len(ids)]
        if self.options["content"] and shown:
            likely = [[{"token": one, "logprob": value} for one, value in top.items()] for top in tops]
            rows = zip(ids[shown:], tokens, each, likely, strict=True)
            return {"content": [{"id": i, "token": t, "logprob": v, "top_logprobs": top} for i, t, v, top in rows]}
        return {"tokens": tokens, "token_logprobs": each, "top_logprobs": tops}


@contextmanager
def serving(made: Any) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            found = made.answer(self.path, json.loads(self.rfile.read(size) or b"{}"))
            text = json.dumps(found).encode()
            self.send_response(200 if found is not None else 404)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
