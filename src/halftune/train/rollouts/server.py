"""Samples answers on a vLLM server, by its OpenAI-compatible HTTP API; hands it the adapter in training."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.model import LoraAdapter
from halftune.config.sections.rewards import ServerSection
from halftune.core.errors import TrainingError
from halftune.core.processes import heartbeat
from halftune.core.processes.time_limit import within
from halftune.model.result.save import save_final
from halftune.train.parallel.barrier import barrier
from halftune.train.rollouts.sampling import Answer, Inputs, Sampler
from halftune.train.state import TrainState

FOLDER = "server"  # in the run folder: the adapter that the server reads
_REQUESTS = 128  # at the same time
_BEAT = 5.0  # seconds
_BODY, _TOKEN = 1 << 20, 1 << 10  # bytes of an answer at most: of all of it, and of a token
_ROUNDING = 0.01  # a log-probability is at most 0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key, and the paths of this machine, go to the host that the recipe names only."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class ServerSampler(Sampler):
    """Samples on a server. It has the base model; before the answers of a step it loads the adapter as it is then.

    Answers are seeded, but a server's rounding depends on what it computes at the same time: a resumed run need not
    sample the same.

    Args:
        run: its adapter is in training.
        section: how it samples.
        server: where.

    Raises:
        TrainingError: the server does not answer.
    """

    def __init__(self, run: TrainState, section: GrpoMethod, server: ServerSection) -> None:
        super().__init__(run, section)
        self.server, self.url = server, server.url.rstrip("/").removesuffix("/v1")
        self._call("/v1/models")
        name = [f"halftune-{uuid.uuid4().hex[:8]}"]  # an adapter of an earlier run may still be loaded
        config: Any = run.model.config
        self.vocabulary = config.get_text_config().vocab_size
        self.name, self.loaded = broadcast_object_list(name)[0] if run.processes > 1 else name[0], ""

    def __call__(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], inputs: Inputs | None = None
    ) -> list[Answer]:
        """See ``Sampler``. All processes call it together; the main one hands over the adapter.

        Raises:
            TrainingError: a request fails.
        """
        assert inputs is None, "the plan refuses media with a server"
        self._hand_over()
        with ThreadPoolExecutor(_REQUESTS) as pool:
            asked = [pool.submit(self._answer, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
            left: Any = set(asked)
            while left:
                heartbeat.beat()
                _, left = wait(left, timeout=_BEAT)
        return [one.result() for one in asked]

    def _hand_over(self) -> None:
        run, name = self.run, f"{self.name}-{self.run.step}"
        if name == self.loaded:
            return
        state, folder = run.strategy.result(run.model), (run.folder / FOLDER).absolute()
        try:
            if run.is_main:
                save_final(run.model, run.tokenizer, run.plan, folder / name, state)
                self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder / name)})
                if self.loaded:
                    self._call("/v1/unload_lora_adapter", {"lora_name": self.loaded})
                    shutil.rmtree(folder / self.loaded, ignore_errors=True)
        finally:  # gathering needs all processes
            for _ in state or ():
                pass
        barrier(run.processes)
        self.loaded = name

    def _answer(self, prompt: np.ndarray, seed: int) -> Answer:
        section = self.section
        asked = {
            "model": self.loaded,
            "prompt": prompt.tolist(),
            "max_tokens": section.max_completion_length,
            "temperature": float(section.temperature),
            "top_p": float(section.top_p),
            "top_k": section.top_k or -1,
            "seed": seed,
            "stop_token_ids": self.ends,
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        found = self._call("/v1/completions", asked)
        try:
            choice = found["choices"][0]
            ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            self._check(ids, values)
            return Answer(np.array(ids, np.int32), np.array(values, np.float32))  # null is NaN
        except (LookupError, TypeError, ValueError) as error:
            what = f"not an answer with token ids and log-probabilities: {type(error).__name__}: {error}"
            raise self._error("/v1/completions", what) from error

    def _check(self, ids: list[Any], values: list[Any]) -> None:
        if not 0 < len(ids) <= self.section.max_completion_length or len(ids) != len(values):
            raise ValueError(f"{len(ids)} tokens, {len(values)} log-probabilities")
        if wrong := [one for one in ids if type(one) is not int or not 0 <= one < self.vocabulary]:
            raise ValueError(f"{wrong[0]!r} is not a token of the model")
        if wrong := [one for one in values if one is not None and not -math.inf < one < _ROUNDING]:
            raise ValueError(f"{wrong[0]!r} is not a log-probability")

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that the server answers; None for text."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:  # a server that sends its headers slowly has no end by the socket's limit, which counts from byte to byte
            text = within(float(self.server.timeout_seconds), lambda: self._read(request))
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            said = "" if said.startswith("<") else f": {said}"  # a page of a proxy
            raise self._error(path, f"HTTP {error.code} {error.reason}{said}") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._error(path, str(getattr(error, "reason", error)) or "timed out") from error
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    def _read(self, request: urllib.request.Request) -> bytes:
        """The body of an answer, which has a limit of bytes."""
        seconds, most = float(self.server.timeout_seconds), _BODY + _TOKEN * self.section.max_completion_length
        end, parts, size = time.monotonic() + seconds, [], 0
        with _OPENER.open(request, timeout=seconds) as answer:
            while part := answer.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > most:
                    raise OSError(f"more than {most:,} bytes")
                if time.monotonic() > end:  # nobody waits for it any more
                    raise TimeoutError
        return b"".join(parts)

    def _error(self, path: str, what: str) -> TrainingError:
        flags = ""
        if "lora" in path and isinstance(adapter := self.run.config.adapter, LoraAdapter):
            rank = next((one for one in self.server.ranks if one >= adapter.saved_rank), adapter.saved_rank)
            flags = f"with --enable-lora --max-lora-rank {rank}, "
        remedy = f"start the server {flags}as in docs/how-to/rollout-server.md, then run the same command: it resumes"
        return TrainingError(what, where=self.url + path, remedy=remedy, code="train.server_failed")
