"""Chat: finds a run's result, answers under its plan with and without the training, survives interrupts and typos."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

import pytest
import torch
from patience import LIMIT, until
from tiny_model import checkpoint, finished_run

from halftune.cli import main
from halftune.core.errors import ConfigError, DtypeContractError, ModelError, PlanError
from halftune.hardware.catalogue import lookup
from halftune.infer.lines import serve
from halftune.infer.repl import Repl
from halftune.infer.session import open_session
from halftune.model.generate import OnText
from halftune.model.result.completed_run import open_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("base") / "model", torch.bfloat16, vocab_size=4096)


@pytest.fixture(scope="module")
def adapter_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs") / "lora", base)


@pytest.fixture(scope="module")
def full_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("runs") / "full", base, adapter="none", precision="bf16")


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What the user types, or raises, one line after another; then the end of input."""
    waiting = iter(lines)

    def read(prompt: str = "") -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_a_run_is_found_by_folder_result_or_recipe(adapter_run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    shutil.copy(adapter_run / "resolved.yaml", recipe)
    for target in (adapter_run, adapter_run / "final", recipe):
        assert open_run(str(target)).folder == adapter_run
    assert open_run(str(adapter_run)).is_adapter


def test_what_is_missing_is_said(adapter_run: Path, tmp_path: Path) -> None:
    for nothing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ModelError) as refused:
            open_run(str(nothing))
        assert refused.value.code == "config.not_a_run_folder"
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(adapter_run / "resolved.yaml", unfinished)
    with pytest.raises(ModelError, match=r"has no result yet"):
        open_run(str(unfinished))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((adapter_run / "resolved.yaml").read_text().replace(str(adapter_run), str(tmp_path / "not-yet")))
    with pytest.raises(ModelError, match="has not been trained"):
        open_run(str(recipe))
    with pytest.raises(ConfigError, match=r"generation\.temprature"):
        open_run(str(adapter_run), ["generation.temprature=1"])


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_with_and_without_what_was_trained(kind: str, adapter_run: Path, full_run: Path, base: Path) -> None:
    from tiny_model import section
    from transformers import AutoModelForCausalLM

    from halftune.config.sections.training import GenerationSection
    from halftune.model.generate import generate_reply
    from halftune.model.tokenizer.tokenizer import load_tokenizer

    session = open_session(open_run(str(adapter_run if kind == "adapter" else full_run)))
    trained, untrained = session.answer("hello", tuned=True), session.answer("hello", tuned=False)
    assert trained != untrained
    assert session.answer("hello", tuned=True) == trained
    assert session.history == []
    dtype = torch.float32
    alone = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    ask = [{"role": "user", "content": "hello"}]
    tokenizer = load_tokenizer(section("builtin:qwen2-tiny"))
    assert untrained == generate_reply(alone, tokenizer, ask, GenerationSection(max_new_tokens=8), session.run.plan)


