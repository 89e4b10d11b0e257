"""Audio in rows, from the file to the loss: ids and features equal to the processor's, gradients to transformers'."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import media_runs
import numpy as np
import pytest
import torch
from media_runs import media_recipe
from tiny_audio import EXTRACTOR, ROWS, audio_model, heard, rows_of, write_rows, write_sound
from transformers import (
    AutoModelForMultimodalLM,
    AutoTokenizer,
    Qwen2AudioProcessor,
    VoxtralRealtimeConfig,
)

from halftune.config.facts.media import REFUSED, check_processor
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.core.errors import ConfigError, DataError, ModelError, PlanError
from halftune.data.media.sound import header, samples
from halftune.data.preflight import validate_data
from halftune.data.sources.builtin.tones import RATE, rows
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.model.files.builtin import materialize
from halftune.model.result.completed_run import open_run
from halftune.plan import Plan, resolve
from halftune.train.batches.feed import Feed
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent


def recipe(folder: Path, kind: str, **changes: Any) -> tuple[Any, Plan]:
    model, rows = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        audio_model(model, kind)
    rows = rows if rows.exists() else write_rows(folder, rows_of(kind))
    return media_recipe(folder, rows, {"audio": True}, **changes)


def fed(loaded: Any, plan: Plan) -> Feed:
    return media_runs.fed(loaded, plan)[0]


def sound(file: Path) -> np.ndarray:
    encoded = file.read_bytes()
    return samples(encoded, *header(encoded), 16_000)


def load_tokenizer_id(folder: Path) -> int:
    return AutoTokenizer.from_pretrained(folder / "model").convert_tokens_to_ids("<|audio|>")


@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("form", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_samples_are_those_of_librosa(
    form: str, channels: int, rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``librosa.load``, as transformers loads a sound: soundfile, the mean of the channels, soxr."""
    soundfile, soxr = pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    integers, file = form.startswith("PCM"), tmp_path / "a.wav"
    loud = 0.9 if integers else 2.0
    soundfile.write(file, np.random.default_rng(0).uniform(-loud, loud, (4000, channels)), rate, subtype=form)
    expected = soundfile.read(file, dtype="float32", always_2d=True)[0].mean(axis=1)
    expected = expected if rate == 16_000 else soxr.resample(expected, rate, 16_000)
    assert np.array_equal(sound(file)[: len(expected)], expected)
    if integers:
        monkeypatch.setattr("halftune.data.media.sound.find_spec", lambda _: None)
        assert np.array_equal(sound(file)[: len(expected)], expected)


@pytest.mark.filterwarnings("ignore")
def test_samples_of_a_run_have_sounds(tmp_path: Path) -> None:
    """The answers are those of a chat; the report plays the sounds."""
    sounds = [str(write_sound(tmp_path / f"{name}.wav", 0.5, seed=name)) for name in (1, 2)]
    asked = ["<audio>What is it?", "<audio>What is it?", "What is red?"]
    samples = {"sample_prompts": asked, "sample_media": sounds, "progress": False}
    generation = {"max_new_tokens": 5, "temperature": 0}
    changes = {"logging": samples, "generation": generation, "adapter": {"type": "lora", "rank": 2}}
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "learning_rate": 0.1}
    train(*recipe(tmp_path, "qwen2_audio", training=training, **changes))
    rows = json.loads((tmp_path / "run" / "samples.json").read_text())["samples"]
    assert [row["prompt"] for row in rows] == asked
    assert [[one["file"] for one in row["media"]] for row in rows] == [["1.wav"], ["2.wav"], []]
    session = open_session(open_run(str(tmp_path / "run"), []))
    for row, sound in zip(rows, [*sounds, ""], strict=True):
        if sound:
            session.attach(sound, "audio")
        text = row["prompt"].removeprefix("<audio>")
        assert [session.answer(text, tuned=tuned) for tuned in (False, True)] == [row["before"], row["after"]]
        session.attached.clear()
    assert (tmp_path / "run" / "report.html").read_text().count("<audio ") == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"sample_media": ["1.wav"]}, "data.image_count"),
        ({"sample_prompts": ["<image>?"], "sample_media": ["1.wav"]}, "data.media_unsupported"),
        ({"sample_prompts": ["<audio>?"], "sample_media": ["gone.wav"]}, "data.bad_media"),
    ],
)
def test_files_of_samples_are_checked_before_the_run(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    loaded, _ = recipe(tmp_path, "qwen2_audio", logging={"sample_prompts": ["What?"], **changes})
    with pytest.raises(DataError) as error:
        validate_data(loaded.run)
    assert (error.value.code, error.value.where) == (code, "logging.sample_media")


@pytest.mark.filterwarnings("ignore")
def test_another_sound_is_another_run(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, ROWS)

    def start(steps: int, *allowed: str) -> Any:
        settings = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 1, "save_steps": 1}
        settings |= {"max_steps": steps, "allow_changes": list(allowed)}
        return train(*recipe(tmp_path, "qwen2_audio", data={"train": str(rows), "cache": False}, training=settings))

    start(1)
    file = next(iter(sorted(tmp_path.glob("*.wav"))))
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1  # one sample, the same length
    file.write_bytes(bytes(changed))
    with pytest.raises(ConfigError) as caught:
        start(2)
    assert caught.value.code == "train.run_changed"
    assert start(2, "train_data").step == 2


