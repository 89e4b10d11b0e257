"""Images in rows, from the file to the loss: ids equal to the processor's, loss and gradients to transformers'."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from media_runs import fed, media_recipe
from PIL import Image
from tiny_images import KINDS, ROWS, asked, image_model, write_image, write_rows
from transformers import AutoModelForImageTextToText, AutoTokenizer

from halftune.cli.preflight import check_inputs
from halftune.config.facts import media
from halftune.config.facts.media import IMAGE_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.core.errors import DataError, MissingPackageError, PlanError
from halftune.core.optional import pip_line
from halftune.data.media.processor import MediaProcessor, MediaSettings
from halftune.data.pipeline import prepare
from halftune.data.sources.builtin.patterns import rows
from halftune.data.store import NO_LABEL
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.model.adapters import attach_adapter
from halftune.model.files.builtin import materialize
from halftune.model.files.locate import media_of
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import Plan, resolve
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent


def recipe(folder: Path, kind: str, **changes: Any) -> tuple[Any, Plan]:
    model, rows = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        image_model(model, kind)
    return media_recipe(folder, rows if rows.exists() else write_rows(folder, ROWS), {"images": True}, **changes)


def test_the_table_is_tested() -> None:
    assert set(KINDS) == set(IMAGE_FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_processors(kind: str, tmp_path: Path) -> None:
    feed, images = fed(*recipe(tmp_path, kind))
    assert len(feed.split) == len(ROWS)
    for index, row in enumerate(ROWS):
        segment = feed.split.example(index).segments[0]
        text = images._own.tokenizer.apply_chat_template(
            [{**turn, "content": parts(turn["content"])} for turn in row["messages"]], tokenize=False
        )
        opened = [Image.open(tmp_path / name) for name in row["images"]]
        expected = images._own(text=[text], images=opened or None)["input_ids"][0]
        assert images.family.torchvision != type(images._own.image_processor).__name__.endswith("Pil")
        assert segment.input_ids.tolist() == list(expected)
        assert (
            images._own.tokenizer.decode(segment.input_ids[segment.loss_mask]).count("A red square.")
            == len(row["messages"]) // 2
        )


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_placeholders_have_no_labels(kind: str, tmp_path: Path) -> None:
    feed, images = fed(*recipe(tmp_path, kind, method={"type": "sft", "train_on": "all"}))
    for index in range(len(ROWS)):
        segment = feed.split.example(index).segments[0]
        placeholder = segment.input_ids == images._own.image_token_id
        assert not segment.loss_mask[placeholder].any()
        assert segment.loss_mask[~placeholder].mean() > 0.5


def test_long_rows_are_cut_around_their_images(tmp_path: Path) -> None:
    """LLaMA-Factory's rule cuts the end of a question or an answer; a cut through an image drops the row."""
    write_image(tmp_path / "red.png", 24, 24)
    said = {"role": "assistant", "content": "A red square. " * 40}
    asked_first = [{"role": "user", "content": "<image> What is it? " + "Look. " * 40}, said]
    asked_last = [{"role": "user", "content": "Look. " * 60 + "<image>"}, said]
    rows = [{"messages": one, "images": ["red.png"]} for one in (asked_first, asked_last)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    feed, images = fed(*recipe(tmp_path, "qwen2_5_vl", data={"overlong": "proportional", "max_length": 96}))
    assert len(feed.split) == 1
    segment = feed.split.example(0).segments[0]
    whole, _ = fed(*recipe(tmp_path, "qwen2_5_vl", data={"overlong": "error", "max_length": 4096}))
    pads = [
        int((one.input_ids == images._own.image_token_id).sum())
        for one in (segment, whole.split.example(0).segments[0])
    ]
    assert pads[0] == pads[1] > 0
    assert len(segment.input_ids) == 96
    assert segment.media


def test_without_torchvision_a_type_that_needs_it_is_refused_first(tmp_path: Path, monkeypatch: Any) -> None:
    loaded, _ = recipe(tmp_path, "llava")
    monkeypatch.setitem(IMAGE_FAMILIES, "llava", replace(IMAGE_FAMILIES["llava"], torchvision=True))
    monkeypatch.setattr(media, "version_of", lambda _: None)
    (tmp_path / "rows.jsonl").write_text("{")
    for check in (lambda: media_of(loaded.run), lambda: check_inputs(loaded, run_facts(loaded.run))):
        with pytest.raises(MissingPackageError) as error:
            check()
        assert error.value.code == "core.package_missing"
        assert error.value.remedy == pip_line("torchvision")


def test_another_processor_than_the_types_is_refused(tmp_path: Path) -> None:
    loaded, _ = recipe(tmp_path, "llava")
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaNextProcessor"}))
    with pytest.raises(DataError) as error:
        media_of(loaded.run)
    assert error.value.code == "model.no_image_processor"


@pytest.mark.parametrize("packing", [False, True])
def test_pixtral_is_a_llava_with_another_processor(packing: bool, tmp_path: Path) -> None:
    options, images, processor = KINDS["mistral3"][:3]
    tower = {"vision_config": options["vision_config"], "vision_feature_select_strategy": "full"}
    image_model(tmp_path / "model", "llava", **tower)
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {**processor, "spatial_merge_size": 1, "image_token": "<image>", "processor_class": "PixtralProcessor"}
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps(processor))
    if packing:
        test_packed_rows_are_transformers_samples_alone("llava", "none", tmp_path)
    else:
        test_ids_are_the_processors("llava", tmp_path)
        test_loss_and_gradients_are_transformers("llava", "lora", tmp_path)


