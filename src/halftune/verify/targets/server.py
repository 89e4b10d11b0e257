"""A server with OpenAI's API: vLLM, llama.cpp, SGLang, Ollama, ``halftune serve`` and others."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import date, timedelta
from math import inf
from typing import Any

import httpx

from halftune.core.errors import ModelError
from halftune.core.processes import heartbeat
from halftune.verify.answers import follow
from halftune.verify.draw import render
from halftune.verify.probes import TOP, Probe, Probes
from halftune.verify.targets import Said, Seen

_SECONDS = 120.0  # for one request
_BODY = 32 << 20  # bytes of an answer
_TEXT, _CHAT = "/v1/completions", "/v1/chat/completions"
_BEYOND = 8  # tokens after an answer, in which a server shows that it does not stop
_ROUNDING = 0.01  # a log-probability is at most 0
# llama.cpp's names of formats; its sums are in 16 bits at best, and what is not listed is coarser than 8 bits
_FORMATS = {"Q8_0": "q8_0", "F16": "fp16", "BF16": "bf16", "F32": "fp16", "all F32": "fp16"}
_NO_ENDPOINT = ("HTTP 404", "HTTP 405", "HTTP 501")


class ServerTarget:
    """See ``Target``.

    Attributes:
        refused: why the server's last answer was an error.

    Args:
        url: with or without ``/v1``.
        model: name of the model there; empty: the only one.
        key_variable: environment variable with the API key.
        format: of its weights, where the server does not say.

    Raises:
        ModelError: it does not answer, or has no such model.
    """

    kind = "server"

    def __init__(self, url: str, model: str = "", key_variable: str = "OPENAI_API_KEY", format: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=_SECONDS, headers=headers, follow_redirects=False, trust_env=False)
        self.format, self.refused, self._known = format, "", dict[str, Said | None]()
        self.model = self._chosen(model)
        self.name = f"{self.url} {self.model}"

    def _chosen(self, model: str) -> str:
        found = self._call("/v1/models")
        try:
            known = {str(one["id"]): (one.get("meta") or {}).get("ftype") for one in found["data"]}
        except (AttributeError, TypeError, LookupError) as error:
            raise self._error("/v1/models", "not a list of models") from error
        if model in known or (not model and len(known) == 1):
            model = model or next(iter(known))
            self.format = self.format or (_FORMATS.get(str(known[model]), "q4") if known[model] else "")
            return model
        what = f"no model {model!r}" if model else "several models"
        raise ModelError(
            f"{what}; there are {', '.join(known)}",
            where=self.url,
            remedy="name one with --model",
            code="verify.no_such_model",
        )

    def tokens(self, probe: Probe, probes: Probes, tokenizer: Any) -> list[int] | int | None:
        """See ``Target``. By the server's tokenizer where it tells of it; else the number it counts."""
        if probe.messages is None:
            return None
        found = self._rendered(probe, probes)
        if found not in (None, probe.prompt, len(probe.prompt)):  # the template may print the date: that of training
            for day in (date.today() + timedelta(days=apart) for apart in (0, -1, 1)):  # the server's day
                made = render(tokenizer, probe.messages, probe.tools, probes.variables, day.isoformat())
                if made and found in (made[1], len(made[1])):
                    return probe.prompt
        return found

    def _rendered(self, probe: Probe, probes: Probes) -> list[int] | int | None:
        asked: dict[str, Any] = {"messages": _messages(probe), "chat_template_kwargs": probes.variables}
        asked |= {"tools": probe.tools} if probe.tools else {}
        if (made := self._try("/apply-template", asked)) and isinstance(text := made.get("prompt"), str):  # llama.cpp
            made = self._try("/tokenize", {"content": text, "add_special": True, "parse_special": True})
            return _ids(made)
        if ids := _ids(self._try("/tokenize", {**asked, "model": self.model, "add_generation_prompt": True})):
            return ids
        said = self._said(probe, _CHAT, {"chat_template_kwargs": probes.variables} if probes.variables else {})
        return said and said.prompt

    def stops(self, probes: Probes, tokenizer: Any) -> set[int] | None:
        """See ``Target``. A server's stops show in its answers alone."""
        return None

    def said(self, probe: Probe, *, chat: bool) -> Said | None:
        """See ``Target``; the conversation as a client sends it, without variables of the template."""
        return self._said(probe, _CHAT if chat else _TEXT, {})

    def see(self, probes: Sequence[Probe], tokenizer: Any) -> Seen:
        """See ``Target``. Scores the answer behind the prompt where the server can; else follows its own answer."""
        if self._echoed(probes[0]) is not None:
            found = [self._echoed(one) or ([], []) for one in probes]
            return Seen([one for one, _ in found], steps=[step for _, steps in found for step in steps])
        said = [self.said(one, chat=False) or self.said(one, chat=True) for one in probes]
        if not any(said):
            raise self._error(_TEXT, self.refused)
        pairs = list(zip(probes, said, strict=True))
        rows = [follow(probe, one, inf, tokenizer).logprobs if one else [] for probe, one in pairs]
        return Seen(rows, steps=[step for one in said if one for step in one.steps])

    def _echoed(self, probe: Probe) -> tuple[list[float], list[float]] | None:
        """Log-probabilities of the answer, given the prompt, and steps; None if the server does not score prompts."""
        asked = {"prompt": probe.prompt + probe.answer, "max_tokens": 1, "echo": True, "logprobs": TOP}
        found = self._try(_TEXT, {"model": self.model, "temperature": 0, **asked})
        try:
            told = found["choices"][0]["logprobs"]
            own = told["token_logprobs"][len(probe.prompt) : len(probe.prompt) + len(probe.answer)]
            if len(own) == len(probe.answer) and all(map(_is_logprob, own)):
                return [float(one) for one in own], Said("", "", [], tops=_tops(told)).steps
        except (AttributeError, TypeError, LookupError):
            pass
        return None

    def _said(self, probe: Probe, path: str, more: dict[str, Any]) -> Said | None:
        """Its greedy answer; None for an error."""
        tokens = len(probe.answer) + _BEYOND
        asked: dict[str, Any] = {"model": self.model, "max_tokens": tokens, "temperature": 0, **more}
        if path == _TEXT:
            forms = [asked | {"prompt": probe.prompt, "logprobs": TOP}]
        elif probe.messages is None:
            return None
        else:
            asked |= {"messages": _messages(probe)} | ({"tools": probe.tools} if probe.tools else {})
            scored = asked | {"logprobs": True, "top_logprobs": TOP}
            forms = [scored | {"return_token_ids": True}, scored, asked]
        key = json.dumps([path, forms[-1]])
        if key not in self._known:
            made = (_answer(self._try(path, form)) for form in forms)
            self._known[key] = next((one for one in made if one is not None), None)
        return self._known[key]

    @property
    def lacks_chat(self) -> bool:
        """See ``Target``."""
        return self._try(_CHAT, {"model": self.model, "messages": []}) is None and any(
            one in self.refused for one in _NO_ENDPOINT
        )

    def _try(self, path: str, body: dict[str, Any]) -> Any:
        """The answer; None for an error."""
        try:
            return self._call(path, body)
        except ModelError as error:
            self.refused = str(error)
            return None

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        heartbeat.beat()
        method = "GET" if body is None else "POST"
        try:
            with self._client.stream(method, self.url + path, json=body) as answer:
                text = b""
                for part in answer.iter_bytes():
                    text += part
                    if len(text) > _BODY:
                        raise self._error(path, f"more than {_BODY:,} bytes")
                if answer.status_code != 200:
                    raise self._error(path, f"HTTP {answer.status_code}: {text[:300].decode(errors='replace')}")
            return json.loads(text)
        except httpx.HTTPError as error:
            raise self._error(path, str(error) or type(error).__name__) from error
        except (ValueError, RecursionError) as error:
            raise self._error(path, "not JSON") from error

    def _error(self, path: str, what: str) -> ModelError:
        remedy = "check that the server runs there, and its key in the variable named by --api-key-env"
        return ModelError(what, where=self.url + path, remedy=remedy, code="verify.server_failed")


