"""Pairs and rated answers with images and audio: rows, masks, and losses and gradients beside transformers in fp64."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_images import assert_gradients, fed, recipe
from tiny_audio import audio_model, write_sound
from tiny_images import write_image, write_rows
from torch.nn.functional import logsigmoid
from transformers import AutoFeatureExtractor

from halftune.core.errors import DataError
from halftune.data.batch import Batch, some_segments
from halftune.data.media.reference import unpack
from halftune.data.media.sound import header, samples
from halftune.data.store import Segment, build_store
from halftune.methods import AdapterOff, make_method
from halftune.model.adapters import attach_adapter
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.train.trainer import train

BETA = 0.3
GOOD, BAD = "A red square.", "A blue circle and a square."
TWO, ONE = ("images/60x40.png", "images/24x80.png"), ("images/33x47.png",)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


PAIRS = [
    {  # whole conversations, with an earlier answer
        name: [
            said("user", "<image>What is in the picture?"), said("assistant", "A circle."),
            said("user", "And <image> here?"), said("assistant", answer),
        ]
        for name, answer in (("chosen", GOOD), ("rejected", BAD))
    } | {"images": TWO},
    {  # LLaMA-Factory's
        "conversations": [{"from": "human", "value": "What is this?\n<image>"}],
        "chosen": {"from": "gpt", "value": GOOD}, "rejected": {"from": "gpt", "value": BAD}, "images": ONE,
    },
    {"prompt": "What is red?", "chosen": GOOD, "rejected": BAD, "images": []},
]  # fmt: skip
RATED = [
    {"messages": [said("user", "<image>What is it?"), said("assistant", GOOD)], "label": True, "images": ONE},
    {"messages": [said("user", "What is red?"), said("assistant", BAD)], "label": False, "images": []},
    {"prompt": "<image>And <image>?", "completion": "A square.", "label": False, "images": TWO},
    {"messages": [said("user", "<image>What is here?"), said("assistant", "Red.")], "label": True, "images": ONE},
]  # fmt: skip
# For each row of PAIRS and RATED, the messages before the answers.
ASKED = [PAIRS[0]["chosen"][:3], [said("user", "What is this?\n<image>")], [said("user", "What is red?")]]
RATED_ASKED = [[said("user", text)] for text in ("<image>What is it?", "What is red?", "<image>And <image>?",
                                                 "<image>What is here?")]  # fmt: skip


def model_of(loaded: Any, plan: Any) -> Any:
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.05)
    return model


class Alone:
    """transformers' model, asked for one prompt and answer at a time with its processor's inputs."""

    def __init__(self, model: Any, images: Any, folder: Path) -> None:
        self.model, self.images, self.folder = model, images, folder

    def ids(self, asked: list[dict[str, Any]], answer: str, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
        """Token ids of a conversation, and how many of them stand before the answer."""
        tokenizer, found = self.images._own.tokenizer, []
        for messages, prompt in (([*asked, said("assistant", answer)], False), (asked, True)):
            turns = [{**one, "content": parts(one["content"])} for one in messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
            found.append(self.images._own(text=[text], **self._media(row, processor=True))["input_ids"][0])
        # the template's line break after the last turn is not trained
        return torch.tensor(found[0])[None], len(found[1])

    def _media(self, row: dict[str, Any], *, processor: bool = False) -> dict[str, Any]:
        opened = [Image.open(self.folder / name) for name in row["images"]]
        if processor or not opened:
            return {"images": opened or None} if processor else {}
        given = [opened] if self.images.family.nested else opened
        made = self.images._own._process_images(given, **{**self.images._options, "return_tensors": "pt"})[0]
        dtype = next(self.model.parameters()).dtype
        return {name: made[name].to(dtype) if made[name].is_floating_point() else made[name]
                for name in self.images.family.inputs if name in made}  # fmt: skip

    def __call__(self, ids: torch.Tensor, start: int, row: dict[str, Any]) -> torch.Tensor:
        """Sum of the answer's log-probabilities, up to the end of its turn."""
        arguments = {**self._media(row), **self.images.token_types(ids)}
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **arguments).logits
        end = start + int((ids[0, start:] == self.images._own.tokenizer.eos_token_id).nonzero()[0]) + 1
        known = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return known[start - 1 : end - 1].sum()

    def ratio(self, ids: torch.Tensor, start: int, row: dict[str, Any]) -> torch.Tensor:
        """The log-ratio to the model without its adapter."""
        with torch.no_grad(), self.model.disable_adapter():
            known = self(ids, start, row)
        return self(ids, start, row) - known


