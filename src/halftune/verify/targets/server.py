"""A server with OpenAI's API: vLLM, llama.cpp, SGLang, Ollama, ``halftune serve`` and others."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import date, timedelta
from itertools import takewhile
from typing import Any

import httpx

from halftune.core.errors import ModelError
from halftune.core.processes import heartbeat
from halftune.verify.draw import render
from halftune.verify.probes import TOP, Probe, Probes
from halftune.verify.targets import Seen

_SECONDS = 120.0  # for one request
_BODY = 32 << 20  # bytes of an answer
_STOPS_TRIED = 4
_CHAT = "/v1/chat/completions"
_BEYOND = 8  # tokens after an answer, in which a server shows that it does not stop
_ROUNDING = 0.01  # a log-probability is at most 0


class ServerTarget:
    """See ``Target``. Its format is not known.

    Args:
        url: with or without ``/v1``.
        model: name of the model there; empty: the only one.
        key_variable: environment variable with the API key.

    Raises:
        ModelError: it does not answer, or has no such model.
    """

    kind, format = "server", ""

    def __init__(self, url: str, model: str = "", key_variable: str = "OPENAI_API_KEY") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(key_variable, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=_SECONDS, headers=headers, follow_redirects=False, trust_env=False)
        self.model = self._chosen(model)
        self.name = f"{self.url} {self.model}"

    def _chosen(self, model: str) -> str:
        found = self._call("/v1/models")
        try:
            known = [str(one["id"]) for one in found["data"]]
        except (TypeError, LookupError) as error:
            raise self._error("/v1/models", "not a list of models") from error
        if model in known or (not model and len(known) == 1):
            return model or known[0]
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
        asked: dict[str, Any] = {"messages": probe.messages, "chat_template_kwargs": probes.variables}
        asked |= {"tools": probe.tools} if probe.tools else {}
        if (made := self._try("/apply-template", asked)) and isinstance(text := made.get("prompt"), str):  # llama.cpp
            made = self._try("/tokenize", {"content": text, "add_special": True, "parse_special": True})
            return _ids(made)
        if ids := _ids(self._try("/tokenize", {**asked, "model": self.model, "add_generation_prompt": True})):
            return ids
        asked |= {"model": self.model, "max_tokens": 1, "temperature": 0}
        found = self._try(_CHAT, {**asked, "return_token_ids": True}) or self._call(_CHAT, asked)
        try:
            told = found.get("prompt_token_ids") or found["choices"][0].get("prompt_token_ids")
            if ids := _ids({"tokens": told}):
                return ids
        except (AttributeError, LookupError, TypeError):
            pass
        try:
            return int(found["usage"]["prompt_tokens"])
        except (TypeError, LookupError, ValueError, OverflowError):
            return None

    def stops(self, probes: Probes, tokenizer: Any) -> set[int] | None:
        """See ``Target``. Judged by greedy answers that begin as the probe's; one without such an answer passes."""
        found, failed = set[int](), set[int]()
        ended: dict[int, list[Probe]] = defaultdict(list)
        for one in probes.probes:
            if one.ended:
                ended[one.answer[-1]].append(one)
        for probe in [one for some in ended.values() for one in some[:_STOPS_TRIED]]:
            choice = self._complete(probe.prompt, len(probe.answer) + _BEYOND)
            text, expected = str(choice.get("text", "")), str(tokenizer.decode(probe.answer, skip_special_tokens=True))
            if not text.strip().startswith(expected.strip()):
                continue  # another answer says nothing of its end
            (found if choice.get("finish_reason") == "stop" else failed).add(probe.answer[-1])
        return found | (ended.keys() - failed) if found or failed else None

    def see(self, probes: Sequence[Probe], tokenizer: Any) -> Seen:
        """See ``Target``. Scores the answer behind the prompt where the server can; else follows its own answer."""
        if (first := self._echoed(probes[0])) is not None:
            return Seen([first, *(self._echoed(one) or [] for one in probes[1:])])
        followed = [self._followed(one, tokenizer) for one in probes]
        return Seen([one[0] for one in followed], texts=[one[1] for one in followed])

    def _echoed(self, probe: Probe) -> list[float] | None:
        """Log-probabilities of the answer, given the prompt; None if the server does not score prompts."""
        asked = {"prompt": probe.prompt + probe.answer, "max_tokens": 1, "echo": True, "logprobs": TOP}
        found = self._try("/v1/completions", {"model": self.model, "temperature": 0, **asked})
        try:
            values = found["choices"][0]["logprobs"]["token_logprobs"]
            own = values[len(probe.prompt) : len(probe.prompt) + len(probe.answer)]
            if len(own) == len(probe.answer) and all(map(_is_logprob, own)):
                return [float(one) for one in own]
        except (TypeError, LookupError):
            pass
        return None

    def _followed(self, probe: Probe, tokenizer: Any) -> tuple[list[float], str]:
        """The log-probabilities of the server's own greedy answer as far as it is the probe's, and its text."""
        choice = self._complete(probe.prompt, len(probe.answer))
        try:
            given = choice["logprobs"]
            pairs = list(zip(given["tokens"], given["token_logprobs"], strict=True))
        except (TypeError, LookupError, ValueError):
            pairs = []
        expected = [tokenizer.decode([one]) for one in probe.answer]
        pairs = pairs if all(_is_logprob(value) for _, value in pairs) else []
        same = takewhile(lambda pair: pair[0][0] == pair[1], zip(pairs, expected, strict=False))
        return [float(pair[1]) for pair, _ in same], str(choice.get("text", ""))

    def _complete(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": TOP}
        found = self._call("/v1/completions", {"model": self.model, **asked})
        try:
            return dict(found["choices"][0])
        except (TypeError, LookupError, ValueError) as error:
            raise self._error("/v1/completions", "not an answer") from error

    def _try(self, path: str, body: dict[str, Any]) -> Any:
        """The answer; None for an error."""
        try:
            return self._call(path, body)
        except ModelError:
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


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and -1e9 < value < _ROUNDING


def _ids(found: Any) -> list[int] | None:
    """Token ids of an answer to ``/tokenize``: vLLM's and llama.cpp's."""
    ids = found.get("tokens") if isinstance(found, dict) else None
    return ids if isinstance(ids, list) and ids and all(type(one) is int for one in ids) else None
