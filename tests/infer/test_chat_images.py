"""Answers about images: those of transformers' own processor and model; conversations in a terminal."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_audio
import torch
from PIL import Image
from tiny_images import KINDS, ROWS, image_model, write_image, write_rows
from transformers import AutoModelForImageTextToText, AutoTokenizer

from halftune.config.facts.media import AUDIO_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ModelError
from halftune.data.media.audio import AudioProcessor
from halftune.data.media.processor import MediaProcessor, media_settings
from halftune.data.media.reference import refer
from halftune.data.media.sound import header, samples
from halftune.hardware.catalogue import lookup
from halftune.infer.lines import serve
from halftune.infer.repl import Repl
from halftune.infer.session import ChatSession, open_session
from halftune.model.generate import generate_reply
from halftune.model.result.completed_run import open_run
from halftune.plan import resolve
from halftune.train.trainer import train

ASKED = "What is in the picture?"


def recipe(folder: Path, **training: Any) -> Any:
    """The loaded recipe of a run on ``folder / "model"``."""
    tree = {
        "model": {"name_or_path": str(folder / "model")},
        "precision": "fp32",
        "adapter": "lora",
        "data": {"train": str(write_rows(folder, ROWS)), "images": True},
        "training": {"output_dir": str(folder / "run"), **training},
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    return load_config(folder / "recipe.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = image_model(tmp_path / "model", kind)
    config = recipe(tmp_path).run
    plan = resolve(config, lookup("cpu"), read_model_facts(config.model))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = MediaProcessor(media_settings(config, folder), tokenizer)
    files = [write_image(tmp_path / "one.png", 60, 40), write_image(tmp_path / "two.png", 24, 80)]
    parts = [{"type": "image", "ref": refer(file.name, file.parent)} for file in files]
    messages = [
        {"role": "user", "content": [parts[0], {"type": "text", "text": ASKED}]},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": [parts[1], {"type": "text", "text": "And here?"}]},
    ]
    made: list[torch.Tensor] = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *given, **more: made.append(generate(*given, **more)) or made[-1])

    def reply(asked: list[dict[str, Any]]) -> list[int]:
        generate_reply(model, tokenizer, asked, GenerationSection(max_new_tokens=5), plan, images=images)
        return made[-1][0].tolist()

    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opened = [Image.open(file).convert("RGB") for file in files]
    given = [opened] if images.family.nested else opened
    inputs = images._own(text=[text], images=given, return_tensors="pt", add_special_tokens=False)
    inputs["pixel_values"] = inputs["pixel_values"].float()  # Llama 4's are bf16
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    wanted = generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=ends)[0].tolist()
    assert reply(messages) == wanted


@pytest.fixture
def session(tmp_path: Path) -> ChatSession:
    image_model(tmp_path / "model", "qwen2_5_vl")
    loaded = recipe(tmp_path, max_steps=1)
    train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model)))
    return open_session(open_run(str(tmp_path / "run"), []))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_conversation_keeps_its_images(session: ChatSession, tmp_path: Path, capsys: Any) -> None:
    repl, file = Repl(session), write_image(tmp_path / "one.png", 60, 40)
    for line in (f'/image "{file}"', ASKED, "And now?"):
        repl.handle(line)
    assert not session.attached
    first, _, last, _ = session.history
    assert [part["type"] for part in first["content"]] == ["image", "text"]
    assert last["content"] == "And now?"
    assert not capsys.readouterr().err
    for line in ("/image gone.png", f"/image {tmp_path / 'rows.jsonl'}", f"/image {tmp_path}", "/image"):
        repl.handle(line)
    assert not session.attached
    repl.handle(f"/image {file}")
    file.write_bytes(b"x")
    repl.handle(ASKED)
    assert capsys.readouterr().err
    assert len(session.history) == 4
    repl.handle("/reset")
    assert not session.attached
    assert not session.history
    repl.handle("Look: <|image_pad|>")  # no image belongs to it
    assert len(session.history) == 2


def test_a_model_that_was_not_trained_on_images_takes_none(session: ChatSession, tmp_path: Path) -> None:
    session.images = None
    with pytest.raises(ModelError) as error:
        session.attach(str(write_image(tmp_path / "one.png", 8, 8)))
    assert error.value.code == "infer.bad_image"


@pytest.mark.filterwarnings("ignore")
def test_programs_send_images_as_data_urls_and_no_paths(session: ChatSession, tmp_path: Path) -> None:
    file = write_image(tmp_path / "one.png", 60, 40)
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": str(file)}},
        {"type": "image_url", "image_url": {"url": f"file://{file}"}},
        {"type": "image", "path": str(file)},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url"},
        "text",
    ]
    asked = [
        json.dumps({"id": n, "messages": [{"role": "user", "content": [part, {"type": "text", "text": ASKED}]}]})
        for n, part in enumerate(parts)
    ]
    events = io.StringIO()
    serve(session, io.StringIO("\n".join(asked)), events)
    ready, *told = [json.loads(line) for line in events.getvalue().splitlines()]
    assert ready["images"]
    ends = {one["id"]: one.get("code") for one in told if one["event"] in ("end", "error")}
    bad, unread = "infer.bad_request", "infer.bad_image"
    assert ends == {0: None, 1: bad, 2: bad, 3: bad, 4: unread, 5: bad, 6: bad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen2_audio", "qwen3_omni_moe_thinker", "gemma4_unified", "voxtral"])
def test_answers_to_sounds_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    tiny_audio.audio_model(tmp_path / "model", kind)
    tiny_audio.write_rows(tmp_path, tiny_audio.ROWS)
    tree = {
        "model": {"name_or_path": str(tmp_path / "model")},
        "precision": "fp32",
        "data": {"train": str(tmp_path / "rows.jsonl"), "audio": True},
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
        "generation": {"max_new_tokens": 5, "temperature": 0},
        "logging": {"progress": False, "probes": 0},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(tmp_path / "recipe.yaml")
    train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model)))
    session = open_session(open_run(str(tmp_path / "run"), []))
    file = tiny_audio.write_sound(tmp_path / "new.wav", 0.8)
    assert session.attach(str(file), "audio").rate == 16_000
    with pytest.raises(ModelError):
        session.attach(str(file), "image")
    encoded = file.read_bytes()
    tuned = cast(Any, session.model)
    tokenizer: Any = session.tokenizer
    asked = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What?"}]}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    own = AudioProcessor(str(tmp_path / "model"), kind, tokenizer, None)
    wave = samples(encoded, *header(encoded), 16_000)
    made = tiny_audio.processed(own, text, [wave])
    taken = ("input_ids", "attention_mask", "input_features", AUDIO_FAMILIES[kind].mask)
    wanted = tuned.generate(
        **{name: made[name] for name in taken if name}, max_new_tokens=5, do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    assert (
        session.answer("What?", tuned=True)
        == tokenizer.decode(wanted[0, made["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    )
