"""A server with OpenAI's API in front of plain transformers, with and without what servers may lack."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.verify.draw import render
from halftune.verify.probes import PROBES, read_probes
from halftune.verify.targets.server import ServerTarget

Verdict = Callable[..., tuple[int, Any]]


class Served:
    """Answers as a server does.

    Args:
        folder: of the model.
        echo: scores prompts.
        logprobs: gives log-probabilities at all.
        tokenize: has ``/tokenize``.
        tells: gives the ids of a prompt where they are asked for.
        line: text before each rendered conversation.
        stops: tokens that end an answer.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        known = {"echo": True, "logprobs": True, "tokenize": True, "tells": False, "line": "", "stops": stops}
        self.options = {**known, **options}

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/v1/models":
            return {"data": [{"id": "mine"}]}
        if path == "/v1/completions":
            return {"choices": [self.completion(body)]}
        if path == "/v1/chat/completions":
            told = (
                {"prompt_token_ids": self.ids(body)} if self.options["tells"] and body.get("return_token_ids") else {}
            )
            return {"choices": [told], "usage": {"prompt_tokens": len(self.ids(body))}}
        return {"tokens": self.ids(body)} if path == "/tokenize" and self.options["tokenize"] else None

    def ids(self, body: dict[str, Any]) -> list[int]:
        text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        return self.tokenizer(self.options["line"] + text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, start, reason = list(body["prompt"]), len(body["prompt"]), "length"
        for _ in range(body["max_tokens"]):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in self.options["stops"]:
                reason = "stop"
                break
        found: dict[str, Any] = {"finish_reason": reason, "logprobs": None}
        shown = 0 if body.get("echo") and self.options["echo"] else start
        if self.options["logprobs"]:
            values = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            each = [None, *(float(values[at, token]) for at, token in enumerate(ids[1:]))]
            tokens = [self.tokenizer.decode([one]) for one in ids]
            found["logprobs"] = {"tokens": tokens[shown:], "token_logprobs": each[shown:]}
        return {**found, "text": self.tokenizer.decode(ids[shown:], skip_special_tokens=True)}


@contextmanager
def serving(made: Served) -> Iterator[str]:
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


def codes(found: Any) -> list[str]:
    return [one["code"] for one in found["findings"]]


@pytest.mark.parametrize("lacks", [{}, {"echo": False}, {"tokenize": False}, {"echo": False, "logprobs": False}])
def test_the_result_behind_a_server_is_the_same(
    made: dict[str, Path], verdict: Verdict, lacks: dict[str, bool]
) -> None:
    with serving(Served(made["merged"], **lacks)) as url:
        status, found = verdict(made["result"], url)
    assert (status, codes(found)) == (0, [])
    assert (found["numbers"]["to_trained"] is None) == (lacks.get("logprobs") is False)


def test_a_server_without_the_adapter_serves_the_base(made: dict[str, Path], verdict: Verdict, tmp_path: Path) -> None:
    shutil.copytree(made["merged"], tmp_path / "copy")
    shutil.copy(made["base"] / "model.safetensors", tmp_path / "copy")
    server = Served(tmp_path / "copy")
    with serving(server) as url:
        assert codes(verdict(made["result"], url)[1]) == ["weights.base"]


@pytest.mark.parametrize(("tells", "code"), [
    ({"tokenize": True}, "tokens.differ"), ({"tells": True}, "tokens.differ"), ({}, "tokens.count"),
])  # fmt: skip
def test_a_server_with_another_template(
    made: dict[str, Path], verdict: Verdict, tells: dict[str, bool], code: str
) -> None:
    with serving(Served(made["merged"], **{"tokenize": False, **tells}, line="Be brief.")) as url:
        status, found = verdict(made["result"], url)
    assert (status, codes(found)) == (4, [code])


@pytest.mark.parametrize("tokenize", [True, False])
def test_a_template_that_prints_todays_date(made: dict[str, Path], tokenize: bool) -> None:
    probes = read_probes(made["result"])
    assert probes is not None
    server = Served(made["merged"], tokenize=tokenize)
    own = server.tokenizer
    own.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + own.chat_template
    messages = [{"role": "user", "content": "Hello."}]
    text, ids = render(own, messages, None, {}, "2020-01-01") or ("", [])
    probe = probes.probes[0].model_copy(update={"messages": messages, "text": text, "prompt": ids})
    with serving(server) as url:
        found = ServerTarget(url).tokens(probe, probes.model_copy(update={"day": "2020-01-01"}), own)
        server.options["line"] = "Be brief."
        other = ServerTarget(url).tokens(probe, probes, own)
    assert found in (ids, len(ids))
    assert other not in (ids, len(ids))


def test_a_stop_that_was_not_tried_passes(made: dict[str, Path], verdict: Verdict, tmp_path: Path) -> None:
    """The last probe alone ends in another token."""
    result = shutil.copytree(made["result"], tmp_path / "result")
    probes = read_probes(result)
    assert probes is not None
    last = probes.probes[-1]
    cut = {"answer": last.answer[:1], "logprobs": last.logprobs[:1], "top": last.top[:1], "ended": True}
    changed = probes.model_copy(update={
        "probes": [*probes.probes[:-1], last.model_copy(update=cut)], "stops": [*probes.stops, last.answer[0]]
    })  # fmt: skip
    (result / PROBES).write_text(changed.as_json())
    known = json.loads((made["merged"] / "generation_config.json").read_text())["eos_token_id"]
    for stops, expected in (([*known, last.answer[0]], []), (known, ["stops.missing"])):
        with serving(Served(made["merged"], stops=stops)) as url:
            assert codes(verdict(result, url)[1]) == expected


class Parting(Served):
    """Answers one probe as trained, and nonsense otherwise; scores no prompts."""

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked = getattr(self, "asked", 0) + 1
        found = super().completion(body)
        if self.asked > 2:
            found["text"] = "nonsense"
            if found["logprobs"]:
                found["logprobs"]["tokens"] = ["nonsense"] * len(found["logprobs"]["tokens"])
        return found


@pytest.mark.parametrize("lacks", ["echo", "echo logprobs"])
def test_a_server_that_answers_otherwise(made: dict[str, Path], verdict: Verdict, lacks: str) -> None:
    with serving(Parting(made["merged"], **dict.fromkeys(lacks.split(), False))) as url:
        status, found = verdict(made["result"], url)
    assert status == 4
    assert "weights.differ" in codes(found)


@pytest.mark.parametrize("value", [None, "-1", float("nan"), 1e308, 3, []])
def test_values_that_are_no_log_probabilities(made: dict[str, Path], verdict: Verdict, value: Any) -> None:
    class Odd(Served):
        def completion(self, body: dict[str, Any]) -> dict[str, Any]:
            found = super().completion(body)
            found["logprobs"]["token_logprobs"] = [value] * len(found["logprobs"]["tokens"])
            return found

        def answer(self, path: str, body: dict[str, Any]) -> Any:
            counted = path == "/v1/chat/completions"
            return {"usage": {"prompt_tokens": value}} if counted else super().answer(path, body)

    with serving(Odd(made["merged"], tokenize=False)) as url:
        status, found = verdict(made["result"], url)
    assert found["numbers"]["to_trained"] is None
    assert status in (0, 4)


@pytest.mark.parametrize(("against", "more", "code"), [
    ("http://127.0.0.1:9", [], "verify.server_failed"),
    ("{url}", ["--model", "other"], "verify.no_such_model"),
    ("nowhere", [], "config.not_a_run_folder"),
])  # fmt: skip
def test_targets_that_cannot_be_compared(
    made: dict[str, Path], against: str, more: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from halftune.cli import main

    with serving(Served(made["merged"])) as url, pytest.raises(SystemExit) as ended:
        main(["verify", "--reference", str(made["result"]), "--against", against.format(url=url), *more])
    assert ended.value.code not in (0, 4)
    assert f"[{code}]" in capsys.readouterr().err
