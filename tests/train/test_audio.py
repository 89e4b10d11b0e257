"""Audio in rows, from the file to the loss: ids and features equal to the processor's, gradients to transformers'."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_images import assert_gradients
from tiny_audio import EXTRACTOR, KINDS, ROWS, audio_model, heard, rows_of, write_rows, write_sound
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    Qwen2AudioProcessor,
    VoxtralConfig,
)

from halftune.config.facts.media import AUDIO_FAMILIES, REFUSED, check_processor, part_of
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.core.errors import ConfigError, DataError, ModelError, PlanError
from halftune.data.media.audio import AudioProcessor
from halftune.data.media.reference import BadMedia, MediaRef
from halftune.data.media.sound import header, samples
from halftune.data.pipeline import prepare
from halftune.data.preflight import validate_data
from halftune.data.sources.builtin.tones import RATE, rows
from halftune.data.store import NO_LABEL
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.methods import make_method
from halftune.model.adapters import attach_adapter
from halftune.model.files.architectures import multimodal_auto
from halftune.model.files.builtin import materialize
from halftune.model.files.locate import media_of
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.train.batches.feed import Feed
from halftune.train.setup import media_inputs
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent


OFTEN = ("qwen2_5_omni_thinker", "qwen2_audio", "gemma4")  # images in the row, windows, tokens by the processor
RUN = [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]


def recipe(folder: Path, kind: str, **changes: Any) -> tuple[Any, Plan]:
    model, rows = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        audio_model(model, kind)
    data = {"train": str(rows if rows.exists() else write_rows(folder, rows_of(kind))), "audio": True, "packing": False}
    tree = {
        "model": {"name_or_path": str(model)},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 2},
        "data": {**data, "group_by_length": False, **changes.pop("data", {})},
        "training": {"output_dir": str(folder / "run"), "max_steps": 2, "per_device_train_batch_size": 3},
        "logging": {"progress": False, "probes": 0},
        **changes,
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(folder / "recipe.yaml")
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))


def fed(loaded: Any, plan: Plan) -> Feed:
    config = loaded.run
    tokenizer = load_tokenizer(config.model)
    data = prepare(config, tokenizer, images=media_of(config))
    images = media_inputs(config, tokenizer)
    return Feed(data.train, config, plan.batch, make_method(config.method), 0, images=images)


def sound(file: Path) -> np.ndarray:
    encoded = file.read_bytes()
    return samples(encoded, *header(encoded), 16_000)


def test_the_table_is_tested() -> None:
    assert set(KINDS) == set(AUDIO_FAMILIES)


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize(
    ("kind", "packing"),
    [(kind, packing) for kind in KINDS for packing in (False, True)[: 1 if kind == "gemma4" else 2]],
)
def test_loss_and_gradients_are_transformers(kind: str, adapter: str, packing: bool, tmp_path: Path) -> None:
    data = {"packing": packing, "max_length": 256}
    loaded, plan = recipe(tmp_path, kind, adapter={"type": adapter}, data=data)
    feed = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    assert len(batch.examples) == len(ROWS)
    assert ("seq_idx" in batch.tokens) == packing
    model: Any = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.3)
    loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    ours = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert ours
    assert not [name for name in ours if "audio" in name or "visual" in name or "projector" in name]
    if adapter == "none":
        auto = multimodal_auto(AutoConfig.from_pretrained(tmp_path / "model"))
        model = auto.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    rows = rows_of(kind)
    expected, rounded = plain(model, feed, batch.examples, tmp_path, rows)
    assert abs(float(loss.detach()) - expected) < 1e-5 * expected
    exact = in_fp64(model, feed, batch.examples, tmp_path, rows)
    assert_gradients(ours, rounded, exact)


def plain(
    model: Any, feed: Feed, examples: Any, folder: Path, rows: list[dict[str, Any]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' forward pass on each sample alone, with its own extractor's features."""
    model.zero_grad()
    total = torch.zeros(())
    for index in examples:
        segment = feed.split.example(index).segments[0]
        ids = torch.from_numpy(segment.input_ids.astype("int64"))[None]
        given: dict[str, torch.Tensor] = {}
        if waves := [sound(folder / name) for name in rows[index]["audios"]]:
            audio: Any = feed.images.audio  # type: ignore[union-attr]
            text = audio._own.tokenizer.apply_chat_template(messages(rows[index]), tokenize=False)
            made = audio._own(text=[text], audio=waves, sampling_rate=16_000, return_tensors="pt")
            assert torch.equal(ids, made["input_ids"])
            given = {name: made[name] for name in ("input_features", audio._family.mask)}
            given["input_features"] = given["input_features"].to(next(model.parameters()).dtype)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits[0, :-1]
        labels = torch.from_numpy(segment.labels.astype("int64"))[1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
    total.backward()
    return float(total.detach()), {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def in_fp64(model: Any, *given: Any) -> dict[str, torch.Tensor]:
    """Gradients of ``plain`` in fp64, also where the model's code casts with ``float``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return plain(model.double(), *given)[1]


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a row as chat templates take it."""
    found = []
    for turn in row["messages"]:
        pieces = turn["content"].replace("<audio>", "\0<audio>\0").split("\0")
        parts = [{"type": "audio"} if one == "<audio>" else {"type": "text", "text": one} for one in pieces if one]
        found.append({**turn, "content": parts})
    return found


def load_tokenizer_id(folder: Path) -> int:
    return AutoTokenizer.from_pretrained(folder / "model").convert_tokens_to_ids("<|audio|>")


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("kind", RUN)
def test_gradients_of_towers_are_transformers(kind: str, adapter: str, tmp_path: Path) -> None:
    """Of the audio encoder by LoRA or in full, and of the projector."""
    parts = {"audio": "lora" if adapter == "lora" else "full", "projector": "full"}
    if kind == "gemma4_unified":
        parts.pop("audio")
    model_section = {"name_or_path": str(audio_model(tmp_path / "model", kind)), "train": parts}
    loaded, plan = recipe(tmp_path, kind, adapter={"type": adapter}, model=model_section)
    feed = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    model: Any = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.3)
    PolicyModel(model).nll_sum(batch).backward()
    ours = {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}
    trained = {part_of(name) for name in ours if "language_model" not in name and "lm_head" not in name}
    assert trained == {*parts}
    if adapter == "none":
        auto = multimodal_auto(AutoConfig.from_pretrained(tmp_path / "model"))
        model = auto.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    _, rounded = plain(model, feed, batch.examples, tmp_path, rows_of(kind))
    exact = in_fp64(model, feed, batch.examples, tmp_path, rows_of(kind))
    assert all(not ours[name].any() for name in ours.keys() - exact.keys())  # layers that no output depends on
    assert_gradients({name: one for name, one in ours.items() if name in exact}, rounded, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_counted_as_by_the_processor(kind: str, tmp_path: Path) -> None:
    """Lengths of one and of two sounds, in samples, around the ends of frames, tokens and windows."""
    audio_model(tmp_path, kind)
    audio: Any = AudioProcessor(str(tmp_path), kind, AutoTokenizer.from_pretrained(tmp_path), None)
    longest = int(16_000 * min(audio._seconds, 4.5))
    hop, draw = getattr(audio._extractor, "hop_length", 640), np.random.default_rng()
    edges = [hop * frames + more for frames in (8, 12, 16, 99, 100, 101) for more in (-1, 0, 1)]
    edges += [16_000 * 2 + more for more in (-hop, -1, 0, 1, hop)] + [longest - 1, longest]
    lengths = [one for one in [*edges, *draw.integers(hop * 20, longest, 20).tolist()] if one <= longest]
    rows = [[one] for one in lengths]
    if not audio._family.single:
        rows += [sorted(pair, key=lambda _: draw.random()) for pair in zip(lengths, lengths[::-1], strict=True)]
    for row in rows:
        refs = [MediaRef(0, 0, "", frames=one, rate=16_000) for one in row]
        waves = [np.zeros(one, np.float32) for one in row]
        expected = audio._own._process_audio(waves, **audio._options)[1]
        if min(one.count(audio.token) for one in expected) < 2:
            with pytest.raises(BadMedia):
                audio.texts(refs)
        else:
            assert audio.texts(refs) == expected, row


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_tables_of_towers_stay_fp32(kind: str, tmp_path: Path) -> None:
    loaded, plan = recipe(tmp_path, kind, precision="bf16")
    model = load_model(loaded.run.model, plan)
    tables = {name: one.dtype for name, one in model.named_buffers() if "inv_freq" in name}
    assert set(tables.values()) == {torch.float32}
    assert torch.bfloat16 in {one.dtype for one in model.parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", RUN)
def test_a_run_trains_on_audio(kind: str, tmp_path: Path) -> None:
    loaded, plan = recipe(tmp_path, kind, data={"packing": "auto", "max_length": 128})
    train(loaded, plan)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line][-1] == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", RUN)
def test_an_exported_model_is_the_trained_one_and_has_its_processor(kind: str, tmp_path: Path) -> None:
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "learning_rate": 0.05}
    loaded, plan = recipe(tmp_path, kind, training=training)
    train(loaded, plan)
    run, out = open_run(str(tmp_path / "run"), ["precision=fp32"]), tmp_path / "exported"
    export_run(run, out)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert (
        AutoFeatureExtractor.from_pretrained(out).to_dict()
        == AutoFeatureExtractor.from_pretrained(tmp_path / "model").to_dict()
    )
    feed = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    auto = multimodal_auto(AutoConfig.from_pretrained(out))
    plain, base = (auto.from_pretrained(one, dtype=torch.float32) for one in (out, tmp_path / "model"))
    with torch.no_grad():
        ours = PolicyModel(open_session(run).model).nll_sum(batch)
        exported, before = PolicyModel(plain).nll_sum(batch), PolicyModel(base).nll_sum(batch)
    assert abs(float(exported - ours)) < 1e-5 * float(ours)
    assert abs(float(before - ours)) > 1e-3 * float(ours)


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "gemma4"])
def test_images_and_audio_share_a_row(kind: str, tmp_path: Path) -> None:
    """The loss is that of each sample alone: with both, one of them, and none."""
    from tiny_images import write_image

    write_image(tmp_path / "a.png", 30, 20)
    rows = [{**heard("<audio>Is it <image>?", "0.4.wav"), "images": ["a.png"]},
            {**heard("<image>What?"), "images": ["a.png"]}, {**ROWS[1], "images": []},
            {**ROWS[2], "images": []}]  # fmt: skip
    write_rows(tmp_path, rows)

    def losses(together: bool) -> list[float]:
        training = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 1,
            "per_device_train_batch_size": 4 * together or 1,
        }
        data = {"images": True, "packing": together and kind != "gemma4", "max_length": 512}
        loaded, plan = recipe(tmp_path, kind, data=data, training=training)
        feed = fed(loaded, plan)
        policy = PolicyModel(load_model(loaded.run.model, plan).requires_grad_(True))
        batches = [batch for start in range(0, 4, 4 if together else 1)
                   for batch in feed.micro_batches(feed.rows(start))]  # fmt: skip
        return [float(policy.nll_sum(batch).detach()) for batch in batches[: 1 if together else 4]]

    (packed,), alone = losses(True), losses(False)
    assert len(alone) == 4
    assert abs(packed - sum(alone)) < 1e-5 * packed