def parts(content: str) -> list[dict[str, str]]:
    pieces = content.replace("<image>", "\0<image>\0").split("\0")
    return [{"type": "image"} if one == "<image>" else {"type": "text", "text": one} for one in pieces if one]


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_transformers(kind: str, adapter: str, tmp_path: Path) -> None:
    loaded, plan = recipe(tmp_path, kind, adapter={"type": adapter})
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.3)
    PolicyModel(model).nll_sum(batch).backward()
    ours = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert ours
    assert not [name for name in ours if "vision" in name or "visual" in name or "project" in name.split(".")[-2]]

    model_loss = float(PolicyModel(model).nll_sum(batch).detach())
    model = transformers_own(model, loaded, adapter)
    loss, rounded = plain(model, batch, images, tmp_path)
    assert abs(model_loss - loss) < 1e-5 * loss
    _, exact = plain(in_fp64(model), batch, images, tmp_path)
    assert_gradients(ours, rounded, exact)


def transformers_own(model: Any, loaded: Any, adapter: str) -> Any:
    """The model with its adapter, or without one as transformers loads it."""
    if adapter == "none":
        model = AutoModelForImageTextToText.from_pretrained(loaded.run.model.name_or_path, dtype=torch.float32).train()
    model.set_experts_implementation("eager")
    return model


def in_fp64(model: Any) -> Any:
    """The model in fp64, its attention too, which the guard would cast."""
    model.set_attn_implementation("eager")
    return model.double()


def assert_gradients(ours: Any, rounded: Any, exact: Any) -> None:
    """Gradients in fp32 are those in fp64, up to rounding.

    Sums of terms of both signs, as A_log's gradient, have rounding errors of the size of the terms.
    """
    largest = max(float(one.norm()) for one in exact.values())
    for name, mine in ours.items():
        allowed = (
            1e-5 * exact[name].norm()
            + 2 * (rounded[name] - exact[name]).norm()
            + torch.finfo(torch.float32).eps * largest
        )
        assert float((mine - exact[name]).norm()) <= float(allowed), name


def plain(model: Any, batch: Any, images: Any, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' forward pass, with the inputs of its own image processor."""
    model.zero_grad()
    opened = [[Image.open(folder / name) for name in ROWS[index]["images"]] for index in batch.examples]
    given = opened if images.family.nested else [image for group in opened for image in group]
    made = images._own._process_images(given, **{**images._options, "return_tensors": "pt"})[0]
    arguments = {name: made[name] for name in images.family.inputs}
    arguments["pixel_values"] = arguments["pixel_values"].to(next(model.parameters()).dtype)
    if images.family.token_types:
        arguments[images.family.token_types] = batch.tokens[images.family.token_types]
    tokens = {name: batch.tokens[name] for name in ("input_ids", "attention_mask")}
    logits = model(**tokens, **arguments, use_cache=False).logits
    targets = batch.tokens["labels"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets, ignore_index=NO_LABEL, reduction="sum"
    )
    loss.backward()
    grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return float(loss.detach()), grads


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not IMAGE_FAMILIES[kind].two_way and kind != "llama4"])
def test_packed_rows_are_transformers_samples_alone(kind: str, adapter: str, tmp_path: Path) -> None:
    loaded, plan = recipe(tmp_path, kind, adapter={"type": adapter}, data={"packing": True, "max_length": 512})
    feed, images = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    assert "seq_idx" in batch.tokens
    assert len(batch.examples) == len(ROWS)
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.3)
    loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    ours = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert ours

    model = transformers_own(model, loaded, adapter)
    model.set_attn_implementation("eager")
    plain_loss, rounded = alone(model, batch, feed, images, tmp_path)
    assert abs(float(loss.detach()) - plain_loss) < 1e-5 * plain_loss
    _, exact = alone(in_fp64(model), batch, feed, images, tmp_path)
    assert_gradients(ours, rounded, exact)