PARTS = {
    "path": lambda file: {"type": "audio", "path": file.name},
    "audio": lambda file: {"type": "audio", "audio": file.name},
    "url": lambda file: {
        "type": "audio_url",
        "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(file.read_bytes()).decode()}"},
    },
    "openai": lambda file: {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(file.read_bytes()).decode(), "format": "wav"},
    },
}


def test_all_ways_to_name_a_sound_are_the_same(tmp_path: Path) -> None:
    file = write_sound(tmp_path / "a.wav", 0.7)
    content = [[make(file), {"type": "text", "text": "What?"}] for make in PARTS.values()]
    rows = [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "A."}]} for one in content]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    feed = fed(*recipe(tmp_path, "qwen2_audio"))
    found = {tuple(feed.split.example(index).segments[0].input_ids.tolist()) for index in range(len(PARTS))}
    assert len(found) == 1


def damaged(folder: Path) -> dict[str, tuple[str, str]]:
    inside = folder / "data"
    write_sound(inside / "ok.wav", 0.5)
    write_sound(inside / "long.wav", 2.1)
    write_sound(inside / "short.wav", 0.02)
    write_sound(inside / "empty.wav", 0)
    write_sound(folder / "secret.wav", 0.5)
    (inside / "link.wav").symlink_to(folder / "secret.wav")
    (inside / "text.wav").write_text("no sound")
    (inside / "nothing.wav").write_bytes(b"")
    cut = (inside / "ok.wav").read_bytes()
    (inside / "header.wav").write_bytes(cut[:30])
    bad = "data.bad_media"
    names = ("long", "short", "empty", "link", "text", "nothing", "header", "missing", "../secret")
    return {name: (f"{name}.wav", bad) for name in names} | {"url": ("https://example.org/a.wav", bad)}


@pytest.mark.parametrize(
    "name", ["long", "short", "empty", "link", "text", "nothing", "header", "missing", "../secret", "url"]
)
def test_a_bad_sound_names_its_row(name: str, tmp_path: Path) -> None:
    file, code = damaged(tmp_path)[name]
    rows = [heard("<audio>?", "ok.wav"), heard("<audio>?", file)]
    path = tmp_path / "data" / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.jsonl").write_text("")
    loaded, plan = recipe(tmp_path, "qwen2_audio", data={"train": str(path)})
    with pytest.raises(DataError) as error:
        fed(loaded, plan)
    assert (error.value.code, str(error.value.where).endswith("rows.jsonl line 2")) == (code, True)


