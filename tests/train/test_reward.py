"""Reward models: equal to TRL in loss and gradients, scores of packed rows, and results that plain libraries load."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from peft import AutoPeftModelForSequenceClassification
from process_group import curve
from tiny_model import SIZES
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.reward_trainer import RewardTrainer

from halftune.cli.verbs.results import chat
from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.facts.model import read_model_facts
from halftune.config.sections.method import RewardMethod
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError, PlanError
from halftune.data.batch import WEIGHT, collate
from halftune.data.pipeline import prepare
from halftune.data.store import Example, Segment
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.methods import AdapterOff
from halftune.methods.reward import MARGIN, Reward
from halftune.model.load.score_head import ScoreHead
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve
from halftune.train.trainer import train

PAD = 0


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}  # its norms compute in fp64, too


def scorer(sizes: dict[str, Any] = {**BUILTIN_MODELS["qwen2-tiny"], **SIZES["qwen2-tiny"]}) -> Any:  # noqa: B006
    sizes = {**sizes, "vocab_size": 37, "num_labels": 1, "pad_token_id": PAD}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**sizes), dtype=torch.float32)
    model.score.__class__ = ScoreHead
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def pairs(count: int) -> list[Example]:
    made = []
    for number in range(count):
        lengths = torch.randint(2, 12, (2,)).tolist()
        ids = [torch.randint(3, 37, (length,), dtype=torch.int32).numpy() for length in lengths]
        ids[0][-1] = PAD if number == 1 else 5  # where padding is EOS, the token before it is scored
        made.append(Example(tuple(Segment(one, one >= 0) for one in ids), {MARGIN: number / 4}))
    return made


class Accelerator:
    """What TRL's loss asks of accelerate in one process."""

    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)


def by_trl(model: Any, examples: list[Example], center: float | None) -> tuple[torch.Tensor, Any]:
    """TRL's loss of the same pairs and its metrics; its batch is made by hand (all chosen, then all rejected)."""
    ours = collate(examples, PAD, packed=False).tokens
    order = [*range(0, 2 * len(examples), 2), *range(1, 2 * len(examples), 2)]
    inputs = {name: ours[name][order] for name in ("input_ids", "attention_mask")}
    inputs["margin"] = torch.tensor([one.columns[MARGIN] for one in examples])
    trainer: Any = RewardTrainer.__new__(RewardTrainer)
    trainer.model, trainer.accelerator, trainer._tp_size, trainer._total_train_tokens = model, Accelerator(), 1, 0
    trainer.args = type("Args", (), {"center_rewards_coefficient": center})
    trainer._metrics = {mode: {name: [] for name in METRICS} for mode in ("train", "eval")}
    return trainer.compute_loss(model, inputs), trainer._metrics["train" if model.training else "eval"]


METRICS = ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_loss_and_gradients_are_those_of_trl(packed: bool, center: float) -> None:
    for _ in range(3):
        model, examples = scorer(), pairs(4)
        batch = collate(examples, PAD, packed=packed)
        batch.columns[WEIGHT] = torch.ones(4)
        batch.columns[MARGIN] = torch.tensor([one.columns[MARGIN] for one in examples])
        made = Reward(RewardMethod(type="reward", center_coefficient=center)).loss(
            PolicyModel(model), batch, AdapterOff(PolicyModel(model))
        )
        wanted, metrics = by_trl(model, examples, center or None)
        torch.testing.assert_close(made.total / 4, wanted, rtol=1e-5, atol=0)
        measured = {name: float(total / count) for name, (total, count) in made.metrics.items()}
        measured["mean_reward"] = (measured["rewards/chosen"] + measured["rewards/rejected"]) / 2
        same = {"mean_reward": "mean_reward", "margin": "rewards/margins", "accuracy": "rewards/accuracies"}
        assert {name: measured[one] for name, one in same.items()} == pytest.approx(
            {name: metrics[name][-1] for name in same}, rel=1e-5, abs=1e-6
        )
        weights = list(model.parameters())
        mine, theirs = (torch.autograd.grad(loss, weights) for loss in (made.total / 4, wanted))
        norm = torch.stack([one.norm() for one in theirs]).norm()
        apart = torch.stack([(a - b).norm() for a, b in zip(mine, theirs, strict=True)]).norm()
        assert float(apart / norm) < 1e-5