def alone(model: Any, batch: Any, feed: Any, images: Any, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' forward pass on each sample of a packed row, which has its positions."""
    model.zero_grad()
    total = torch.zeros(())
    for index in batch.examples:
        segment = feed.split.example(index).segments[0]
        ids = torch.from_numpy(segment.input_ids.astype("int64"))[None]
        arguments = images.token_types(ids)
        if opened := [Image.open(folder / name) for name in ROWS[index]["images"]]:
            given = [opened] if images.family.nested else opened
            made = images._own._process_images(given, **{**images._options, "return_tensors": "pt"})[0]
            arguments |= {name: made[name] for name in images.family.inputs}
            arguments["pixel_values"] = arguments["pixel_values"].to(next(model.parameters()).dtype)
        mask = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **arguments).logits[0, :-1]
        if images.family.mrope and opened:
            body = getattr(model, "get_base_model", lambda: model)().model
            grids = {"image_grid_thw": arguments["image_grid_thw"], **images.token_types(ids)}
            where = batch.tokens["seq_idx"][0] == batch.examples.index(index)
            expected = body.get_rope_index(ids, attention_mask=mask, **grids)[0].long()  # Qwen3-Omni's are floats
            assert torch.equal(batch.tokens["position_ids"][1:, :, where], expected)
        labels = torch.from_numpy(segment.labels.astype("int64"))[1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
    total.backward()
    return float(total.detach()), {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


BAD = {
    "missing": ("gone.png", "data.bad_media"),
    "outside": ("../secret.png", "data.bad_media"),
    "link": ("link.png", "data.bad_media"),
    "address": ("https://example.org/a.png", "data.bad_media"),
    "text": ("rows.jsonl", "data.bad_media"),
    "bomb": ("bomb.bmp", "data.bad_media"),
    "two": (["ok.png", "ok.png"], "data.image_count"),
    "audio": ({"audios": ["a.wav"]}, "data.media_unsupported"),
}


def hostile(folder: Path, name: str) -> str:
    """Rows with one good and one bad image; returns the code of its error."""
    inside, given, code = folder / "data", *BAD[name]
    write_image(inside / "ok.png", 30, 20)
    write_image(folder / "secret.png", 30, 20)
    (inside / "link.png").symlink_to(folder / "secret.png")
    size = (40_000).to_bytes(4, "little")  # of a header alone: 1.6 billion pixels
    (inside / "bomb.bmp").write_bytes(
        b"BM" + bytes(8) + b"\x36\0\0\0\x28\0\0\0" + size + size + b"\x01\0\x18\0" + bytes(24)
    )
    good = asked("<image>What?", images=("ok.png",))
    bad = {**good, **(given if isinstance(given, dict) else {"images": given if isinstance(given, list) else [given]})}
    rows = [{**row, "audios": row.get("audios", [])} for row in (good, bad)]
    (folder / "rows.jsonl").write_text("")
    (inside / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return code


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_names_its_row(name: str, tmp_path: Path) -> None:
    code = hostile(tmp_path, name)
    loaded, plan = recipe(tmp_path, "qwen2_5_vl", data={"train": str(tmp_path / "data" / "rows.jsonl")})
    with pytest.raises(DataError) as error:
        fed(loaded, plan)
    assert error.value.code == code
    assert str(error.value.where).endswith("rows.jsonl line 2")


def test_bad_images_are_dropped_if_asked_and_counted(tmp_path: Path) -> None:
    hostile(tmp_path, "outside")
    data = {"train": str(tmp_path / "data" / "rows.jsonl"), "on_bad_media": "drop"}
    loaded, _ = recipe(tmp_path, "llava", data=data)
    made = prepare(loaded.run, load_tokenizer(loaded.run.model), images=media_of(loaded.run))
    (report,) = made.report.train
    assert report.kept == 1
    assert [count.count for count in report.dropped.values()] == [1]
    loaded, _ = recipe(tmp_path, "llava", data={**data, "media_folder": str(tmp_path)})
    with pytest.raises(DataError):  # ok.png is not in that folder, ../secret.png is outside
        prepare(loaded.run, load_tokenizer(loaded.run.model), images=media_of(loaded.run))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packing", [True, False])
def test_a_run_trains_on_images_resumes_and_sees_a_changed_file(packing: bool, tmp_path: Path) -> None:
    def losses(*, steps: int, output: str) -> dict[int, float]:
        loaded, plan = recipe(
            tmp_path,
            "qwen2_5_vl",
            data={"packing": packing, "max_length": 128},
            training={
                "output_dir": str(tmp_path / output),
                "max_steps": steps,
                "lr_scheduler_type": "constant",
                "per_device_train_batch_size": 2,
                "save_steps": 2,
                "resume": "auto",
            },
        )
        train(loaded, plan)
        lines = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    whole = losses(steps=4, output="whole")
    losses(steps=2, output="parts")
    assert losses(steps=4, output="parts") == whole
    before = prepared_ids(tmp_path)
    write_image(tmp_path / ROWS[1]["images"][0], 80, 80)
    assert prepared_ids(tmp_path) != before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_an_exported_model_is_the_trained_one_and_has_its_processor(adapter: str, tmp_path: Path) -> None:
    training = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "learning_rate": 0.05}
    loaded, plan = recipe(tmp_path, "llava", adapter={"type": adapter}, training=training)
    train(loaded, plan)
    run, out = open_run(str(tmp_path / "run"), ["precision=fp32"]), tmp_path / "exported"
    export_run(run, out)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    feed, _ = fed(loaded, plan)
    (batch,) = feed.micro_batches(feed.rows(0))
    plain = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        ours = PolicyModel(open_session(run).model).nll_sum(batch)
        exported, before = PolicyModel(plain).nll_sum(batch), PolicyModel(base).nll_sum(batch)
    assert abs(float(exported - ours)) < 1e-5 * float(ours)
    assert abs(float(before - ours)) > 1e-3 * float(ours)


def prepared_ids(folder: Path) -> list[int]:
    feed, _ = fed(*recipe(folder, "qwen2_5_vl"))
    return [len(feed.split.example(index).segments[0].input_ids) for index in range(len(ROWS))]


def test_the_real_set_becomes_tokens(shared_data: Path, tmp_path: Path) -> None:
    if not (shared_data / "mllm_demo.json").exists():
        pytest.skip("mllm_demo is not in ../shared/data")
    shutil.copy(shared_data / "mllm_demo.json", tmp_path)
    shutil.copytree(shared_data / "mllm", tmp_path / "mllm_demo_data")
    changes = {"train": str(tmp_path / "mllm_demo.json"), "image_max_pixels": 40_000}
    feed, images = fed(*recipe(tmp_path, "qwen2_vl", data=changes))
    (batch,) = feed.micro_batches(feed.rows(0)[:3])
    placeholders = int((batch.tokens["input_ids"] == images._own.image_token_id).sum())
    assert len(feed.split) == 6
    grids: Any = batch.extras["image_grid_thw"]
    assert placeholders == int(grids.prod(-1).sum()) // 4 > 0


REFUSED: dict[str, dict[str, Any]] = {
    "packing": {"data": {"packing": True}},
    "cutting": {"data": {"packing": {"split": True}}},
    "no mask": {"attention": "fa2", "precision": "bf16"},
    "method": {"method": "pretrain"},
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_images_do_not_go_with_is_refused(asked: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, "gemma3", **REFUSED[asked])
    assert error.value.code == "plan.images_unsupported"


def test_a_model_type_outside_the_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(IMAGE_FAMILIES, "llava")
    with pytest.raises(PlanError) as error:
        recipe(tmp_path, "llava")
    assert error.value.code == "plan.images_unsupported"


def test_image_tokens_that_see_each_other_get_a_backend_with_a_mask(tmp_path: Path) -> None:
    loaded, _ = recipe(tmp_path, "gemma3", data={"packing": "auto"})
    plan = resolve(loaded.run, lookup("a100"), read_model_facts(loaded.run.model))
    assert plan.attention.softmax.value == "sdpa"
    assert not plan.batch.packing.value


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_learns_to_name_pictures(tmp_path: Path) -> None:
    """Answers of plain transformers with the saved model, to pictures that training has not seen.

    After a third of an epoch it knows the colours; patterns take the whole recipe.
    """
    short = [f"training.output_dir={tmp_path}", "training.max_steps=40", "training.per_device_train_batch_size=8"]
    loaded = load_config(ROOT / "configs" / "tiny" / "vision_tiny.yaml", [*short, "precision=fp32"])
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))
    before = named(materialize("qwen2_5_vl-tiny"))
    train(loaded, plan)
    assert before == (0, 0)
    colours, patterns = named(tmp_path / "final")
    assert colours > 0.9
    assert patterns > 0.35  # guessed: 0.25


def named(folder: Path) -> tuple[float, float]:
    """The shares of new pictures whose colour and whose pattern a model names."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, shown = AutoTokenizer.from_pretrained(folder), rows(24, 2)  # each colour with each pattern
    own = MediaProcessor(MediaSettings(str(folder), "qwen2_5_vl", ""), tokenizer)._own
    right = [0, 0]
    for row in shown:
        question, answer = row["messages"]
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        asked = [{"role": "user", "content": parts(question["content"])}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        inputs = own(text=[text], images=[image], return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        said = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for part, word in enumerate(answer["content"].split()):
            right[part] += said.split()[part : part + 1] == [word]
    return right[0] / len(shown), right[1] / len(shown)
