"""GRPO on prompts with images and audio: answers, their scoring pass, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_state import live_state
from test_audio import recipe as audio_recipe
from test_images import fed, recipe
from test_media_answers import check, model_of
from tiny_audio import KINDS as AUDIO_KINDS
from tiny_audio import write_sound
from tiny_images import KINDS, write_rows
from transformers import AutoConfig

from halftune.config.facts.media import AUDIO_FAMILIES
from halftune.core.errors import PlanError
from halftune.data.media.inputs import prompt_inputs
from halftune.data.media.reference import unpack
from halftune.methods import AdapterOff
from halftune.methods.grpo import ADVANTAGES
from halftune.model.files.architectures import multimodal_auto
from halftune.model.generate import generate_answers
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.train.parallel import make_strategy
from halftune.train.rollouts.grpo import GrpoRollouts
from halftune.train.rollouts.sampling import Sampling
from halftune.train.trainer import train

TWO, ONE = ["images/60x40.png", "images/24x80.png"], ["images/33x47.png"]
ROWS = {
    "rows": [
        {"prompt": "<image>What is here, and <image> here?", "images": TWO},
        {"prompt": "What is red?", "images": []},
    ],
    "answered": [  # the prompt ends before the last answer
        {
            "messages": [
                {"role": "user", "content": "What is this?\n<image>"},
                {"role": "assistant", "content": "Blue."},
                {"role": "user", "content": "And this? <image>"},
                {"role": "assistant", "content": "Red."},
                {"role": "user", "content": "<image>"},
            ],
            "images": [*TWO, *ONE],
        }
    ],
}
# Rewards that differ within a group: the last token of an answer.
REWARD = "def last(completion_ids, **_):\n    return [float(one[-1] % 7) for one in completion_ids]\n"
METHOD = {"type": "grpo", "num_generations": 3, "max_completion_length": 5}


def grpo(folder: Path, kind: str, **changes: Any) -> Any:
    """Config and plan of a run on ``ROWS``."""
    if not (folder / "images").exists():
        write_rows(folder, [{"images": TWO + ONE}])
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": [str(folder / f"{name}.jsonl") for name in ROWS], **changes.pop("data", {})}
    return recipe(folder, kind, method={**method(folder), **changes.pop("method", {})}, data=data, **changes)


def method(folder: Path) -> dict[str, Any]:
    (folder / "rewards.py").write_text(REWARD)
    return {**METHOD, "rewards": [{"function": "last", "file": str(folder / "rewards.py")}]}


FEW = ("qwen2_5_vl", "gemma3", "idefics3")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in FEW else pytest.mark.nightly) for one in KINDS])
def test_answers_of_a_batch_are_those_of_each_prompt_alone(kind: str, tmp_path: Path) -> None:
    """Of a batch padded on the left, in which prompts have two, one and no images; alone as chat asks."""
    assert_answers(tmp_path, *fed(*grpo(tmp_path, kind)))


@pytest.mark.parametrize("kind", AUDIO_KINDS)
def test_answers_to_sounds_are_those_of_each_prompt_alone(kind: str, tmp_path: Path) -> None:
    for name in ("0.9.wav", "0.31.wav"):
        write_sound(tmp_path / name, float(Path(name).stem))
    sounds = ["0.9.wav"] if AUDIO_FAMILIES[kind].single else ["0.9.wav", "0.31.wav"]
    rows = [{"prompt": "<audio>What?" * len(sounds), "audios": sounds}, {"prompt": "What is red?", "audios": []}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_answers(tmp_path, *fed(*audio_recipe(tmp_path, kind, method=method(tmp_path))))


def assert_answers(folder: Path, feed: Any, images: Any) -> None:
    auto = multimodal_auto(AutoConfig.from_pretrained(folder / "model"))
    model = auto.from_pretrained(folder / "model", dtype=torch.float32).eval()
    segments = [feed.split.example(index).segments[0] for index in range(len(feed.split))]
    options: Any = {"ends": [], "most": 5, "pad": 0}

    def answers(some: list[Any]) -> list[list[int]]:
        inputs = partial(prompt_inputs, images, [one.media for one in some], "")
        made = generate_answers(model, [one.input_ids for one in some], inputs=inputs, **options)
        return [one.tolist() for one in made]

    assert answers(segments) == [answers([one])[0] for one in segments]
    assert {bool(one.media) for one in segments} == {True, False}


def rollouts_of(loaded: Any, plan: Any, feed: Any, model: Any) -> GrpoRollouts:
    strategy = make_strategy(SimpleNamespace(device=torch.device("cpu"), num_processes=1), plan)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(loaded.run.model)
    parts = {"config": loaded.run, "plan": plan, "feed": feed, "method": feed.method, "model": model}
    return GrpoRollouts(live_state(strategy=strategy, tokenizer=tokenizer, **parts))


@pytest.mark.parametrize(
    ("kind", "packing"), [("qwen2_5_vl", True), ("qwen3_vl", False), ("llava", True), ("lfm2_vl", True)]
)
def test_answers_are_scored_as_by_transformers_own_model(kind: str, packing: bool, tmp_path: Path) -> None:
    """The loss of sampled answers and its gradients; each prompt's images are those of all its answers."""
    loaded, plan = grpo(tmp_path, kind, data={"packing": packing, "max_length": 512}, method={"beta": 0.2})
    feed, images = fed(loaded, plan)
    model = model_of(loaded, plan)
    (asked,) = feed.micro_batches(feed.rows(0))
    (batch,) = rollouts_of(loaded, plan, feed, model)([asked], feed)
    assert ("seq_idx" in batch.tokens) == packing
    advantages, policy = batch.columns[ADVANTAGES], PolicyModel(model)
    assert advantages.any()
    ids_of = answers_in(batch)
    prompts = [feed.split.example(index).segments[0] for index in batch.examples for _ in range(3)]

    def logprobs(ids: torch.Tensor, prompt: Any) -> torch.Tensor:
        refs = unpack(prompt.media) if prompt.media else ()
        dtype = next(model.parameters()).dtype
        given = {name: one.to(dtype) if one.is_floating_point() else one
                 for name, one in (images.inputs([refs]) if refs else {}).items()}  # fmt: skip
        given |= images.token_types(ids[None])
        logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **given).logits
        start = len(prompt.input_ids)
        return logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[start:, None])[:, 0]

    def wanted() -> torch.Tensor:
        losses = []
        for ids, prompt, advantage in zip(ids_of, prompts, advantages.tolist(), strict=True):
            assert ids[: len(prompt.input_ids)].tolist() == prompt.input_ids.tolist()
            with torch.no_grad(), model.disable_adapter():
                known = logprobs(ids, prompt)
            values = logprobs(ids, prompt)
            apart = known - values
            losses.append((-(values - values.detach()).exp() * advantage + 0.2 * (apart.exp() - apart - 1)).sum())
        return torch.stack(losses).sum()

    terms = int(policy.label_counts(batch).sum())
    check(lambda batch: feed.method.loss(policy, batch, AdapterOff(policy)).total, batch, model, wanted, terms)


