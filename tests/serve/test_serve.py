"""Serving by the OpenAI API: answers are those of chat, requests do not touch each other, wrong ones are refused."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import torch
from patience import LIMIT, until
from tiny_images import ROWS, image_model, write_image, write_rows
from tiny_model import a_model, checkpoint, finished_run
from transformers import PreTrainedTokenizerFast
from transformers.generation.continuous_batching.requests import RequestState

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ConfigError, HalftuneError, ModelError
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.plan import resolve
from halftune.serve import engine as engine_module
from halftune.serve.app import build_app
from halftune.serve.batching import PAGE
from halftune.serve.engine import Engine
from halftune.serve.middleware import Access
from halftune.serve.requests import ChatRequest, CompletionRequest, _Request
from halftune.serve.runs import open_runs
from halftune.serve.sampling import Token
from halftune.serve.text import TextStream
from halftune.train.trainer import train

ASKED = [{"role": "user", "content": "How wide is bf16?"}]
PROMPT = [9, 300, 41, 7, 1200, 55, 8]
T = TypeVar("T")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of one base."""
    place = tmp_path_factory.mktemp("serve")
    base = checkpoint(place / "base", vocab_size=4096, max_position_embeddings=512)
    one = finished_run(place / "one", base)
    return {"one": one, "two": finished_run(place / "two", base, adapter={"type": "lora", "rank": 8})}


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[Engine]:
    made = Engine(*open_runs([str(one) for one in folders.values()]), None)
    assert made.batched
    yield made
    made.close()


@pytest.fixture
def access(engine: Engine) -> Access:
    return build_app(engine, key="", body=1 << 20, queue=64)


def in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, in a thread of its own: a browser of other tests keeps a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def with_client(access: Access, work: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, T]], key: str = "none") -> T:
    """What ``work`` returns, given the real client of a server in this process."""

    async def run() -> T:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=access)) as http:  # pyright: ignore
            made = openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0, timeout=LIMIT
            )
            return await work(made)

    return in_a_loop(run())


