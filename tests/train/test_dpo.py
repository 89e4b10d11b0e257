"""DPO: pairs of answers, loss and gradients beside a plain fp64 reference, the reference model, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import a_model
from torch.nn import functional as F

from halftune.config.sections.method import DpoMethod
from halftune.core.errors import ConfigError, DataError, PlanError
from halftune.data.batch import WEIGHT, collate
from halftune.data.formats import load_format
from halftune.data.formats.conversation import Preference, RowDropped, RowError
from halftune.data.pipeline import prepare
from halftune.data.store import Example, Segment
from halftune.methods import AdapterOff
from halftune.methods.dpo import Dpo
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.train.trainer import train

QUESTION, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "g"), ("assistant", "b"))
)


def sums(model: Any, example: Example) -> torch.Tensor:
    """Log-probabilities of both answers of a pair, each from all logits of its own row."""
    found = []
    for segment in example.segments:
        ids, mask = torch.from_numpy(segment.input_ids).long(), torch.from_numpy(segment.loss_mask)
        known = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(known[mask[1:]].sum())
    return torch.stack(found)


def test_loss_metrics_and_gradients_are_those_of_a_plain_reference() -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model, draw = get_peft_model(a_model().double(), lora).double(), np.random.default_rng(0)
    pairs = []
    for _ in range(4):
        prompt = draw.integers(3, 37, int(draw.integers(2, 6)))
        answers = [draw.integers(3, 37, int(draw.integers(1, 9))) for _ in range(2)]
        segments = [np.concatenate([prompt, one]).astype(np.int32) for one in answers]
        pairs.append(Example(tuple(Segment(one, np.arange(len(one)) >= len(prompt)) for one in segments)))
    batch = collate(pairs, 0, packed=False)
    batch.columns[WEIGHT] = torch.tensor([1.0, 1.0, 1.0, 0.0])  # the last one only fills up the batch
    method = Dpo(DpoMethod(type="dpo", beta=0.3))
    policy = PolicyModel(model)
    made = method.loss(policy, batch, AdapterOff(policy))

    with torch.no_grad(), model.disable_adapter():
        reference = [sums(model, pair) for pair in pairs]
    rewards = 0.3 * (torch.stack([sums(model, pair) for pair in pairs]) - torch.stack(reference))[:3]
    margins = rewards[:, 0] - rewards[:, 1]
    wanted = -F.logsigmoid(margins).sum()
    torch.testing.assert_close(made.total, wanted, rtol=1e-12, atol=1e-12)
    measured = {name: float(total / count) for name, (total, count) in made.metrics.items()}
    assert measured == pytest.approx(
        {
            "rewards/chosen": float(rewards[:, 0].detach().mean()),
            "rewards/rejected": float(rewards[:, 1].detach().mean()),
            "rewards/margins": float(margins.detach().mean()),
            "rewards/accuracies": float((margins > 0).double().mean()),
        }
    )
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = (torch.autograd.grad(loss, weights) for loss in (made.total, wanted))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


WHOLE = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
EARLIER = [QUESTION, {"role": "assistant", "content": "earlier"}, {"role": "user", "content": "again"}]
SHARED = {"from": "human", "value": "q"}


@pytest.mark.parametrize(
    "row",
    [
        WHOLE,
        {"prompt": "q", **WHOLE},  # as ultrafeedback has it: the prompt stands there twice
        {"prompt": "q", "chosen": "g", "rejected": "b"},
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"conversations": [SHARED], "chosen": {"from": "gpt", "value": "g"}, "rejected": {"from": "gpt", "value": "b"}},
    ],
    ids=["whole", "whole and prompt", "texts", "lists", "sharegpt"],
)
def test_published_rows_are_read(row: dict[str, Any]) -> None:
    made = load_format("preference").read(row)
    assert isinstance(made, Preference)
    assert (made.chosen.messages, made.rejected.messages) == ([QUESTION, GOOD], [QUESTION, BAD])


def test_earlier_answers_are_not_trained() -> None:
    made = load_format("preference").read({"chosen": [*EARLIER, GOOD], "rejected": [*EARLIER, BAD]})
    assert isinstance(made, Preference)
    assert made.chosen.train == made.rejected.train == (None, False, None, None)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({**WHOLE, "rejected": WHOLE["chosen"]}, RowDropped),
        ({"prompt": "q", "chosen": "g", "rejected": ""}, RowDropped),
        ({"chosen": "g", "rejected": "b"}, RowError),
        ({"prompt": "q", "chosen": "g"}, RowError),
        ({"prompt": "q", "chosen": "g", "rejected": 3}, RowError),
        ({**WHOLE, "rejected": [{"role": "user", "content": "another"}, BAD]}, RowError),
    ],
)
def test_rows_that_are_no_pair(row: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        load_format("preference").read(row)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"Is {n} even?" + " please" * 60, "chosen": "yes" * (n + 1), "rejected": "no " * n + "!"}
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_answers_stand_behind_the_same_prompt_also_where_it_is_cut(recipe: Any, pairs: Path) -> None:
    loaded, _ = recipe(f"data.train={pairs}", "method=dpo", "data.max_length=64")
    data = prepare(loaded.run, load_tokenizer(loaded.run.model))
    assert data.report.train[0].truncated
    for index in range(len(data.train)):
        chosen, rejected = data.train.example(index).segments
        start = int(chosen.loss_mask.argmax())
        assert start == int(rejected.loss_mask.argmax()) > 8
        assert chosen.input_ids[:start].tolist() == rejected.input_ids[:start].tolist()
        assert max(len(chosen.input_ids), len(rejected.input_ids)) <= 64


def test_a_run_writes_its_metrics(recipe: Any, pairs: Path) -> None:
    loaded, plan = recipe(f"data.train={pairs}", "method=dpo", "data.eval_split=2", "training.max_steps=6")
    folder = train(loaded, plan).folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [line for line in lines if "loss" in line]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)  # the adapter is still zero
    assert last["loss"] < first["loss"]
    assert set(Dpo.metrics) <= first.keys()
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-6)
    assert {f"eval_{name}" for name in Dpo.metrics} <= next(line for line in lines if "eval_loss" in line).keys()
    report = (folder / "report.html").read_text()
    assert "rewards/margins" in report
    saved = json.loads((folder / "plan.json").read_text())["method"]
    assert (saved["name"]["value"], saved["reference"]["value"]) == ("dpo", "adapter off")


def test_a_reference_needs_an_adapter(recipe: Any, pairs: Path) -> None:
    with pytest.raises(PlanError) as caught:
        recipe(f"data.train={pairs}", "method={type: dpo, reference: adapter_off}", "adapter=none")
    assert (caught.value.where, caught.value.code) == ("method.reference", "plan.no_reference_model")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("method=dpo", "data.packing={enabled: true, split: true}"), "data.packing.split"),
        (("method=dpo", "data.train=[{path: x.jsonl, format: alpaca}]"), "data.train"),
        (("method=sft", "data.train=[{path: x.jsonl, format: preference}]"), "data.train"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_read(recipe: Any, overrides: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        recipe(*overrides)


def test_other_data_is_refused(recipe: Any, rows_file: Path) -> None:
    loaded, _ = recipe(f"data.train={rows_file}", "method=dpo")
    with pytest.raises(DataError, match="pairs"):
        prepare(loaded.run, load_tokenizer(loaded.run.model))
