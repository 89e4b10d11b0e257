"""Operations of towers: the formula, by what a batch of rows holds, against torch's own count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_audio import KINDS, audio_model, heard, write_sound
from tiny_images import KINDS as SEEING
from tiny_images import asked, image_model, write_image
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMultimodalLM, Qwen2_5OmniThinkerForConditionalGeneration

from halftune.bench.tower_flops import INPUTS, tower_flops
from halftune.config.facts.media import AUDIO_FAMILIES, IMAGE_FAMILIES
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.run import RunConfig
from halftune.data.pipeline import prepare
from halftune.hardware.catalogue import lookup
from halftune.methods import make_method
from halftune.model.files.locate import media_of
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve
from halftune.train.batches.feed import Feed
from halftune.train.setup import media_inputs

DEEP = "deepstack_features"
HEARING = [kind for kind in KINDS if AUDIO_FAMILIES[kind].alone]


def batch_of(folder: Path, kind: str, tower: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """The config, and the inputs of the towers for two rows."""
    (image_model if tower == "vision" else audio_model)(folder / "model", kind)
    if tower == "vision":
        for name, width, height in (("a", 80, 48), ("b", 33, 47)):
            write_image(folder / f"{name}.png", width, height)
        rows = [asked("<image>?", images=("a.png",)), asked("<image>?", images=("b.png",))]
    else:
        rows = [heard("<audio>?", "1.0.wav"), heard("<audio>?", "0.6.wav")]
        for seconds in (1.0, 0.6):
            write_sound(folder / f"{seconds}.wav", seconds)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"name_or_path": str(folder / "model"), **changes.pop("model", {})},
        "precision": "fp32",
        "adapter": "none",
        "attention": "eager",
        "data": {"train": str(folder / "rows.jsonl"), "images": tower == "vision", "audio": tower == "audio"},
        "training": {"output_dir": str(folder / "run"), "per_device_train_batch_size": 2},
        **changes,
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    run = load_config(folder / "recipe.yaml").run
    facts = read_model_facts(run.model)
    plan, tokenizer = resolve(run, lookup("cpu"), facts), load_tokenizer(run.model)
    data = prepare(run, tokenizer, images=media_of(run))
    feed = Feed(data.train, run, plan.batch, make_method(run.method), 0, images=media_inputs(run, tokenizer))
    (batch,) = feed.micro_batches(feed.rows(0))
    return run, dict(batch.extras)


def counted(model: Any, given: dict[str, Any], tower: str, *, backward: bool) -> int:
    """Operations of a tower and its projector, by torch."""
    with FlopCounterMode(display=False) as counter:
        if tower == "vision":
            made = model.get_image_features(**given)
            if made.pooler_output is None:  # Llama 4 projects it later
                made.pooler_output = model.multi_modal_projector(made.last_hidden_state)
            out = torch.cat([one.flatten() for one in tree_leaves([made.pooler_output, vars(made).get(DEEP) or []])])
        elif "feature_attention_mask" not in given:
            out = model.get_audio_features(**given).pooler_output
        elif hasattr(model, "get_audio_features"):
            out = model.get_audio_features(**given).last_hidden_state
        else:
            out = model.model.multi_modal_projector(model.model.audio_tower(given["input_features"]).last_hidden_state)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


# Gemma 4 pools by a product with a matrix of zeros and ones, which is large beside a tiny tower.
CASES = [*((kind, "vision") for kind in SEEING if kind != "gemma4"), *((kind, "audio") for kind in HEARING)]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("kind", "tower"), CASES)
def test_the_formula_is_torchs_count(kind: str, tower: str, trained: bool, tmp_path: Path) -> None:
    parts = {tower: "full", "projector": "full"}
    if kind == "gemma4_unified" and trained:
        pytest.skip("not counted: gradients of the norm in front of its first product reach that one's input")
    run, extras = batch_of(tmp_path, kind, tower, model={"train": parts if trained else {}})
    omni = kind == "qwen2_5_omni_thinker"
    auto: Any = Qwen2_5OmniThinkerForConditionalGeneration if omni else AutoModelForMultimodalLM
    model = auto.from_pretrained(tmp_path / "model", attn_implementation="eager").requires_grad_(trained)
    names = IMAGE_FAMILIES[kind].inputs if tower == "vision" else INPUTS
    given = {name: extras[name] for name in names if name in extras}
    found = tower_flops(read_model_facts(run.model), run, given)
    assert found == pytest.approx(counted(model, given, tower, backward=trained), rel=0.01)


def test_lora_and_a_trained_projector_cost_what_they_do(tmp_path: Path) -> None:
    """Gradients pass frozen weights behind what is trained; adapters have gradients of their own."""
    run, extras = batch_of(tmp_path, "llava", "vision")
    facts, given = read_model_facts(run.model), {"pixel_values": extras["pixel_values"]}
    frozen = tower_flops(facts, run, given)
    tree = run.model_dump()
    projector = RunConfig.model_validate({**tree, "model": {**tree["model"], "train": {"projector": "full"}}})
    rows = 2 * 4 * 2.0  # images, patches of each, a multiply-add
    first, second = 16 * 32, 32 * 32
    assert tower_flops(facts, projector, given) - frozen == rows * (first + 2 * second)
    train = {"vision": "lora", "projector": "frozen"}
    adapted = {**tree, "adapter": {"type": "lora", "rank": 2}, "model": {**tree["model"], "train": train}}
    more = tower_flops(facts, RunConfig.model_validate(adapted), given) - frozen
    places, weights = 2 * 5, 2 * (4 * 16 * 16 + 2 * 16 * 24)  # with the class; of two layers
    adapters = 2 * 2 * (4 * 32 + 2 * 40)
    attention = 2 * 2 * 4 * 16 * 5 * 5
    assert more == pytest.approx(2 * places * weights + 2 * attention + 6 * places * adapters + rows * (first + second))


def test_features_from_the_cache_cost_nothing(tmp_path: Path) -> None:
    run, extras = batch_of(tmp_path, "qwen2_5_vl", "vision")
    assert tower_flops(read_model_facts(run.model), run, {"image_grid_thw": extras["image_grid_thw"]}) == 0
