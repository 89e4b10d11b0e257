"""Videos in rows, from the file to the loss: ids equal to the processor's, loss and gradients to transformers'."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from media_runs import fed, media_recipe
from PIL import Image
from tiny_images import image_model, write_image
from tiny_video import KINDS, PIXELS, ROWS, own_processor, seen, video_model, write_rows, write_video
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.video_utils import VideoMetadata

from halftune.config.facts.media import VIDEO_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.training import GenerationSection
from halftune.core.errors import DataError, PlanError
from halftune.data.media.frames import decoded, examine
from halftune.data.media.processor import MediaProcessor, MediaSettings
from halftune.data.media.reference import MediaRef, refer
from halftune.data.sources.builtin.motions import FPS, FRAMES, rows
from halftune.data.store import NO_LABEL
from halftune.hardware.catalogue import lookup
from halftune.infer.lines import serve
from halftune.infer.repl import Repl
from halftune.infer.session import open_session
from halftune.model.adapters import attach_adapter
from halftune.model.files.builtin import materialize
from halftune.model.generate import generate_reply
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.train.batches.feed import Feed
from halftune.train.setup import media_inputs
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent


def recipe(folder: Path, kind: str, **changes: Any) -> tuple[Any, Plan]:
    model, rows = folder / "model", folder / "rows.jsonl"
    folder.mkdir(exist_ok=True)
    if not model.exists():
        video_model(model, kind)
    data = {"videos": True, **(PIXELS if "omni" in kind else {})}
    return media_recipe(folder, rows if rows.exists() else write_rows(folder, ROWS), data, **changes)


def test_the_table_is_tested() -> None:
    assert set(KINDS) == set(VIDEO_FAMILIES)


def parts(content: str) -> list[dict[str, str]]:
    pieces = content.replace("<video>", "\0<video>\0").split("\0")
    return [{"type": "video"} if one == "<video>" else {"type": "text", "text": one} for one in pieces if one]


def given(
    kind: str, row: dict[str, Any], images: Any, folder: Path, patch: pytest.MonkeyPatch, *, prompt: bool = False
) -> Any:
    """What transformers' own processor makes of a row: ids, and the inputs of the forward pass."""
    text = images._own.tokenizer.apply_chat_template(
        [{**turn, "content": parts(turn["content"])} for turn in row["messages"]],
        tokenize=False,
        add_generation_prompt=prompt,
    )
    if not row["videos"]:
        return images._own(text=[text], return_tensors="pt")
    kept = images._own.video_processor
    own = own_processor(kind, images, patch)
    files = [(folder / name).read_bytes() for name in row["videos"]]
    films = [examine(file) for file in files]
    whole = [np.stack(list(decoded(file, range(film.frames)))) for file, film in zip(files, films, strict=True)]
    told = [
        {"total_num_frames": one.frames, "fps": one.fps, "duration": one.frames / one.fps, "height": one.height,
         "width": one.width}
        for one in films
    ]  # fmt: skip
    size = {"size": {"shortest_edge": 64, "longest_edge": 512}} if "omni" in kind else {}
    fps = {"fps": 2.0} if KINDS[kind] == "qwen2_vl" else {}  # whose files name none
    asked = {"video_metadata": told, "do_sample_frames": True, "return_metadata": True, **fps, **size}
    made = own(text=[text], videos=whole, return_tensors="pt", videos_kwargs=asked)
    own.video_processor = kept
    return made


@pytest.mark.parametrize(
    ("adapter", "packing"),
    [("lora", True), *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("lora", False), ("none", True)))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_transformers(
    kind: str, adapter: str, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"packing": packing, "max_length": 512}
    loaded, plan = recipe(tmp_path, kind, adapter={"type": adapter}, data=data)
    feed, images = fed(loaded, plan)
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
    if adapter == "none":
        auto: Any = AutoModelForImageTextToText
        if kind == "qwen2_5_omni_thinker":
            from transformers import Qwen2_5OmniThinkerForConditionalGeneration as auto
        model = auto.from_pretrained(tmp_path / "model", dtype=torch.float32).train()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    rows = {index: given(kind, ROWS[index], images, tmp_path, monkeypatch) for index in batch.examples}
    expected, rounded = plain(model, batch, feed, rows)
    assert abs(float(loss.detach()) - expected) < 1e-5 * expected
    _, exact = plain(model.double(), batch, feed, rows)
    largest = max(float(one.norm()) for one in exact.values())
    for name, mine in ours.items():  # sums of terms of both signs have rounding errors of the size of the terms
        allowed = 1e-5 * exact[name].norm() + 2 * (rounded[name] - exact[name]).norm()
        assert float((mine - exact[name]).norm()) <= float(allowed) + torch.finfo(torch.float32).eps * largest, name