def post(access: Access, path: str, body: Any, **headers: str) -> httpx.Response:
    async def send(client: openai.AsyncOpenAI) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        made = {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        return await client._client.post(f"http://localhost/v1/{path}", content=content, headers=made)

    return with_client(access, send)


def complete(access: Access, **body: Any) -> dict[str, Any]:
    """The answer of ``/v1/completions``, greedy unless the body says otherwise."""
    found = post(access, "completions", {"model": "one", "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, **body})
    assert found.status_code == 200, found.text
    return found.json()


def test_every_model_answers_as_chat_does_also_at_once(
    folders: dict[str, Path], engine: Engine, access: Access
) -> None:
    sessions = {name: open_session(run) for name, run in open_runs([str(one) for one in folders.values()])[0].items()}
    wanted = {name: session.reply(ASKED, tuned=True) for name, session in sessions.items()}
    wanted["base"] = sessions["one"].reply(ASKED, tuned=False)
    assert len(set(wanted.values())) == 3
    assert list(engine.models) == list(wanted)

    async def ask(client: openai.AsyncOpenAI) -> None:
        listed = [one.id async for one in client.models.list()]
        assert listed == list(wanted)
        asked = [name for name in wanted for _ in range(8)]
        calls = [client.chat.completions.create(model=name, messages=ASKED) for name in asked]  # pyright: ignore
        for name, answer in zip(asked, await asyncio.gather(*calls), strict=True):
            assert answer.choices[0].message.content == wanted[name]
            assert answer.model == name

    with_client(access, ask)


@pytest.mark.parametrize("batched", [True, False])
def test_a_stream_is_the_whole_answer_in_parts(
    batched: bool, folders: dict[str, Path], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine
    if not batched:
        monkeypatch.setattr(engine_module, "can_batch", lambda _: False)
        made = Engine(*open_runs([str(folders["one"])]), None)

    async def ask(client: openai.AsyncOpenAI) -> None:
        more: Any = {"model": "one", "messages": ASKED, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**more)
        stream = await client.chat.completions.create(**more, stream=True, stream_options={"include_usage": True})
        parts = [one async for one in stream]
        choices = [one.choices[0] for one in parts if one.choices]
        assert "".join(one.delta.content or "" for one in choices) == whole.choices[0].message.content
        assert choices[0].delta.role == "assistant"
        assert choices[-1].finish_reason == whole.choices[0].finish_reason
        assert [one.finish_reason for one in choices[:-1]] == [None] * (len(choices) - 1)
        assert parts[-1].usage == whole.usage
        entries = [entry for one in choices if one.logprobs for entry in one.logprobs.content or []]
        assert whole.choices[0].logprobs is not None
        assert entries == whole.choices[0].logprobs.content
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)  # greedy

    try:
        with_client(build_app(made, key="", body=1 << 20, queue=64), ask)
    finally:
        if not batched:
            made.close()


def test_log_probabilities_are_those_of_one_forward_pass(engine: Engine, access: Access) -> None:
    """Of prompt and answer, for each model, against fp64."""
    for name, served in engine.models.items():
        told = complete(access, model=name, echo=True, logprobs=2, return_token_ids=True)["choices"][0]
        ids = told["prompt_token_ids"] + told["token_ids"]
        assert told["prompt_token_ids"] == PROMPT
        with engine.shared.answering(served.adapter) as causal, torch.no_grad():
            logits = causal(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        wanted = logits[:-1].gather(1, torch.tensor([ids[1:]]).T)[:, 0]
        found = told["logprobs"]["token_logprobs"]
        assert found[0] is None
        torch.testing.assert_close(torch.tensor(found[1:], dtype=torch.float64), wanted, rtol=0, atol=1e-5)
        assert told["token_ids"] == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
        best = logits[len(PROMPT) - 1].topk(2).values.tolist()
        assert list(told["logprobs"]["top_logprobs"][len(PROMPT)].values()) == pytest.approx(best, abs=1e-5)


def test_a_prompt_longer_than_a_part_is_read_whole(
    engine: Engine, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = complete(access, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"]
    monkeypatch.setattr("halftune.serve.shared_model._PART", 3)
    parts = complete(access, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]["token_logprobs"]
    assert parts[1:] == pytest.approx(whole[1:], abs=1e-5)


def test_random_numbers_belong_to_the_request(access: Access) -> None:
    hot: dict[str, Any] = {"temperature": 2.0, "return_token_ids": True}

    async def ask(client: openai.AsyncOpenAI) -> list[list[int]]:
        more: Any = {"model": "one", "prompt": PROMPT, "max_tokens": 8, "temperature": 2.0}
        extra = {"ignore_eos": True, "return_token_ids": True}
        seeds = [1, 2, 1, None, 3, 1]
        calls = [client.completions.create(**more, seed=seed, extra_body=extra) for seed in seeds]
        return [one.choices[0].token_ids for one in await asyncio.gather(*calls)]  # pyright: ignore

    first, second, third, free, _, last = with_client(access, ask)
    alone = complete(access, **hot, seed=1)["choices"][0]["token_ids"]
    assert first == third == last == alone
    assert first != second != free
    greedy = complete(access, return_token_ids=True)["choices"][0]["token_ids"]
    assert complete(access, **hot, top_k=1)["choices"][0]["token_ids"] == greedy
    assert complete(access, **hot, top_p=1e-9)["choices"][0]["token_ids"] == greedy
    assert complete(access, return_token_ids=True, repetition_penalty=10)["choices"][0]["token_ids"] != greedy


def test_what_ends_an_answer(engine: Engine, access: Access) -> None:
    plain = complete(access, return_token_ids=True)
    text, ids = plain["choices"][0]["text"], plain["choices"][0]["token_ids"]
    assert (plain["choices"][0]["finish_reason"], plain["usage"]["completion_tokens"]) == ("length", 8)
    fourth = str(engine.models["one"].tokenizer.decode(ids[3:4]))
    stop = text.index(fourth) if fourth in text else None
    assert stop is not None
    told = complete(access, stop=[fourth, "never there"], return_token_ids=True)["choices"][0]
    assert (told["text"], told["finish_reason"]) == (text[:stop], "stop")
    assert told["token_ids"] == ids[: len(told["token_ids"])]
    told = complete(access, stop_token_ids=[ids[2]], return_token_ids=True)["choices"][0]
    assert (told["token_ids"], told["finish_reason"]) == (ids[: ids.index(ids[2]) + 1], "stop")


def test_requests_that_are_refused(engine: Engine, access: Access) -> None:
    chat: dict[str, Any] = {"model": "one", "messages": ASKED}
    cases: list[tuple[Any, int, str, str | None]] = [
        (b"", 400, "invalid_request", None),
        (b"[" * 100_000, 400, "invalid_request", None),
        (b"\xff", 400, "invalid_request", None),
        ({"model": "one"}, 400, "invalid_request", "messages"),
        ({**chat, "messages": [{"role": "user"}]}, 400, "invalid_request", "messages"),
        (
            {**chat, "messages": [{"role": "user", "content": [{"type": "video"}]}]},
            400,
            "infer.bad_request",
            "messages",
        ),
        ({**chat, "temperature": "hot"}, 400, "invalid_request", "temperature"),
        (json.dumps({**chat, "temperature": float("nan")}).encode(), 400, "invalid_request", "temperature"),
        ({**chat, "temperature": 2.1}, 400, "invalid_request", "temperature"),
        ({**chat, "repetition_penalty": 1e-300}, 400, "invalid_request", "repetition_penalty"),
        ({**chat, "repetition_penalty": 1e9}, 400, "invalid_request", "repetition_penalty"),
        ({**chat, "n": 2}, 400, "invalid_request", "n"),
        ({**chat, "frequency_penalty": 0.5}, 400, "invalid_request", "frequency_penalty"),
        ({**chat, "tools": [{"a": 1}]}, 400, "invalid_request", "tools"),
        ({**chat, "tools": [{"type": "function", "function": {"name": ""}}]}, 400, "invalid_request", "tools"),
        ({**chat, "unheard_of": 1}, 400, "invalid_request", "unheard_of"),
        ({**chat, "max_tokens": 500}, 400, "context_length_exceeded", "max_tokens"),
        ({**chat, "model": "three"}, 404, "model_not_found", "model"),
        ({**chat, "messages": [{"role": "user", "content": "a" * (1 << 20)}]}, 413, "body_too_large", None),
        (b"x" * 10_000_000, 413, "body_too_large", None),
    ]
    for body, status, code, param in cases:
        found = post(access, "chat/completions", body)
        assert (found.status_code, found.json()["error"]["code"], found.json()["error"]["param"]) == (
            status,
            code,
            param,
        )
    for prompt in (["a", "b"], [[]], [""], [], [4096], [-1], "", None, [1.5]):
        assert post(access, "completions", {"model": "one", "prompt": prompt}).status_code == 400
    assert post(access, "completions", {"model": "one", "prompt": [1] * 600}).json()["error"]["code"] == (
        "context_length_exceeded"
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    found = post(access, "chat/completions", {**chat, "messages": [{"role": "user", "content": [image]}]})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "infer.bad_image")
    assert post(access, "chat/completions", chat, Content_Type="text/plain").status_code == 415
    assert post(access, "chat/completions", chat, Host="evil.example").status_code == 403
    assert post(access, "embeddings", {}).status_code == 404
    assert engine.alive
    assert access.inside == 0


JSON_VALUES: list[Any] = [None, True, False, 5, -1, 1.5, 10**30, "", "x", [], [5], [None], {}, {"a": 1}]
PARTS = [{"type": "text", "text": one} for one in JSON_VALUES] + [
    {kind: one, "type": kind} for kind in ("image_url", "input_audio", "video_url") for one in JSON_VALUES
]


def odd_messages() -> Iterator[Any]:
    """Messages in which one field has each type of JSON."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    for one in JSON_VALUES:
        yield one
        yield {"role": one, "content": "x"}
        yield {"role": "user", "content": one}
        yield {"role": "user", "content": [one]}
        yield {"role": "user", "content": [{"type": one, "text": "x"}]}
        for key in ("tool_calls", "name", "tool_call_id", "reasoning_content", "function_call", "refusal"):
            yield {"role": "assistant", "content": "x", key: one}
        yield {"role": "tool", "content": one, "tool_call_id": one}
        yield {**answer, "tool_calls": [one]}
        for key in ("id", "type", "function"):
            yield {**answer, "tool_calls": [{**call, key: one}]}
        for key in ("name", "arguments"):
            yield {**answer, "tool_calls": [{**call, "function": {**call["function"], key: one}}]}
        yield {**answer, "tool_calls": [{**call, "function": {"name": "f", "arguments": json.dumps(one)}}]}
    for part in PARTS:
        yield {"role": "user", "content": [part]}


def odd_bodies(kind: type[_Request], body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The field and a body in which it has each type of JSON."""
    for one in JSON_VALUES:
        for name in kind.model_fields:
            yield name, {**body, name: one}
        for name in ("stop", "stop_token_ids", "tools", "messages", "prompt", "response_format", "stream_options"):
            if name in kind.model_fields:
                yield name, {**body, name: [one]}
                yield name, {**body, name: {"a": one}}
        for key in ("type", "function"):
            tool = {"type": "function", "function": {"name": "f"}}
            yield "tools", {**body, "tools": [{**tool, key: one}]}
        for key in ("name", "description", "parameters", "strict"):
            yield "tools", {**body, "tools": [{"type": "function", "function": {"name": "f", key: one}}]}
        yield "tools", {**body, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": one}}}]}
        if kind is ChatRequest:
            yield "chat_template_kwargs", {**body, "chat_template_kwargs": {"enable_thinking": one}}


@pytest.mark.slow
def test_every_field_of_every_type_is_answered_or_refused_by_name(access: Access) -> None:
    chat: dict[str, Any] = {"model": "one", "messages": ASKED, "max_tokens": 1}
    text: dict[str, Any] = {"model": "one", "prompt": "x", "max_tokens": 1}
    cases = [("chat/completions", name, body) for name, body in odd_bodies(ChatRequest, chat)]
    cases += [("completions", name, body) for name, body in odd_bodies(CompletionRequest, text)]
    cases += [("chat/completions", "messages", {**chat, "messages": [*ASKED, one]}) for one in odd_messages()]
    cases += [(path, None, one) for path in ("completions", "chat/completions") for one in JSON_VALUES]  # pyright: ignore

    async def send(_client: openai.AsyncOpenAI) -> list[httpx.Response]:
        headers = {"Content-Type": "application/json"}
        urls = [(f"http://localhost/v1/{path}", json.dumps(body).encode()) for path, _, body in cases]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(access, raise_app_exceptions=False)) as http:  # pyright: ignore
            return [await http.post(url, content=content, headers=headers) for url, content in urls]

    for (path, name, body), found in zip(cases, with_client(access, send), strict=True):
        error = {} if found.status_code == 200 else found.json()["error"]
        at_once = name == "model" and found.status_code == 404
        assert found.status_code in (200, 400) or at_once, (path, name, body, found.text)
        assert not error or name is None or error["param"] == name, (path, name, body, found.text)


def test_keys_and_limits(engine: Engine) -> None:
    access = build_app(engine, key="a-key-of-sufficient-length", body=1 << 20, queue=1)

    async def models(client: openai.AsyncOpenAI) -> int:
        return len([one async for one in client.models.list()])

    for wrong in ("another-key-of-that-length", "a-key-of-sufficient-length2", "é"):
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
            with_client(access, models, key=wrong)
    assert with_client(access, models, key=access.key) == 3

    async def health(client: openai.AsyncOpenAI) -> int:
        return (await client._client.get("http://elsewhere/health")).status_code

    assert with_client(access, health) == 200  # needs no key

    async def two(client: openai.AsyncOpenAI) -> list[Any]:
        more: Any = {"model": "one", "prompt": PROMPT}
        calls = [client.completions.create(**more) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = with_client(access, two, key=access.key)
    (refused,) = [one for one in answers if isinstance(one, openai.RateLimitError)]
    assert int(refused.response.headers["retry-after"]) > 0
    access.draining = True
    with pytest.raises(openai.InternalServerError) as caught:
        with_client(access, models, key=access.key)
    assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_generation(
    stream: bool, engine: Engine, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": stream}
    jobs: list[Any] = []
    lane: Any = engine.models["one"].lane
    submit = lane.submit
    monkeypatch.setattr(lane, "submit", lambda job: (jobs.append(job), submit(job)))
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"},
        "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "client": None, "root_path": "",
    }  # fmt: skip

    async def run() -> None:
        sent = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if sent:
                return sent.pop()
            while not (jobs and len(jobs[0].made) > 3):
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None: ...

        await asyncio.wait_for(access(scope, receive, send), LIMIT)

    in_a_loop(run())
    (job,) = jobs
    assert job.cancelled
    assert len(job.made) < 500
    until(lambda: not lane._manager.batch_processor.scheduler.active_requests, "the end of the generation")
    assert not lane._router.jobs
    assert access.inside == 0


def test_a_choice_that_fails_ends_one_request(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own settings are not limited; its requests must not take others along."""
    alone = complete(access, max_tokens=40)["choices"][0]["text"]
    settings = ChatRequest.settings

    def own(request: Any, given: GenerationSection) -> GenerationSection:
        penalty = 1e-300 if request.seed == 1 else 1.0
        return settings(request, given.model_copy(update={"repetition_penalty": penalty}))

    monkeypatch.setattr(_Request, "settings", own)

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        more: Any = {"model": "one", "prompt": PROMPT, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
        calls = [client.completions.create(**more, seed=seed) for seed in (0, 1, 2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, failed, last = with_client(access, ask)
    assert isinstance(failed, openai.InternalServerError)
    assert failed.code == "generation_failed"
    assert [one.choices[0].text for one in (first, last)] == [alone] * 2


def test_a_temperature_that_would_overflow_is_greedy(access: Access) -> None:
    wanted = complete(access)["choices"][0]["text"]
    for temperature in (1e-40, 9e-4):
        assert complete(access, temperature=temperature)["choices"][0]["text"] == wanted
    assert complete(access, temperature=1e-3, seed=1)["choices"][0]["finish_reason"] == "length"


def test_small_forms_of_the_api(access: Access) -> None:
    """No tokens, a list with one prompt, counts in a stream, fields without effect."""
    none = complete(access, max_tokens=0, return_token_ids=True)
    assert (none["choices"][0]["token_ids"], none["choices"][0]["finish_reason"]) == ([], "length")
    assert none["usage"]["completion_tokens"] == 0
    for prompt in ("a", PROMPT):
        one, listed = (complete(access, prompt=given)["choices"][0]["text"] for given in (prompt, [prompt]))
        assert listed == one

    async def ask(client: openai.AsyncOpenAI) -> None:
        more: Any = {"model": "one", "messages": ASKED, "reasoning_effort": "low", "verbosity": "low", "stream": True}
        stream = await client.chat.completions.create(**more, stream_options={"include_usage": True})
        *parts, last = [one.model_dump(exclude_unset=True) async for one in stream]
        assert [one["usage"] for one in parts] == [None] * len(parts)
        assert last["usage"]["completion_tokens"] > 0
        async for one in await client.chat.completions.create(**more):
            assert "usage" not in one.model_fields_set

    with_client(access, ask)


def test_variables_of_the_template_are_no_programs(
    engine: Engine, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat: dict[str, Any] = {"model": "one", "messages": ASKED, "max_tokens": 1, "return_token_ids": True}
    tokenizer = engine.models["one"].tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ a }} {{ b }} {{ c }} {{ d }}")
    given = {"a": "x", "b": 3, "c": 0.5, "d": None}
    told = post(access, "chat/completions", {**chat, "chat_template_kwargs": given}).json()["choices"][0]
    assert tokenizer.decode(told["prompt_token_ids"]) == "x 3 0.5 None"
    reserved = (
        "chat_template tokenize return_dict return_tensors return_anything add_generation_prompt tools documents self "
        "padding continue_final_message truncation max_length processor_kwargs tokenizer_kwargs conversation messages"
    )
    for wrong in [*({name: "a"} for name in reserved.split()), {"a": [1]}, {"a": {}}]:
        error = post(access, "chat/completions", {**chat, "chat_template_kwargs": wrong}).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_request", "chat_template_kwargs"), wrong


def test_logits_that_are_not_finite_end_one_request(engine: Engine, access: Access) -> None:
    weight: Any = engine.shared.causal.get_input_embeddings().weight
    before = weight.data[77].clone()
    weight.data[77] = float("nan")
    try:
        found = post(access, "completions", {"model": "one", "prompt": [5, 77], "max_tokens": 4})
    finally:
        weight.data[77] = before
    assert (found.status_code, found.json()["error"]["code"]) == (500, "generation_failed")
    assert complete(access)["choices"][0]["finish_reason"] == "length"


def test_a_failed_forward_pass_ends_its_requests_only(
    engine: Engine, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = complete(access)["choices"]
    forward = engine.shared.causal.forward

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.shared.causal, "forward", fails)
    found = post(access, "completions", {"model": "one", "prompt": PROMPT})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "generation_failed")
    until(lambda: not engine.alive, "the end of the engine's thread")
    monkeypatch.setattr(engine.shared.causal, "forward", forward)
    assert complete(access)["choices"] == before
    assert engine.alive


def test_tools_are_rendered_and_their_calls_read(
    engine: Engine, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine.models["one"]
    said = '<tool_call>\n{"name": "width", "arguments": {"of": "bf16"}}\n</tool_call>'
    tokens = [*served.tokenizer.encode(said, add_special_tokens=False), *served.ends]
    names = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    template = names + "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    prompts: list[list[int]] = []

    def scripted(jobs: Any, scores: torch.Tensor) -> torch.Tensor:
        made = []
        for job in jobs:
            prompts.append(job.ids)
            token = tokens[len(job.made)]
            job.made.append(token)
            job.emit(Token(token))
            made.append(token)
        return torch.tensor(made)

    monkeypatch.setattr("halftune.serve.batching.choose", scripted)
    tools = [{"type": "function", "function": {"name": "width", "parameters": {"type": "object"}}}]

    async def ask(client: openai.AsyncOpenAI) -> None:
        more: Any = {"model": "one", "messages": ASKED, "tools": tools, "max_tokens": 100}
        whole = (await client.chat.completions.create(**more)).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("width", {"of": "bf16"})
        choices = [one.choices[0] async for one in await client.chat.completions.create(**more, stream=True)]
        (call,) = [call for one in choices for call in one.delta.tool_calls or []]
        assert call.function is not None
        assert call.function.name == "width"
        assert choices[-1].finish_reason == "tool_calls"
        without = (await client.chat.completions.create(**more, tool_choice="none")).choices[0]
        assert (without.message.tool_calls, without.message.content) == (None, said)

    with_client(access, ask)
    assert str(served.tokenizer.decode(prompts[0])).startswith("widthHow")
    assert str(served.tokenizer.decode(prompts[-1])).startswith("How")


@torch.no_grad()
def test_adapters_with_an_embedding_of_their_own_answer_as_alone(tmp_path: Path) -> None:
    """The head is tied, so its copies are too."""
    base, ids = checkpoint(tmp_path / "base", vocab_size=4096, initializer_range=0.2), torch.tensor([PROMPT])
    for rank in (4, 5):
        adapter = {"type": "lora", "rank": rank, "modules_to_save": ["embed_tokens"]}
        finished_run(tmp_path / f"own{rank}", base, adapter=adapter)
    finished_run(tmp_path / "plain", base)
    runs, name = open_runs([str(tmp_path / one) for one in ("own4", "own5", "plain")])
    made = Engine(runs, name, None)
    for one, run in runs.items():
        wanted = open_session(run).model(ids).logits
        with made.shared.answering(made.models[one].adapter) as causal:
            torch.testing.assert_close(causal(ids).logits, wanted, rtol=0, atol=1e-5)
    made.close()


def test_runs_that_cannot_be_served_together(folders: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    other = finished_run(tmp_path / "other", checkpoint(base, vocab_size=4096))
    full = finished_run(tmp_path / "full", base, adapter="none")
    of_one = json.loads((folders["one"] / "resolved.yaml").read_text())["model"]
    model = {**of_one, "tokens": {"add": ["<a>"]}}
    added = finished_run(tmp_path / "added", of_one["name_or_path"], model=model)
    cases: list[tuple[list[Path], type[HalftuneError], str]] = [
        ([folders["one"], folders["one"]], ConfigError, "serve.duplicate_name"),
        ([folders["one"], other], ModelError, "serve.different_base"),
        ([other, full], ModelError, "serve.different_base"),
        ([folders["one"], added], ModelError, "serve.different_base"),
        ([added, folders["one"]], ModelError, "serve.different_base"),
    ]
    image_model(tmp_path / "seeing", "qwen2_vl")
    write_image(tmp_path / "one.png", 60, 40)
    data = {"train": str(write_rows(tmp_path, ROWS)), "images": True}
    pair = [
        finished_run(tmp_path / f"up_to_{most}", tmp_path / "seeing", data={**data, "image_max_pixels": most})
        for most in (4000, 8000)
    ]
    cases.append((pair, ModelError, "serve.different_base"))
    for targets, kind, code in cases:
        with pytest.raises(kind) as caught:
            open_runs([str(one) for one in targets])
        assert caught.value.code == code
    runs, name = open_runs([str(full)])
    assert (list(runs), name) == (["full"], None)
    reward = finished_run(tmp_path / "reward", base, method={"type": "reward"}, data={"train": "gone.jsonl"})
    with pytest.raises(ModelError) as caught:
        open_runs([str(reward)])
    assert caught.value.code == "infer.reward_model"


@pytest.mark.parametrize("kind", ["qwen3_5-tiny", "gpt2"])
def test_what_cannot_be_batched_answers_one_by_one_as_chat_does(kind: str, tmp_path: Path) -> None:
    """Linear layers are known beforehand; the attention of gpt2 has no place for pages, which a trial finds."""
    if kind == "gpt2":
        made: Any = a_model(kind, vocab_size=4096, max_position_embeddings=512)
        made.save_pretrained(tmp_path / "base")
    else:
        checkpoint(tmp_path / "base", like=kind, vocab_size=4096)
    runs, name = open_runs([str(finished_run(tmp_path / "run", tmp_path / "base"))])
    wanted = open_session(runs["run"]).reply(ASKED, tuned=True)
    engine = Engine(runs, name, None)
    try:
        assert not engine.batched

        async def ask(client: openai.AsyncOpenAI) -> list[Any]:
            calls = [client.chat.completions.create(model="run", messages=ASKED) for _ in range(3)]  # pyright: ignore
            return await asyncio.gather(*calls)

        answers = with_client(build_app(engine, key="", body=1 << 20, queue=8), ask)
    finally:
        engine.close()
    assert [one.choices[0].message.content for one in answers] == [wanted] * 3


@pytest.mark.slow
def test_images_are_seen(tmp_path: Path) -> None:
    """As chat sees them, by data URLs; the base answers, too."""
    image_model(tmp_path / "model", "qwen2_vl")
    recipe = {
        "model": {"name_or_path": str(tmp_path / "model")},
        "precision": "fp32",
        "adapter": "lora",
        "data": {"train": str(write_rows(tmp_path, ROWS)), "images": True},
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
        "generation": {"max_new_tokens": 6},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    loaded = load_config(tmp_path / "recipe.yaml")
    train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model)))
    picture = base64.b64encode(write_image(tmp_path / "one.png", 60, 40).read_bytes()).decode()
    url = f"data:image/png;base64,{picture}"
    runs, name = open_runs([str(tmp_path / "run")])
    session = open_session(runs["run"])
    parts = [{"type": "image", "ref": session.media(url)}, {"type": "text", "text": "What is it?"}]
    wanted = session.reply([{"role": "user", "content": parts}], tuned=True)
    asked = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    engine = Engine(runs, name, None)
    try:
        assert not engine.batched
        access = build_app(engine, key="", body=1 << 20, queue=8)
        messages = [{"role": "user", "content": asked}]
        found = post(access, "chat/completions", {"model": "run", "messages": messages}).json()
        assert found["choices"][0]["message"]["content"] == wanted
        assert found["usage"]["prompt_tokens"] > 20
        url = "http://localhost/cat.png"
        refused = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        assert post(access, "chat/completions", {"model": "run", "messages": refused}).status_code == 400
    finally:
        engine.close()


def test_a_cache_that_is_too_small_for_all_changes_no_answer(
    folders: dict[str, Path], access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests lose their place in the cache and begin again; prompts are read in parts."""
    asked = [{"prompt": [number] * 30 + PROMPT, "max_tokens": 60, "return_token_ids": True} for number in range(9, 13)]
    wanted = [complete(access, **one)["choices"][0] for one in asked]
    monkeypatch.setattr(engine_module, "cache_tokens", lambda *_: 4 * PAGE)
    monkeypatch.setattr("halftune.serve.batching._QUERY_TOKENS", 16)
    small = Engine(*open_runs([str(folders["one"])]), None)
    again: list[int] = []
    restart = RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        RequestState, "create_equivalent_initial_request", lambda one: (again.append(1), restart(one))[1]
    )
    try:
        assert small.batched

        async def ask(client: openai.AsyncOpenAI) -> list[Any]:
            extra = {"ignore_eos": True, "return_token_ids": True}
            calls = [
                client.completions.create(model="one", prompt=one["prompt"], max_tokens=60, extra_body=extra)
                for one in asked
            ]
            return await asyncio.gather(*calls)

        answers = with_client(build_app(small, key="", body=1 << 20, queue=8), ask)
    finally:
        small.close()
    assert again
    assert [one.choices[0].token_ids for one in answers] == [one["token_ids"] for one in wanted]
    assert [one.usage.completion_tokens for one in answers] == [60] * 4


def test_a_tokenizer_of_bytes_is_never_cut(engine: Engine) -> None:
    tokenizer = engine.models["one"].tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    for _ in range(40):
        ids = torch.randint(3, 2000, (30,)).tolist() + tokenizer.encode("ünï 漢字 🙂", add_special_tokens=False)
        for strip in (False, True):
            stream = TextStream(tokenizer, ["\n\nnever"], skip_special=True, strip=strip)
            text = "".join([stream.add(one) for one in ids] + [stream.end()])
            whole = str(tokenizer.decode(ids, skip_special_tokens=True))
            assert text == (whole.strip() if strip else whole)
