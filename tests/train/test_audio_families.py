"""Every model type that hears: ids and features are the processor's, loss and gradients transformers'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_audio import fed, recipe, sound
from test_images import assert_gradients
from tiny_audio import KINDS, ROWS, audio_model, heard, processed, rows_of, whole_windows, write_rows
from transformers import AutoConfig, AutoFeatureExtractor

from halftune.config.facts.media import AUDIO_FAMILIES, part_of
from halftune.config.sections.model import ModelSection
from halftune.core.errors import DataError
from halftune.data.media.audio import AudioProcessor
from halftune.data.media.reference import BadMedia, MediaRef
from halftune.data.store import NO_LABEL
from halftune.export.merged import export_run
from halftune.infer.session import open_session
from halftune.model.adapters import attach_adapter
from halftune.model.files.architectures import multimodal_auto
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.train.batches.feed import Feed
from halftune.train.trainer import train

# images in the row, windows, tokens by the processor, no mask
OFTEN = ("qwen2_5_omni_thinker", "qwen2_audio", "gemma4", "voxtral")
RUN = [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]


def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(ModelSection(name_or_path=str(folder)))


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
            made = processed(audio, text, waves)
            assert torch.equal(ids, made.pop("input_ids"))
            given = {name: made[name] for name in ("input_features", audio._family.mask) if name}
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
    audio: Any = AudioProcessor(str(tmp_path), kind, tokenizer_of(tmp_path), None)
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
        expected = (
            audio._own._process_audio(waves, **audio._options)[1]
            if audio._family.mask
            else [whole_windows(one) for one in row]
        )
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
    for name in ("preprocessor_config.json", "processor_config.json", *["tekken.json"] * (kind == "voxtral")):
        assert (out / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert (
        AutoFeatureExtractor.from_pretrained(out).to_dict()
        == AutoFeatureExtractor.from_pretrained(tmp_path / "model").to_dict()
    )
    assert tokenizer_of(out).get_vocab() == tokenizer_of(tmp_path / "model").get_vocab()
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
@pytest.mark.parametrize("kind", ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "gemma4", "gemma4_unified"])
def test_images_and_audio_share_a_row(kind: str, tmp_path: Path) -> None:
    """The loss is that of each sample alone: with both, one of them, and none."""
    from tiny_images import write_image

    audio_model(tmp_path / "model", kind, images=True)
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
        data = {"images": True, "packing": together and not kind.startswith("gemma4"), "max_length": 512}
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
    "audioflamingo3": 6, "musicflamingo": 6, "gemma4": 30, "gemma4_unified": 30, "voxtral": 2400,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_models_processor_does_not_take_is_refused(kind: str, tmp_path: Path) -> None:
    audio_model(tmp_path, kind)
    audio = AudioProcessor(str(tmp_path), kind, tokenizer_of(tmp_path), None)
    longest = MediaRef(0, 0, "", frames=LIMITS[kind] * 16_000, rate=16_000)
    assert len(audio.texts([longest])) == 1
    with pytest.raises(BadMedia):
        audio.texts([replace(longest, frames=longest.frames + 1)])
    if AUDIO_FAMILIES[kind].single:
        with pytest.raises(BadMedia):
            audio.texts([longest, longest])


@pytest.mark.parametrize(("kind", "changes"), [("gemma4", {"hop_length_ms": 1e-6}), ("voxtral", {"hop_length": 161})])
def test_numbers_that_do_not_fit_together_are_refused(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Frames of less than a sample have no rate; a window has whole tokens."""
    loaded, plan = recipe(tmp_path, kind)
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(DataError) as error:
        fed(loaded, plan)
    assert error.value.code == "model.no_image_processor"
