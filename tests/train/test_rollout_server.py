"""Answers that a server samples: the requests of vLLM's API, against a server that speaks it."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from patience import LIMIT
from peft import PeftModel
from process_group import curve, in_processes, train_all
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import ServerSection
from halftune.core.errors import HalftuneError
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve
from halftune.train.rollouts.server import FOLDER, ServerSampler
from halftune.train.run_folder.same_run import differences, flat
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent


class Server(ThreadingHTTPServer):
    """Samples with the base model and the adapters that it is told to load, as vLLM does; keeps what it was asked."""

    def __init__(self, base: Path, shift: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.base, self.shift, self.fail = base, shift, False
        self.instead: bytes | None = None  # of an answer; empty: one byte after the other, without end
        self.elsewhere: str | None = None
        self.adapters: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []
        self.lock, self.over = threading.Lock(), threading.Event()  # over: what is without end ends

    def sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        model, random = self.adapters[asked["model"]], torch.Generator().manual_seed(asked["seed"])
        ids, values = list(asked["prompt"]), []
        while len(values) < asked["max_tokens"]:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1] / asked["temperature"]
            chances = logits.log_softmax(-1)
            ids.append(int(torch.multinomial(chances.exp(), 1, generator=random)))
            values.append(float(chances[ids[-1]]) - self.shift)
            if ids[-1] in asked["stop_token_ids"]:
                break
        return {"token_ids": ids[-len(values) :], "logprobs": {"token_logprobs": values}}


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.reply({"data": []})

    def do_POST(self) -> None:
        asked, own = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with own.lock:
            own.asked.append((self.path, asked))
            if self.path == "/v1/load_lora_adapter":
                base = AutoModelForCausalLM.from_pretrained(own.base)
                own.adapters[asked["lora_name"]] = PeftModel.from_pretrained(base, asked["lora_path"]).eval()
                self.reply(None)
            elif self.path == "/v1/unload_lora_adapter":
                del own.adapters[asked["lora_name"]]
                self.reply(None)
            elif own.elsewhere is not None:
                self.send_response(302)
                self.send_header("Location", own.elsewhere)
                self.end_headers()
            elif own.instead is not None:
                self.misbehave(own.instead)
            elif own.fail:
                self.send_error(503)
            else:
                self.reply({"choices": [own.sample(asked)]})

    def misbehave(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the other side has enough
            self.wfile.write(body)
            for _ in range(int(20 * LIMIT) if not body else 0):
                if self.server.over.wait(0.05):
                    break
                self.wfile.write(b" ")

    def reply(self, value: Any) -> None:
        body = b"Success" if value is None else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(small_model: Path) -> Iterator[Server]:
    made = Server(small_model)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.over.set()
    made.shutdown()
    made.server_close()


def recipe(server: Server, folder: Path, *words: str, adapter: str = "lora", world_size: int = 1) -> Any:
    (folder / "rewards.py").write_text(
        "def size(completions, **_):\n    return [len(set(one)) for one in completions]\n"
    )
    rewards = json.dumps([{"function": "size", "file": str(folder / "rewards.py")}])
    keys = [f"model.name_or_path={server.base}", "precision=fp32", f"adapter={adapter}", f"method.rewards={rewards}"]
    keys += ["method.num_generations=2", "method.max_completion_length=4", "training.max_steps=2"]
    keys += [f"method.server=http://127.0.0.1:{server.server_port}", f"training.output_dir={folder / 'run'}"]
    keys += [f"training.per_device_train_batch_size={2 // world_size}", "training.learning_rate=0.01"]
    loaded = load_config(
        ROOT / "configs" / "tiny" / "grpo.yaml", [*keys, "training.logging_steps=1", "logging.progress=false", *words]
    )
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model), world_size=world_size)


def test_a_server_samples_with_the_adapter_of_each_step(server: Server, tmp_path: Path) -> None:
    folder = train(*recipe(server, tmp_path)).folder
    paths = [path for path, _ in server.asked]
    assert paths.count("/v1/load_lora_adapter") == 2
    assert paths.count("/v1/unload_lora_adapter") == 1
    assert paths.count("/v1/completions") == 2 * 2 * 2  # steps, prompts, answers
    assert len(server.adapters) == len(list((folder / FOLDER).iterdir())) == 1
    # the same weights on both sides: the same log-probabilities, before and after the update
    assert max(curve(folder, "server_gap")) < 1e-4
    assert curve(folder, "server_weight") == pytest.approx([1, 1], abs=1e-4)
    seeds = [asked["seed"] for path, asked in server.asked if path == "/v1/completions"]
    assert len(set(seeds)) == len(seeds)


def test_answers_of_other_probabilities_are_weighted(server: Server, tmp_path: Path) -> None:
    server.shift = math.log(2)
    folder = train(*recipe(server, tmp_path, "method.num_iterations=2")).folder
    assert curve(folder, "server_weight") == pytest.approx([2, 2], abs=1e-3)
    assert curve(folder, "server_gap") == pytest.approx([math.log(2)] * 2, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_hand_over_one_adapter(server: Server, tmp_path: Path, strategy: str) -> None:
    made = recipe(server, tmp_path, f"distributed.strategy={strategy}", world_size=2)
    assert in_processes(2, train_all([made])) == [0, 0]
    assert [path for path, _ in server.asked].count("/v1/load_lora_adapter") == 2
    assert max(curve(tmp_path / "run", "server_gap")) < 1e-4


def test_a_server_that_fails_ends_the_run(server: Server, tmp_path: Path) -> None:
    server.fail = True
    with pytest.raises(HalftuneError) as error:
        train(*recipe(server, tmp_path))
    assert error.value.code == "train.server_failed"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server.server_port = closed.getsockname()[1]  # nobody is there
        with pytest.raises(HalftuneError) as error:
            train(*recipe(server, tmp_path))
    assert error.value.code == "train.server_failed"
    with pytest.raises(HalftuneError) as error:
        load_config(ROOT / "configs" / "tiny" / "grpo.yaml", ["method.server=localhost:8000"])
    assert error.value.code == "config.invalid_value"


def answer(ids: Any, values: Any) -> bytes:
    return json.dumps({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": values}}]}).encode()


HOSTILE = {
    "no token of the model": answer([10**6], [-1.0]),
    "no int32": answer([10**12], [-1.0]),
    "negative": answer([-1], [-1.0]),
    "fraction": answer([1.5], [-1.0]),
    "too many": answer([1] * 50, [-1.0] * 50),
    "NaN": answer([1], [math.nan]),
    "infinite": answer([1], [-math.inf]),
    "above one": answer([1], [50.0]),
    "nested": b"[" * 100_000,
    "large": b" " * (4 << 20),
    "without end": b"",
}


@pytest.fixture
def asking(server: Server) -> ServerSampler:
    section = GrpoMethod(type="grpo", rewards=["overlong"], max_completion_length=4)  # pyright: ignore[reportArgumentType]
    model = AutoModelForCausalLM.from_pretrained(server.base)
    run = cast(Any, SimpleNamespace(model=model, tokenizer=AutoTokenizer.from_pretrained(server.base), processes=1))
    where = ServerSection(url=f"http://127.0.0.1:{server.server_port}")
    return ServerSampler(run, section, where)


@pytest.mark.parametrize("kind", HOSTILE)
def test_answers_that_cannot_be_are_refused(server: Server, asking: ServerSampler, kind: str) -> None:
    server.instead = HOSTILE[kind]
    if endless := kind == "without end":
        asking.server = asking.server.model_copy(update={"timeout_seconds": 1})
    with pytest.raises(HalftuneError) as error:
        asking._answer(np.array([1, 2]), 0)
    assert error.value.code == "train.server_failed"
    assert ("timed out" in str(error.value)) is endless


def test_the_key_goes_to_the_named_host_only(
    server: Server, asking: ServerSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    reached: list[str] = []
    monkeypatch.setattr(Handler, "do_GET", lambda self: reached.append(self.path) or self.reply({}))
    server.elsewhere = f"http://localhost:{server.server_port}/stolen"
    with pytest.raises(HalftuneError) as error:
        asking._answer(np.array([1, 2]), 0)
    assert (error.value.code, reached) == ("train.server_failed", [])


def test_a_run_may_go_on_with_another_server() -> None:
    words = ("http://a:8000", "https://b:8000"), ("http://a:8000", "{url: http://a:8000, max_weight: 2}")
    recipe = ROOT / "configs" / "tiny" / "grpo.yaml"
    found = [[load_config(recipe, [f"method.server={one}", "adapter=lora"]).run for one in two] for two in words]
    one, other = ([flat(run.model_dump(mode="json")) for run in two] for two in found)
    assert differences(*one, harmless=False) == []
    assert len(differences(*other, harmless=False)) == 1


def test_headers_that_drip_have_a_limit_of_time(asking: ServerSampler) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        asking.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        over = threading.Event()

        def drip() -> None:
            with listening.accept()[0] as one, suppress(OSError):
                one.sendall(b"HTTP/1.1 200 OK\r\n")
                for _ in range(int(10 * LIMIT)):
                    if over.wait(0.1):
                        break
                    one.sendall(b"X-Slow: 1\r\n")

        thread = threading.Thread(target=drip)
        thread.start()
        asking.server = asking.server.model_copy(update={"timeout_seconds": 1})
        try:
            with pytest.raises(HalftuneError) as error:
                asking._answer(np.array([1, 2]), 0)
        finally:
            over.set()
            thread.join()
    assert error.value.code == "train.server_failed"
    assert "timed out" in str(error.value)


@pytest.mark.parametrize(("rank", "init", "fits"), [(512, "default", 1), (513, "default", 0), (257, "pissa", 0)])
def test_a_server_has_a_highest_rank(server: Server, tmp_path: Path, rank: int, init: str, fits: int) -> None:
    adapter = f"{{rank: {rank}, init: {init}}}"
    if fits:
        _, plan = recipe(server, tmp_path, "distributed.strategy=fsdp2", adapter=adapter, world_size=2)
        assert plan.parallel.gather_once is None  # nothing is sampled here
        return
    with pytest.raises(HalftuneError) as error:
        recipe(server, tmp_path, adapter=adapter)
    assert error.value.code == "config.keys_conflict"
    assert error.value.what.startswith("adapter.rank: ")


@pytest.mark.parametrize("adapter", ["none", "{use_dora: true}", "{modules_to_save: [lm_head]}"])
def test_a_server_needs_an_adapter_that_it_loads(server: Server, tmp_path: Path, adapter: str) -> None:
    with pytest.raises(HalftuneError) as error:
        recipe(server, tmp_path, adapter=adapter)
    assert [one.code for one in getattr(error.value, "problems", ()) or (error.value,)] == ["config.keys_conflict"]