def test_markers_and_kinds_are_counted(tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", 0.5)
    for row, code in (
        (heard("<audio><audio>?", "a.wav"), "data.image_count"),
        ({**heard("?"), "images": ["a.png"]}, "data.media_unsupported"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError) as error:
            fed(*recipe(tmp_path, "qwen2_audio"))
        assert error.value.code == code


@pytest.mark.parametrize(
    ("name", "value"), [("chunk_length", 10**9), ("hop_length", 0), ("n_fft", "x"), ("min_length", 10**12)]
)
@pytest.mark.parametrize("inside", [False, True])
def test_an_extractor_that_no_sound_needs_is_refused(name: str, value: Any, inside: bool, tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_audio"}))
    file.write_text(json.dumps(EXTRACTOR))
    assert check_processor(tmp_path) == [file]
    content = {**EXTRACTOR, name: value}
    file.write_text(json.dumps({"feature_extractor": content} if inside else content))
    with pytest.raises(DataError) as error:
        check_processor(tmp_path)
    assert error.value.code == "model.no_image_processor"


def test_a_model_that_does_not_hear_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, "qwen2_audio", data={"images": True})
    assert error.value.code == "plan.images_unsupported"


def test_a_model_that_hears_a_stream_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = VoxtralRealtimeConfig(architectures=["VoxtralRealtimeForConditionalGeneration"])
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ModelError) as error:
        recipe(tmp_path, "voxtral_realtime")
    assert error.value.code == "model.not_causal"
    assert REFUSED["voxtral_realtime"] in str(error.value)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_are_read_without_packages(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wave

    levels = np.array([[0, 1 << 8 * width - 2], [-(1 << 8 * width - 1), 0]], np.int64)
    shifted = levels + (128 if width == 1 else 0)
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(16_000)
        file.writeframes(b"".join(int(one).to_bytes(8, "little", signed=True)[:width] for one in shifted.flatten()))
    monkeypatch.setattr("halftune.data.media.sound.find_spec", lambda _: None)
    assert sound(tmp_path / "a.wav").tolist() == [0.25, -0.5]


def test_other_formats_and_rates_need_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    times = np.arange(44_100) / 44_100
    tone = 0.5 * np.sin(2 * np.pi * 440 * times)
    for name in ("a.flac", "a.ogg", "a.wav"):
        soundfile.write(tmp_path / name, np.stack([tone, tone], 1), 44_100)
        read = sound(tmp_path / name)
        expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
        assert read.shape == (16_000,)
        assert np.abs(read - expected)[1000:-1000].max() < (0.05 if name == "a.ogg" else 1e-3)


def test_the_real_set_becomes_tokens(shared_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    if not (shared_data / "mllm_audio_demo.json").exists():
        pytest.skip("mllm_audio_demo is not in ../shared/data")
    rows = json.loads((shared_data / "mllm_audio_demo.json").read_text())[:2]  # the third file is not there
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    shutil.copytree(shared_data / "mllm", tmp_path / "mllm_demo_data")
    audio_model(tmp_path / "model", "qwen2_5_omni_thinker")
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chunk_length": 30}))
    feed = fed(*recipe(tmp_path, "qwen2_5_omni_thinker", data={"train": str(tmp_path / "rows.json")}))
    (batch,) = feed.micro_batches(feed.rows(0)[:2])
    token = load_tokenizer_id(tmp_path)
    seconds = (4.032, 92_842 / 2 / 16_000)
    counts = sorted(int((row == token).sum()) for row in batch.tokens["input_ids"])
    assert counts == sorted(round(one * 25) for one in seconds)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_learns_to_name_sounds(tmp_path: Path) -> None:
    """Answers of plain transformers with the saved model, to sounds that training has not heard.

    Halfway it counts beeps and knows their pitch, and a level beep; whether one rises or falls takes the whole recipe.
    """
    short = [f"training.output_dir={tmp_path}", "training.max_steps=200"]
    loaded = load_config(ROOT / "configs" / "tiny" / "audio_tiny.yaml", [*short, "precision=fp32"])
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    assert named(materialize("qwen2_audio-tiny")) == [0, 0, 0]
    train(loaded, plan)
    beeps, pitches, motions = named(tmp_path / "final")
    assert beeps > 0.8
    assert pitches > 0.9
    assert motions > 0.6  # guessed: 0.33, as the others


def named(folder: Path) -> list[float]:
    """The shares of new sounds of which a model says the number of beeps, the pitch and the motion."""
    model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own: Any = Qwen2AudioProcessor.from_pretrained(folder)
    heard, right = rows(27, 7), [0, 0, 0]  # each kind once
    for row in heard:
        asked, answer = row["messages"]
        encoded = row["audios"][0]["bytes"]
        parts = [{"type": "audio"}, {"type": "text", "text": asked["content"].removeprefix("<audio>")}]
        text = own.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        inputs = own(text=[text], audio=[samples(encoded, *header(encoded), RATE)], sampling_rate=RATE,
                     return_tensors="pt")  # fmt: skip
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        said = own.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).split()
        for part, word in enumerate(answer["content"].split()):
            right[part] += said[part : part + 1] == [word]
    return [one / len(heard) for one in right]