def parts(content: str) -> list[dict[str, str]]:
    pieces = content.replace("<image>", "\0<image>\0").split("\0")
    return [{"type": "image"} if one == "<image>" else {"type": "text", "text": one} for one in pieces if one]


def check(ours: Any, batch: Batch, model: Any, wanted: Any, terms: int = 1) -> None:
    """Loss and gradients of ``ours(batch)`` in fp32 are those of ``wanted()`` in fp64, up to rounding.

    ``terms`` of both signs make up the loss.
    """
    mine, own = with_gradients(lambda: ours(batch), model)
    model.set_attn_implementation("sdpa")
    _, rounded = with_gradients(wanted, model)
    total, exact = with_gradients(wanted, model.double())
    assert own
    assert abs(float(mine - total)) < 1e-6 * max(abs(float(total)), terms)
    assert_gradients(own, rounded, exact)


def with_gradients(loss: Any, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    (total := loss()).backward()
    return total.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        *(("qwen2_5_vl", True), ("qwen3_vl", False), ("llava", True), ("gemma3", False)),
        *(("lfm2_vl", True), ("llama4", False), ("gemma4_unified", False)),
    ],
)
def test_dpo_is_its_formula_on_transformers_own_model(kind: str, packing: bool, tmp_path: Path) -> None:
    write_rows(tmp_path, PAIRS)
    data = {"packing": packing, "max_length": 512}
    loaded, plan = recipe(tmp_path, kind, data=data, method={"type": "dpo", "beta": BETA})
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    assert len(batch.examples) == len(PAIRS)
    assert ("seq_idx" in batch.tokens) == packing
    model = model_of(loaded, plan)
    alone, policy = Alone(model, images, tmp_path), PolicyModel(model)
    sequences = []
    for index, (row, asked) in enumerate(zip(PAIRS, ASKED, strict=True)):
        sequences.append([(*alone.ids(asked, answer, row), row) for answer in (GOOD, BAD)])
        for segment, (ids, start, _) in zip(feed.split.example(index).segments, sequences[-1], strict=True):
            assert segment.input_ids.tolist() == ids[0].tolist()
            assert int(segment.loss_mask.argmax()) == start
            assert len(unpack(segment.media) if segment.media else ()) == len(row["images"])

    def wanted() -> torch.Tensor:
        margins = [alone.ratio(*chosen) - alone.ratio(*rejected) for chosen, rejected in sequences]
        return -logsigmoid(BETA * torch.stack(margins)).sum()

    method = make_method(loaded.run.method)
    check(lambda batch: method.loss(policy, batch, AdapterOff(policy)).total, batch, model, wanted)


@pytest.mark.parametrize(("kind", "packing"), [("qwen2_5_vl", True), ("qwen2_5_vl", False), ("llava", True)])
def test_kto_is_its_formula_on_transformers_own_model(kind: str, packing: bool, tmp_path: Path) -> None:
    write_rows(tmp_path, RATED)
    asked_for = {"type": "kto", "beta": BETA, "group_size": len(RATED)}
    training = {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 1}
    data = {"packing": packing, "max_length": 512}
    loaded, plan = recipe(tmp_path, kind, data=data, method=asked_for, training=training)
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    model = model_of(loaded, plan)
    alone, policy = Alone(model, images, tmp_path), PolicyModel(model)
    texts = [row.get("completion") or row["messages"][-1]["content"] for row in RATED]

    def with_answers(answers: list[str]) -> list[Any]:
        rows = zip(RATED, RATED_ASKED, answers, strict=True)
        return [(*alone.ids(before, answer, row), row) for row, before, answer in rows]

    own, others = with_answers(texts), with_answers([texts[-1], *texts[:-1]])
    for segment, (ids, _, row) in zip(feed.split.example(0).segments, own + others, strict=True):
        assert segment.input_ids.tolist() == ids[0].tolist()
        assert len(unpack(segment.media) if segment.media else ()) == len(row["images"])

    def wanted() -> torch.Tensor:
        rewards = BETA * torch.stack([alone.ratio(*one) for one in own])
        z = BETA * torch.stack([alone.ratio(*one) for one in others]).mean().detach().clamp(min=0)
        good = torch.tensor([row["label"] for row in RATED])
        return torch.where(good, 1 - torch.sigmoid(rewards - z), 1 - torch.sigmoid(z - rewards)).sum()

    method = make_method(loaded.run.method)
    check(lambda batch: method.loss(policy, batch, AdapterOff(policy)).total, batch, model, wanted)