def test_the_gradient_is_that_of_finite_differences() -> None:
    model, batch = scorer(GPT2).double().eval(), collate(pairs(3), PAD, packed=False)
    batch.columns[WEIGHT] = torch.tensor([1.0, 1.0, 0.0])
    method = Reward(RewardMethod(type="reward", center_coefficient=0.1))
    for weight in (model.score.weight, model.transformer.h[0].mlp.c_fc.weight):
        (gradient,) = torch.autograd.grad(
            method.loss(PolicyModel(model), batch, AdapterOff(PolicyModel(model))).total, [weight]
        )
        step = 1e-5 * torch.randn_like(weight)
        sides = []
        for sign in (1, -1):
            weight.data += sign * step
            sides.append(float(method.loss(PolicyModel(model), batch, AdapterOff(PolicyModel(model))).total.detach()))
            weight.data -= sign * step
        assert (sides[0] - sides[1]) / 2 == pytest.approx(float((gradient * step).sum()), rel=1e-6)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"Is {n} even?", "chosen": "yes, it is" * (1 + n % 2), "rejected": "no idea " * (1 + n % 3)}
        for n in range(16)
    ]
    path.write_text("".join(json.dumps({**row, "margin": 0.1}) + "\n" for row in rows))
    return path


def test_tokens_are_those_of_trl_and_margins_reach_the_batch(recipe: Any, data: Path) -> None:
    loaded, _ = recipe(f"data.train={data}", "method=reward")
    tokenizer = load_tokenizer(loaded.run.model)
    made = prepare(loaded.run, tokenizer).train.example(0)
    assert dict(made.columns) == {MARGIN: 0.1}
    row = json.loads(data.read_text().splitlines()[0])
    for segment, name in zip(made.segments, ("chosen", "rejected"), strict=True):
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
        expected: Any = tokenizer.apply_chat_template(messages, return_dict=True)
        assert segment.input_ids.tolist() == expected["input_ids"]


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_result_scores_in_plain_libraries(recipe: Any, data: Path, adapter: str, tmp_path: Path) -> None:
    loaded, plan = recipe(f"data.train={data}", "method=reward", f"adapter={adapter}", "training.learning_rate=1e-2")
    assert plan.method.head.value == "score"
    folder = train(loaded, plan).folder
    assert curve(folder, "rewards/accuracies")[-1] > 0.9
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    options = {"pad_token_id": tokenizer.pad_token_id}
    if adapter == "lora":
        result: Any = AutoPeftModelForSequenceClassification.from_pretrained(folder / "final", num_labels=1)
        result.base_model.model.config.pad_token_id = options["pad_token_id"]
    else:
        result = AutoModelForSequenceClassification.from_pretrained(folder / "final")
    export_run(open_run(str(folder)), tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.num_labels == 1
    examples = [prepare(loaded.run, load_tokenizer(loaded.run.model)).train.example(index) for index in range(4)]
    tokens = collate(examples, tokenizer.pad_token_id, packed=False).tokens
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        scores, again = (model(**inputs).logits[:, 0] for model in (result.eval(), merged.eval()))
    torch.testing.assert_close(scores, again, rtol=1e-4, atol=1e-5)
    assert bool((scores.view(-1, 2)[:, 0] > scores.view(-1, 2)[:, 1]).all())
    parser = ArgumentParser()
    chat.add_arguments(parser)
    with pytest.raises(ModelError) as error:
        chat.run(parser.parse_args([str(folder), "--prompt", "hello"]))
    assert error.value.code == "infer.reward_model"


def test_what_cannot_score_is_refused(recipe: Any, data: Path) -> None:
    loaded, _ = recipe(f"data.train={data}", "method=reward")
    facts = read_model_facts(ModelSection(name_or_path="builtin:rwkv7-tiny"))
    with pytest.raises(PlanError) as error:
        resolve(loaded.run, lookup("cpu"), facts)
    assert error.value.code == "plan.no_score_head"