LIMITS = {
    "qwen2_5_omni_thinker": 2, "qwen3_omni_moe_thinker": 2400, "qwen2_audio": 2, "qwen3_asr": 1200, "glmasr": 6,
    "audioflamingo3": 6, "musicflamingo": 6, "gemma4": 30, "gemma4_unified": 30,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_models_processor_does_not_take_is_refused(kind: str, tmp_path: Path) -> None:
    audio_model(tmp_path, kind)
    audio = AudioProcessor(str(tmp_path), kind, AutoTokenizer.from_pretrained(tmp_path), None)
    longest = MediaRef(0, 0, "", frames=LIMITS[kind] * 16_000, rate=16_000)
    assert len(audio.texts([longest])) == 1
    with pytest.raises(BadMedia):
        audio.texts([replace(longest, frames=longest.frames + 1)])
    if AUDIO_FAMILIES[kind].single:
        with pytest.raises(BadMedia):
            audio.texts([longest, longest])


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


@pytest.mark.parametrize(("name", "value"), [("chunk_length", 10**9), ("hop_length", 0), ("n_fft", "x")])
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


def test_voxtral_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = VoxtralConfig(architectures=["VoxtralForConditionalGeneration"])
    (tmp_path / "model" / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ModelError) as error:
        recipe(tmp_path, "voxtral")
    assert error.value.code == "model.not_causal"
    assert REFUSED["voxtral"] in str(error.value)


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