def test_dpo_on_sounds_is_its_formula_on_transformers_own_model(tmp_path: Path) -> None:
    """Ids are those of sft on the same conversations, which are compared with the processor's elsewhere."""
    audio_model(tmp_path / "model", "qwen2_5_omni_thinker")
    asked = [("<audio>What is it, and <audio> here?", ("0.9.wav", "0.31.wav")), ("What is red?", ())]
    for name in asked[0][1]:
        write_sound(tmp_path / name, float(Path(name).stem))
    rows = [{"prompt": text, "chosen": GOOD, "rejected": BAD, "audios": sounds} for text, sounds in asked]
    write_lines(tmp_path, rows)
    data = {"packing": True, "max_length": 512, "images": False, "audio": True}
    loaded, plan = recipe(tmp_path, "", data=data, method={"type": "dpo", "beta": BETA})
    feed, _ = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    model, method = model_of(loaded, plan), make_method(loaded.run.method)
    policy, extract = PolicyModel(model), AutoFeatureExtractor.from_pretrained(tmp_path / "model")

    def logprobs(segment: Segment, sounds: Any) -> torch.Tensor:
        waves = [samples(one, *header(one), 16_000) for one in ((tmp_path / name).read_bytes() for name in sounds)]
        given: dict[str, torch.Tensor] = {}
        if waves:
            options = {"sampling_rate": 16_000, "padding": "max_length", "return_attention_mask": True}
            made = extract(waves, **options, return_tensors="pt")
            features = made["input_features"].to(next(model.parameters()).dtype)
            given = {"input_features": features, "feature_attention_mask": made["attention_mask"]}
        ids, mask = torch.from_numpy(segment.input_ids).long()[None], torch.from_numpy(segment.loss_mask)[1:]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits
        return logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[mask, 0].sum()

    def wanted() -> torch.Tensor:
        losses = []
        for index, (_, sounds) in enumerate(asked):
            pair = feed.split.example(index).segments
            with torch.no_grad(), model.disable_adapter():
                known = [logprobs(segment, sounds) for segment in pair]
            chosen, rejected = (logprobs(one, sounds) - before for one, before in zip(pair, known, strict=True))
            losses.append(-logsigmoid(BETA * (chosen - rejected)))
        return torch.stack(losses).sum()

    check(lambda batch: method.loss(policy, batch, AdapterOff(policy)).total, batch, model, wanted)


def write_lines(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("rows", "method"), [(PAIRS, "dpo"), (RATED, {"type": "kto", "group_size": 4})], ids=["pairs", "rated"]
)
def test_answers_to_one_prompt_share_its_media(rows: Any, method: Any, tmp_path: Path) -> None:
    """References, and with them the images that rows hold, are stored once."""
    write_rows(tmp_path, rows)
    feed, _ = fed(*recipe(tmp_path, "llava", method=method))
    examples = [feed.split.example(index) for index in range(len(feed.split))]
    store = build_store(examples, [(0, 0)] * len(examples), [])
    media = [one.media for example in examples for one in example.segments]
    assert [one.media for index in range(len(store)) for one in store.example(index).segments] == media
    assert len(store.media) == sum(map(len, set(media)))
    assert len(store.media_at) > len(set(media) - {b""}) == 2


def test_a_batch_without_media_takes_as_many_forward_passes(tmp_path: Path) -> None:
    """KTO splits batches of text: on another process, the batch may have images."""
    write_lines(tmp_path, [RATED[1]] * 4)
    feed, _ = fed(*recipe(tmp_path, "llava", method={"type": "kto", "group_size": 4}))
    (batch,) = feed.micro_batches(feed.rows(0))
    assert some_segments(batch, torch.arange(8) < 4) is None
    assert some_segments(replace(batch, of_media=False), torch.arange(8) < 4) is not None