def plain(model: Any, batch: Any, feed: Feed, rows: dict[int, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' forward pass on each sample alone, with its processor's inputs."""
    model.zero_grad()
    total, kind = torch.zeros(()), next(model.parameters()).dtype
    for place, index in enumerate(batch.examples):
        segment, made = feed.split.example(index).segments[0], dict(rows[index])
        assert segment.input_ids.tolist() == made["input_ids"][0].tolist()
        if "pixel_values_videos" in made:
            made["pixel_values_videos"] = made["pixel_values_videos"].to(kind)
            if "seq_idx" in batch.tokens:
                axes = positions(model, made)
                where = batch.tokens["seq_idx"][0] == place
                assert torch.equal(batch.tokens["position_ids"][1:, :, where], axes)
        made.pop("video_metadata", None)
        logits = model(**made, use_cache=False).logits[0, :-1]
        labels = torch.from_numpy(segment.labels.astype("int64"))[1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
    total.backward()
    return float(total.detach()), {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def positions(model: Any, made: dict[str, Any]) -> torch.Tensor:
    body = getattr(model, "get_base_model", lambda: model)().model
    if "video_second_per_grid" in made:
        return body.get_rope_index(
            made["input_ids"], video_grid_thw=made["video_grid_thw"], second_per_grids=made["video_second_per_grid"]
        )[0]
    names = ("mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    return body.get_rope_index(made["input_ids"], **{name: made[name] for name in names if name in made})[0]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "glm4v", "glm46v"])
def test_frames_and_their_size_are_those_of_the_video_processor(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = recipe(tmp_path, kind)
    images = media_inputs(loaded.run, load_tokenizer(loaded.run.model))
    assert images is not None
    ours = images.video
    assert ours is not None
    own = own_processor(kind, images, monkeypatch).video_processor
    fps = {"fps": 2.0} if kind == "qwen2_vl" else {}
    chance = np.random.default_rng()
    for total, rate in [(4, 24.0), (7, 3.0), (48, 24.0), (301, 29.97), (9000, 30.0), (24_000, 60.0), (4000, 1.0)]:
        told = VideoMetadata(total, fps=rate, duration=total / rate)
        taken = own.sample_frames(told, **fps)
        assert ours._sampled(total, rate) == [int(one) for one in taken], (total, rate)
        for _ in range(5):
            height, width = (int(one) for one in chance.integers(3, 300, 2))
            ref = MediaRef(width, height, "", frames=total, fps=rate)
            expected = own.get_num_of_video_patches(len(taken), height, width, {})
            assert np.prod(ours.grid(ref)) == expected, (total, rate, width, height)


def test_bounds_of_a_run_take_the_place_of_the_processors(tmp_path: Path) -> None:
    asked = {"video_fps": 1.0, "video_max_frames": 6, "video_max_pixels": 1200, "video_min_pixels": 600}
    for kind, counted in (("qwen2_5_vl", 4), ("qwen3_vl", 5), ("glm4v", 6)):  # GLM's are even
        folder = tmp_path / kind
        loaded, _ = recipe(folder, kind, data=asked)
        images = media_inputs(loaded.run, load_tokenizer(loaded.run.model))
        assert images is not None
        assert images.video is not None
        short, long = (MediaRef(400, 300, "", frames=many, fps=10.0) for many in (50, 500))
        assert [len(images.video.taken(ref)) for ref in (short, long)] == [counted, 6]
        small = MediaRef(16, 12, "", frames=500, fps=10.0)
        (time, *large), (_, *least) = images.video.grid(long), images.video.grid(small)
        assert time == 3
        assert 600 < math.prod(large) * 16 <= 1200
        assert 600 <= math.prod(least) * 16 < 1200


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker"])
def test_images_and_videos_share_a_packed_row(kind: str, tmp_path: Path) -> None:
    """The loss is that of each sample alone, also of trained towers."""
    write_image(tmp_path / "a.png", 30, 20)
    rows = [seen("<image>Is it <video>?", videos=("videos/12-40x24.gif",), images=("a.png",)),
            seen("<video><image>?", videos=("videos/5-33x47.gif",), images=("a.png",)), ROWS[1], ROWS[2]]  # fmt: skip
    write_rows(tmp_path, rows)

    def losses(packing: bool) -> tuple[list[float], list[torch.Tensor]]:
        training = {"output_dir": str(tmp_path / "run"), "max_steps": 1}
        training |= {"per_device_train_batch_size": 4 * packing or 1}
        data = {"images": True, "packing": packing, "max_length": 512}
        model = {"name_or_path": str(tmp_path / "model"), "train": {"vision": "full", "projector": "full"}}
        loaded, plan = recipe(tmp_path, kind, adapter="none", data=data, training=training, model=model)
        feed, _ = fed(loaded, plan)
        policy = PolicyModel(load_model(loaded.run.model, plan).requires_grad_(True))
        made = [policy.nll_sum(batch) for batch in feed.micro_batches(feed.rows(0))]
        sum(made[1:], made[0]).backward()
        grads = [one.grad for one in policy.model.parameters() if one.grad is not None]
        return [float(one.detach()) for one in made], grads

    (packed, grads), (alone, apart) = losses(True), losses(False)
    assert (len(packed), len(alone)) == (1, 4)
    assert abs(packed[0] - sum(alone)) < 1e-5 * packed[0]
    assert len(grads) == len(apart)
    largest = max(float(one.norm()) for one in apart)
    assert all(float((a - b).norm()) < 1e-5 * largest for a, b in zip(grads, apart, strict=True))


@pytest.mark.parametrize(
    "kind", ["glm4v", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("qwen2_5_vl", "qwen2_5_omni_thinker"))]
)
def test_answers_are_those_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, plan = recipe(tmp_path, kind)
    images = media_inputs(loaded.run, load_tokenizer(loaded.run.model))
    tokenizer, model = load_tokenizer(loaded.run.model), load_model(loaded.run.model, plan).eval()
    made: list[torch.Tensor] = []
    generate: Any = model.generate
    monkeypatch.setattr(model, "generate", lambda *given, **more: made.append(generate(*given, **more)) or made[-1])
    ref = refer("videos/12-40x24.gif", tmp_path, "video")
    asked = [{"role": "user", "content": [{"type": "video", "ref": ref}, {"type": "text", "text": "What?"}]}]
    generate_reply(model, tokenizer, asked, GenerationSection(max_new_tokens=5), plan, images=images)
    row = {"messages": [{"role": "user", "content": "<video>What?"}], "videos": ["videos/12-40x24.gif"]}
    inputs = dict(given(kind, row, images, tmp_path, monkeypatch, prompt=True))
    inputs.pop("video_metadata", None)
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    wanted = generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=ends)[0].tolist()
    assert made[0][0].tolist() == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_resumes_shows_its_videos_and_answers(tmp_path: Path) -> None:
    """The answers in the report are those of a chat."""

    def losses(*, steps: int, output: str) -> dict[int, float]:
        training = {"output_dir": str(tmp_path / output), "max_steps": steps, "save_steps": 2, "resume": "auto",
                    "lr_scheduler_type": "constant", "per_device_train_batch_size": 2}  # fmt: skip
        film = str(tmp_path / "videos" / "12-40x24.gif")
        samples = {"sample_prompts": ["<video>What?"], "sample_media": [film], "progress": False, "probes": 0}
        generation = {"max_new_tokens": 4, "temperature": 0}
        loaded, plan = recipe(tmp_path, "qwen3_vl", training=training, logging=samples, generation=generation)
        train(loaded, plan)
        lines = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    whole = losses(steps=4, output="whole")
    losses(steps=2, output="parts")
    assert losses(steps=4, output="parts") == whole
    (row,) = json.loads((tmp_path / "whole" / "samples.json").read_text())["samples"]
    (medium,) = row["media"]
    assert [medium[key] for key in ("kind", "width", "height", "seconds")] == ["video", 40, 24, 1.44]
    with Image.open(io.BytesIO(base64.b64decode(medium["preview"].partition(",")[2]))) as image:
        assert getattr(image, "n_frames", 1) == 12
    session = open_session(open_run(str(tmp_path / "whole"), []))
    repl = Repl(session)
    repl.handle(f"/video {tmp_path / 'videos' / '12-40x24.gif'}")
    assert [one.kind for one in session.attached] == ["video"]
    assert [session.answer("What?", tuned=tuned) for tuned in (False, True)] == [row["before"], row["after"]]
    film = base64.b64encode((tmp_path / "videos" / "12-40x24.gif").read_bytes()).decode()
    content = [{"type": "video_url", "video_url": {"url": f"data:;base64,{film}"}}, {"type": "text", "text": "What?"}]
    events = io.StringIO()
    serve(session, io.StringIO(json.dumps({"id": 1, "messages": [{"role": "user", "content": content}]})), events)
    ready, *_, end = map(json.loads, events.getvalue().splitlines())
    assert (ready["images"], ready["videos"], end["answer"]) == (False, True, row["after"])


WAYS = {
    "path": lambda file: {"type": "video", "path": file.name},
    "video": lambda file: {"type": "video", "video": file.name},
    "url": lambda file: {
        "type": "video_url",
        "video_url": {"url": f"data:video/gif;base64,{base64.b64encode(file.read_bytes()).decode()}"},
    },
    "bytes": lambda file: {"type": "video", "video": {"bytes": None, "path": file.name}},
}


def test_all_ways_to_name_a_video_are_the_same(tmp_path: Path) -> None:
    file = write_video(tmp_path / "a.gif")
    content = [[make(file), {"type": "text", "text": "What?"}] for make in WAYS.values()]
    rows = [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "A."}]} for one in content]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    feed, _ = fed(*recipe(tmp_path, "qwen2_vl"))
    assert len({tuple(feed.split.example(index).segments[0].input_ids.tolist()) for index in range(len(WAYS))}) == 1


BAD = {
    "missing": ({"videos": ["gone.mp4"]}, "data.bad_media"),
    "text": ({"videos": ["rows.jsonl"]}, "data.bad_media"),
    "outside": ({"videos": ["../ok.gif"]}, "data.bad_media"),
    "two": ({"videos": ["ok.gif", "ok.gif"]}, "data.image_count"),
    "image": ({"videos": ["ok.gif"], "images": ["a.png"]}, "data.media_unsupported"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_video_names_its_row(name: str, tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_video(tmp_path / "ok.gif")
    change, code = BAD[name]
    rows = [seen("<video>?", videos=("ok.gif",)), {**seen("<video>?"), **change}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as error:
        fed(*recipe(tmp_path, "qwen2_vl"))
    assert (error.value.code, str(error.value.where).endswith("rows.jsonl line 2")) == (code, True)


@pytest.mark.parametrize(("kind", "data"), [("llava", {}), ("glm4v", {"images": True})])
def test_what_is_not_trained_on_videos_is_refused(kind: str, data: dict[str, Any], tmp_path: Path) -> None:
    if kind == "llava":
        image_model(tmp_path / "model", kind)
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, kind, data=data)
    assert error.value.code == "plan.images_unsupported"


def test_a_run_over_images_and_videos_keeps_no_features_of_images(tmp_path: Path) -> None:
    """transformers takes no pixels of videos beside them."""
    write_image(tmp_path / "a.png", 30, 40)
    rows = [*ROWS, {**seen("<image>?"), "images": ["a.png"]}]
    write_rows(tmp_path, rows)
    training = {"output_dir": str(tmp_path / "run"), "num_train_epochs": 2, "per_device_train_batch_size": len(rows)}
    loaded, plan = recipe(tmp_path, "qwen2_5_vl", data={"images": True}, training=training)
    assert plan.features is not None
    assert not plan.features.value
    train(loaded, plan)
    assert (tmp_path / "run" / "finished.json").is_file()
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, "qwen2_5_vl", data={"images": True, "cache_features": True})
    assert error.value.code == "plan.parts_conflict"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_learns_to_name_motions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of plain transformers with the saved model, to videos that training has not seen."""
    changes = [f"training.output_dir={tmp_path}", "precision=fp32"]
    loaded = load_config(ROOT / "configs" / "tiny" / "video_tiny.yaml", changes)
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    assert named(materialize("qwen2_5_vl-tiny"), monkeypatch) == [0, 0]
    train(loaded, plan)
    colours, ways = named(tmp_path / "final", monkeypatch)
    assert colours > 0.9
    assert ways > 0.9  # guessed: 0.25; by one frame, which shows the axis: 0.5


def named(folder: Path, patch: pytest.MonkeyPatch) -> list[float]:
    """The shares of new videos whose colour and way a model names."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, right, shown = AutoTokenizer.from_pretrained(folder), [0, 0], rows(32, 5)
    images = MediaProcessor(MediaSettings(str(folder), "qwen2_5_vl", "", kinds=("video",)), tokenizer)
    own = own_processor("qwen2_5_vl", images, patch)
    for row in shown:
        asked, answer = row["messages"]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts(asked["content"])}], tokenize=False, add_generation_prompt=True
        )
        made = np.stack(list(decoded(row["videos"][0]["bytes"], range(FRAMES))))
        told = [{"total_num_frames": FRAMES, "fps": FPS, "duration": FRAMES / FPS}]
        inputs = own(text=[text], videos=[made], return_tensors="pt", video_metadata=told)
        answered = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        said = tokenizer.decode(answered[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).split()
        for part, word in enumerate(answer["content"].split()):
            right[part] += said[part : part + 1] == [word]
    return [one / len(shown) for one in right]