def test_the_plan_of_training_holds(full_run: Path) -> None:
    session = open_session(open_run(str(full_run)))
    assert session.run.plan.precision.compute.value == "bf16"
    seen = []
    session.model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    session.answer("hello", tuned=True)
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in session.model.parameters()} == {torch.bfloat16}
    assert not session.run.plan.precision.autocast.value
    assert session.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_conversation(adapter_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    session = open_session(open_run(str(adapter_run)))
    asked: list[tuple[list[dict[str, str]], bool]] = []

    def answer(text: str, *, tuned: bool, on_text) -> str:
        asked.append((session.messages(text), tuned))
        on_text(f"to {text}" if tuned else f"base {text}")
        return "x"

    monkeypatch.setattr(session, "answer", answer)
    lines = (
        "one",
        "",
        "/system Be brief.",
        "two",
        "/compare",
        "/adapter off",
        "three",
        "/adapter maybe",
        "/hepl",
        "/reset",
    )
    typed(monkeypatch, *lines, "four", "/quit", "never")
    Repl(session).loop()
    turns = [[message["content"] for message in messages] for messages, _ in asked]
    assert turns == [
        ["one"],
        ["Be brief.", "one", "to one", "two"],
        ["Be brief.", "one", "to one", "two"],
        ["Be brief.", "one", "to one", "two"],
        ["Be brief.", "one", "to one", "two", "to two", "three"],
        ["Be brief.", "four"],
    ]
    assert [tuned for _, tuned in asked] == [True, True, True, False, False, False]
    out = capsys.readouterr().out
    assert "trained> to two" in out
    assert "base> base two" in out
    assert "/adapter on or /adapter off" in out
    assert "unknown command /hepl · did you mean help?" in out


def test_interrupts_stop_the_answer_not_the_chat(
    adapter_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = open_session(open_run(str(adapter_run)))

    def answer(text: str, *, tuned: bool, on_text) -> str:
        on_text("half an ans")
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "answer", answer)
    typed(monkeypatch, KeyboardInterrupt, "tell me")
    Repl(session).loop()
    assert session.history[-1] == {"role": "assistant", "content": "half an ans"}
    assert "… stopped" in capsys.readouterr().out


def test_an_error_is_told_and_the_chat_goes_on(
    adapter_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = open_session(open_run(str(adapter_run)))
    typed(monkeypatch, "word " * 5000, "/compare", "ok")
    Repl(session).loop()
    captured = capsys.readouterr()
    assert "limit is 4,096 · start a new conversation (/reset in chat)" in captured.err
    assert [message["content"] for message in session.history if message["role"] == "user"] == ["ok"]


def test_one_question_on_the_command_line(adapter_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replies = []
    for extra in ([], ["--base"], ["generation.max_new_tokens=2"]):
        with pytest.raises(SystemExit) as left:
            main(["chat", str(adapter_run), *extra, "--prompt", "hello"])
        assert left.value.code == 0
        replies.append(capsys.readouterr().out)
    session = open_session(open_run(str(adapter_run)))
    assert replies[0] == session.answer("hello", tuned=True) + "\n"
    assert replies[1] == session.answer("hello", tuned=False) + "\n"
    assert len(replies[2]) < len(replies[0])


def test_a_missing_run_is_told_without_torch_or_traceback(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom halftune.cli import main\n"
        "try:\n    main(['chat', sys.argv[1]])\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout == "False\n"
    assert done.stderr.startswith("halftune chat: ")
    assert "Traceback" not in done.stderr


def test_attention_that_only_the_training_machine_had_gives_way(
    adapter_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(adapter_run, folder)
    recipe = json.loads((folder / "resolved.yaml").read_text())
    recipe |= {"attention": "fa2", "precision": "bf16", "data": {"train": "gone.jsonl", "packing": True}}
    (folder / "resolved.yaml").write_text(json.dumps(recipe))
    with caplog.at_level(logging.WARNING, "halftune"):
        run = open_run(str(folder))
    assert run.plan.attention.softmax.value == "sdpa"
    assert "fa2 is unavailable" in caplog.text
    assert isinstance(open_session(run).answer("Hello", tuned=True), str)
    with pytest.raises(PlanError, match="fa2 is unavailable"):  # asked for here and now
        open_run(str(folder), ["attention=fa2"])


def recorded(adapter_run: Path, folder: Path, compute: str, **sections: object) -> str:
    """The run as if its plan had come to ``compute``."""
    shutil.copytree(adapter_run, folder)
    recipe = json.loads((folder / "resolved.yaml").read_text())
    (folder / "resolved.yaml").write_text(json.dumps({**recipe, "precision": "auto", **sections}))
    (folder / "plan.json").write_text(json.dumps({"precision": {"compute": {"value": compute, "reason": "then"}}}))
    return str(folder)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_auto_means_what_it_meant_in_training(
    compute: str, adapter_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = recorded(adapter_run, tmp_path / "run", compute)
    for machine in ("cpu", "cpu-amx"):  # whose own choices differ
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("halftune.model.result.completed_run.probe", lambda machine=machine: lookup(machine))
            assert open_run(run).plan.precision.compute.value == compute
            other = "fp32" if compute == "bf16" else "bf16"
            assert open_run(run, [f"precision={other}"]).plan.precision.compute.value == other
    assert not caplog.records


@pytest.mark.parametrize(
    "precision", ["auto", "fp16", {"compute": "fp16", "on_unsupported": "fallback"}], ids=["auto", "asked", "fallback"]
)
def test_a_format_that_only_the_training_machine_had_gives_way(
    precision: object, adapter_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr("halftune.model.result.completed_run.probe", lambda: lookup("cpu"))
    folder = recorded(adapter_run, tmp_path / "run", "fp16", precision=precision, attention="fa2")
    plan = open_run(folder).plan
    assert (plan.precision.compute.value, plan.attention.softmax.value) == ("fp32", "sdpa")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all(line.startswith("differs from training: ") for line in lines)
    assert "fp16 is slow" in lines[0] + lines[1]
    with pytest.raises(PlanError, match="fp16 is unavailable"):
        open_run(folder, ["precision={compute: fp16, on_unsupported: error}"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"precision": {"compute": {"value": "fp8"}}}'])
def test_a_damaged_record_of_the_plan_is_none(text: str, adapter_run: Path, tmp_path: Path) -> None:
    run = recorded(adapter_run, tmp_path / "run", "bf16", precision="fp32")
    (tmp_path / "run/plan.json").write_text(text)
    assert open_run(run).plan.precision.compute.value == "fp32"


def test_a_program_talks_in_lines_of_json(adapter_run: Path) -> None:
    session = open_session(open_run(str(adapter_run), ["generation.max_new_tokens=6"]))
    asked = [{"role": "user", "content": "What does len do?"}]
    requests = [
        {"id": 1, "messages": asked},
        {"id": 2, "messages": asked, "adapter": False, "generation": {"max_new_tokens": 2}},
        {"id": 3, "messages": asked, "generation": {"top_p": 7}},
        {"id": 4, "messages": [{"role": "user"}]},
        {"id": 5, "messages": asked, "generation": {"max_new_tokens": 3}},
    ]
    written = io.StringIO()
    text = "\n".join([*(json.dumps(one) for one in requests[:4]), "no json", json.dumps(requests[4])])
    serve(session, io.StringIO(text), written)
    events = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (events[0]["event"], events[0]["adapter"], events[0]["generation"]["max_new_tokens"]) == ("ready", True, 6)
    ends = {event["id"]: event for event in events if event["event"] == "end"}
    assert list(ends) == [1, 2, 5]
    for number, end in ends.items():
        pieces = [event["text"] for event in events if event["event"] == "text" and event["id"] == number]
        assert "".join(pieces).strip() == end["answer"]
        assert end["tokens"] == len(session.tokenizer(end["answer"], add_special_tokens=False).input_ids)
    for number, tuned in ((1, True), (2, False)):
        session.generation = session.generation.model_copy(update={"max_new_tokens": {1: 6, 2: 2}[number]})
        assert session.reply(asked, tuned=tuned) == ends[number]["answer"]
    errors = {event["id"]: event["message"] for event in events if event["event"] == "error"}
    assert list(errors) == [3, 4, None]
    assert "generation.top_p" in errors[3]
    assert "messages" in errors[4]
    assert "messages" in errors[None]


def test_an_answer_is_stopped_in_the_middle(adapter_run: Path) -> None:
    session = open_session(open_run(str(adapter_run), ["generation.max_new_tokens=200"]))
    asked = {"id": 1, "messages": [{"role": "user", "content": "Go on"}]}
    into, out = os.pipe()

    class Requests:
        """The lines of a pipe; ``taken`` counts those that have been dealt with."""

        taken = 0

        def __iter__(self) -> Iterator[str]:
            with os.fdopen(into) as lines:
                for line in lines:
                    yield line
                    self.taken += 1

    class Events(io.StringIO):
        sent = False

        def write(self, text: str) -> int:
            if '"text"' in text and not self.sent:
                self.sent = True
                os.write(out, b'{"stop": true}\n')
                until(lambda: requests.taken == 2, "the request to stop is read")
            return super().write(text)

    requests, written = Requests(), Events()
    os.write(out, json.dumps(asked).encode() + b"\n")
    thread = threading.Thread(target=serve, args=(session, cast(TextIO, requests), written))
    thread.start()
    until(lambda: '"end"' in written.getvalue() or not thread.is_alive(), "the answer ends")
    os.write(out, json.dumps({**asked, "id": 2, "generation": {"max_new_tokens": 2}}).encode() + b"\n")
    os.close(out)
    thread.join(LIMIT)
    events = [json.loads(line) for line in written.getvalue().splitlines()]
    end, following = (event for event in events if event["event"] == "end")
    assert end["stopped"]
    assert end["answer"] == "".join(event["text"] for event in events if event["event"] == "text" and event["id"] == 1)
    assert not following["stopped"]


def test_what_is_logged_while_an_answer_streams_comes_after_it(
    adapter_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = open_session(open_run(str(adapter_run)))
    package = logging.getLogger("halftune")
    console = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(package, "handlers", [console])

    def answer(text: str, *, tuned: bool, on_text: OnText) -> str:
        on_text("half ")
        package.getChild("precision").warning("query fp32 arrives")
        on_text("done")
        if text == "refused":
            raise DtypeContractError("no", code="precision.promoted")
        return "half done"

    monkeypatch.setattr(session, "answer", answer)
    Repl(session).handle("asked")
    Repl(session).handle("refused")
    assert capsys.readouterr().out == "model> half done\nquery fp32 arrives\n" * 2