_TAKEN_OUT = {"tool_calls", "reasoning_content", "reasoning"}  # of an answer's text


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and -1e9 < value < _ROUNDING


def _ids(found: Any) -> list[int] | None:
    """Token ids of an answer to ``/tokenize``: vLLM's and llama.cpp's."""
    ids = found.get("tokens") if isinstance(found, dict) else None
    return ids if isinstance(ids, list) and ids and all(type(one) is int for one in ids) else None


def _messages(probe: Probe) -> list[dict[str, Any]]:
    """As OpenAI's API takes them: arguments of calls are JSON texts."""
    found: list[dict[str, Any]] = json.loads(json.dumps(probe.messages))
    for call in (call for one in found for call in one.get("tool_calls") or ()):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def _answer(found: Any) -> Said | None:
    """An answer of either endpoint; None if it is none."""
    try:
        choice, usage = found["choices"][0], found.get("usage") or {}
        message = choice.get("message")
        text = choice["text"] if message is None else message.get("content") or ""
        told = choice.get("logprobs") or {}
        pairs: list[tuple[int | str, float]]
        if (listed := told.get("content")) is not None:  # of chat, and llama.cpp's of completions
            pairs = [(one.get("id", one["token"]), one["logprob"]) for one in listed]
        else:
            pairs = list(zip(told.get("tokens") or (), told.get("token_logprobs") or (), strict=True))
        tops = _tops(told)
        ids = _ids({"tokens": found.get("prompt_token_ids") or choice.get("prompt_token_ids")})
        count = usage.get("prompt_tokens")
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    whole = message is None or not any(message.get(one) for one in _TAKEN_OUT)
    pairs = [one for one in pairs if all(_is_logprob(value) for _, value in pairs)]
    prompt = ids or (count if type(count) is int and count > 0 else None)
    return Said(str(text), str(choice.get("finish_reason") or ""), pairs, prompt, whole, tops)


def _tops(told: Any) -> list[dict[int | str, float]]:
    """The likeliest tokens of each place, by their ids or texts."""
    if isinstance(listed := told.get("content"), list):
        places = [{one.get("id", one.get("token")): one["logprob"] for one in each["top_logprobs"]} for each in listed]
    else:
        places = told.get("top_logprobs") or []
    return [{token: value for token, value in (one or {}).items() if _is_logprob(value)} for one in places]