def pixels(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {**row, name: [*row[name][:-1], {**row[name][-1], "content": "<image>" + row[name][-1]["content"]}]}


BAD_ROWS = {
    "in an answer": (pixels(PAIRS[0], "chosen"), "data.image_count"),
    "too few": ({**PAIRS[0], "images": ONE}, "data.image_count"),
    "other prompts": (
        {
            name: [said("user", [{"type": "image", "path": f"images/{size}.png"}]), said("assistant", name)]
            for name, size in (("chosen", "33x47"), ("rejected", "24x80"))
        },
        "data.malformed_row",
    ),
    "behind the answer": (
        {
            "messages": [said("user", "What?"), said("assistant", GOOD), said("user", "<image>")],
            "label": True, "images": ONE,
        },
        "data.image_count",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_media_belong_to_the_prompt(name: str, tmp_path: Path) -> None:
    row, code = BAD_ROWS[name]
    rows = RATED if "label" in row else PAIRS
    write_rows(tmp_path, rows)
    write_lines(tmp_path, [*rows, row])
    with pytest.raises(DataError) as error:
        fed(*recipe(tmp_path, "llava", method="kto" if "label" in row else "dpo"))
    assert error.value.code == code
    assert str(error.value.where).endswith(f"rows.jsonl line {len(rows) + 1}")


def test_parts_with_values_are_those_of_columns(tmp_path: Path) -> None:
    """Also where the prompt stands three times."""
    write_rows(tmp_path, PAIRS)
    image = {"type": "image", "path": ONE[0]}
    asked = [said("user", [image, {"type": "text", "text": "What is this?"}])]
    rows = [
        {"prompt": asked, "chosen": [*asked, said("assistant", GOOD)], "rejected": [*asked, said("assistant", BAD)]},
        {"prompt": "<image>What is this?", "chosen": GOOD, "rejected": BAD, "images": ONE},
    ]  # fmt: skip
    write_lines(tmp_path, rows)
    feed, _ = fed(*recipe(tmp_path, "llava", method="dpo"))
    one, other = (feed.split.example(index).segments for index in range(2))
    for left, right in zip(one, other, strict=True):
        assert left.input_ids.tolist() == right.input_ids.tolist()
        assert left.media == right.media != b""


def test_long_pairs_are_dropped_or_cut_around_their_images(tmp_path: Path) -> None:
    write_rows(tmp_path, PAIRS)
    long = " and a blue circle" * 40
    rows = [{"prompt": "<image>What?", "chosen": GOOD, "rejected": BAD + long, "images": ONE}]
    write_lines(tmp_path, [*PAIRS, *rows])
    feed, _ = fed(*recipe(tmp_path, "qwen2_5_vl", method="dpo", data={"max_length": 128}))
    assert len(feed.split) == len(PAIRS)
    feed, images = fed(
        *recipe(tmp_path, "qwen2_5_vl", method="dpo", data={"max_length": 128, "overlong": "proportional"})
    )
    assert len(feed.split) == len(PAIRS) + 1
    for segment in feed.split.example(len(PAIRS)).segments:
        seen = images.inputs([unpack(segment.media)])["image_grid_thw"]
        assert int((segment.input_ids == images._own.image_token_id).sum()) == int(seen.prod()) // 4
        assert len(segment.input_ids) <= 128


@pytest.mark.filterwarnings("ignore")
def test_precomputed_references_are_those_below_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run reads its reference from the cache, and computes it again for other pixels of as many tokens."""
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    write_rows(tmp_path, PAIRS)

    def losses(reference: str) -> list[float]:
        training = {
            "output_dir": str(tmp_path / "run"), "max_steps": 2, "learning_rate": 0.05,
            "lr_scheduler_type": "constant", "per_device_train_batch_size": 3,
        }  # fmt: skip
        data, method = {"packing": "auto", "max_length": 256}, {"type": "dpo", "reference": reference}
        train(*recipe(tmp_path, "qwen2_5_vl", method=method, training=training, data=data))
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(tmp_path / "run")
        return [line["loss"] for line in lines if "loss" in line]

    below, before = losses("adapter_off"), losses("precomputed")
    assert before == pytest.approx(below, rel=1e-6)
    assert below[1] != pytest.approx(below[0], rel=1e-3)
    kept = {one.name for one in (tmp_path / "cache" / "reference").iterdir()}
    write_image(tmp_path / ONE[0], 33, 47)
    assert losses("precomputed") == pytest.approx(losses("adapter_off"), rel=1e-6)
    assert len({one.name for one in (tmp_path / "cache" / "reference").iterdir()} - kept) == 1