def test_placeholders_are_never_sampled(tmp_path: Path) -> None:
    loaded, _ = grpo(tmp_path, "llava")
    logits = torch.tensor([[0.0, 1.0, 9.0, 1.0]]).expand(50, -1)
    for never, likely in (((), True), ((2,), False)):
        chosen = Sampling(loaded.run.method, range(50), torch.device("cpu"), never)(logits[:, :1], logits).argmax(1)
        assert (2 in chosen.tolist()) == likely


def answers_in(batch: Any) -> list[torch.Tensor]:
    """The token ids of each segment, without padding."""
    ids = batch.tokens["input_ids"]
    if "seq_idx" in batch.tokens:
        owners = batch.tokens["seq_idx"][0]
        return [ids[0, owners == number] for number in range(len(batch.segment_of_example))]
    return [row[mask.bool()] for row, mask in zip(ids, batch.tokens["attention_mask"], strict=True)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_answers_prompts_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are the same with the features of the images kept, and a resumed run goes on with the same answers."""
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))

    def losses(output: str, steps: int, *, features: bool) -> list[float]:
        training = {
            "output_dir": str(tmp_path / output), "max_steps": steps, "per_device_train_batch_size": 3,
            "learning_rate": 0.05, "lr_scheduler_type": "constant", "save_steps": 1, "resume": "auto",
        }  # fmt: skip
        data = {"packing": "auto", "max_length": 256, "cache_features": features}
        changes = {"num_iterations": 2, "dynamic_sampling": 1}
        train(*grpo(tmp_path, "qwen2_5_vl", training=training, data=data, method=changes))
        lines = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    whole = losses("whole", 3, features=False)
    losses("parts", 1, features=False)
    assert losses("parts", 3, features=False) == whole
    assert not list((tmp_path / "cache").glob("features/*/*"))
    assert losses("kept", 3, features=True) == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert list((tmp_path / "cache").glob("features/*/*"))


REFUSED: dict[str, dict[str, Any]] = {
    "server": {"method": {"server": {"url": "http://127.0.0.1:1"}}},
    "sharded": {"distributed": {"strategy": "fsdp2", "num_processes": 2}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_samplers_that_see_no_images_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        grpo(tmp_path, "qwen2_5_vl", **REFUSED[name])
    assert error.value.code == "plan.images_unsupported"
