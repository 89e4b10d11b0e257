"""KTO: equal to TRL in loss, rewards and gradients; groups of rated rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig, get_peft_model
from tiny_model import TOKENS, a_model
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer
from trl.trainer.utils import add_fused_lm_head

from halftune.config.sections.method import KtoMethod
from halftune.data.batch import WEIGHT, collate
from halftune.data.encode.groups import LABEL, Grouper
from halftune.data.formats import load_format
from halftune.data.formats.conversation import Rated, RowDropped, RowError
from halftune.data.store import Example, Segment
from halftune.methods import AdapterOff
from halftune.methods.kto import Kto
from halftune.model.policy.policy import PolicyModel

PAD, SIZE = 0, 4
GOOD = (1.0, 0.0, 0.0, 1.0)


class Accelerator:
    """What TRL's loss asks of accelerate in one process."""

    device = torch.device("cpu")
    gather_for_metrics = staticmethod(lambda tensor: tensor)
    unwrap_model = staticmethod(lambda model: model)


def rows() -> list[dict[str, Any]]:
    """Rows as TRL's collator takes them, with the answer of the row before for the KL divergence."""
    made: list[dict[str, Any]] = []
    for good in GOOD:
        lengths = torch.randint(2, 9, (2,)).tolist()
        ids = [torch.randint(3, TOKENS, (length,)).tolist() for length in lengths]
        made.append({"prompt_ids": ids[0], "completion_ids": ids[1], "label": bool(good)})
    for index, one in enumerate(made):
        one["KL_completion_ids"] = made[index - 1]["completion_ids"]
    return made


def group(rows: list[dict[str, Any]], size: int) -> list[Example]:
    singles = []
    for one in rows:
        ids = torch.tensor(one["prompt_ids"] + one["completion_ids"], dtype=torch.int32).numpy()
        mask = torch.arange(len(ids)).numpy() >= len(one["prompt_ids"])
        singles.append(Example((Segment(ids, mask),), {"label": float(one["label"])}))
    return Grouper(size, 64).complete(singles, [(0, 0)] * len(singles))[0]


def by_trl(model: Any, rows: list[dict[str, Any]], section: KtoMethod) -> tuple[torch.Tensor, dict[str, float]]:
    trainer: Any = KTOTrainer.__new__(KTOTrainer)
    vars(trainer).update(
        model=model, ref_model=None, accelerator=Accelerator(), calculate_KL=section.loss == "kto",
        precompute_ref_logps=False, aux_loss_enabled=False, loss_type=section.loss, beta=section.beta,
        desirable_weight=section.desirable_weight, undesirable_weight=section.undesirable_weight,
        _tp_size=1, _total_train_tokens=0, args=type("Args", (), {"gradient_checkpointing_kwargs": None}),
    )  # fmt: skip
    names = ("kl", "entropy", "num_tokens", "rewards/chosen", "rewards/rejected", "rewards/margins")
    names += ("logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected")
    trainer._metrics = {mode: {name: [] for name in names} for mode in ("train", "eval")}
    loss = trainer._compute_loss(model, DataCollatorForUnpairedPreference(PAD)(rows), return_outputs=False)
    mode = "train" if model.training else "eval"
    return loss, {name: trainer._metrics[mode][name][-1] for name in (*Kto.metrics, "logps/chosen", "logps/rejected")}


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("packed", [False, True])
def test_loss_rewards_and_gradients_are_those_of_trl(loss: Any, packed: bool) -> None:
    section = KtoMethod(type="kto", loss=loss, beta=0.3, desirable_weight=1.3, undesirable_weight=0.7, group_size=SIZE)
    for _ in range(3):
        model: Any = get_peft_model(a_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        made, method = rows(), Kto(section)
        examples = group(made, section.rows)
        batch = collate(examples, PAD, packed=packed)
        batch.columns[WEIGHT] = torch.tensor([method.weight(one) for one in examples])
        for name in examples[0].columns:
            batch.columns[name] = torch.tensor([one.columns[name] for one in examples])
        mine = method.loss(PolicyModel(model), batch, AdapterOff(PolicyModel(model)))
        weights = [one for one in model.parameters() if one.requires_grad]
        ours = torch.autograd.grad(mine.total / SIZE, weights)
        sums = PolicyModel(model).sequence_logprobs(batch).detach().view(-1)[:SIZE]
        good = torch.tensor(GOOD) > 0
        logps = {"logps/chosen": float(sums[good].mean()), "logps/rejected": float(sums[~good].mean())}
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits"))
        wanted, metrics = by_trl(model, made, section)
        theirs = torch.autograd.grad(wanted, weights)
        torch.testing.assert_close(mine.total / SIZE, wanted, rtol=1e-5, atol=0, check_dtype=False)
        found = {name: float(total / count) for name, (total, count) in mine.metrics.items()} | logps
        assert found == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        norm = torch.stack([one.norm() for one in theirs]).norm()
        apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
        assert float(apart / norm) < 1e-5


QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": [QUESTION], "completion": [ANSWER], "label": "true"},
        {"messages": [QUESTION, ANSWER], "label": 1},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "kto_tag": True},
        {"instruction": "q", "output": "a", "kto_tag": True},
    ],
    ids=["texts", "lists", "messages", "sharegpt", "alpaca"],
)
def test_published_rows_are_read(row: dict[str, Any]) -> None:
    made = load_format("rated").read(row)
    assert isinstance(made, Rated)
    assert (made.conversation.messages, made.good) == ([QUESTION, ANSWER], True)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "q", "completion": "a"}, RowError),
        ({"prompt": "q", "completion": "a", "label": "good"}, RowError),
        ({"prompt": "q", "label": True}, RowError),
        ({"messages": [QUESTION, {"role": "assistant", "content": " "}], "label": False}, RowDropped),
    ],
)
def test_rows_that_are_not_rated(row: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        load_format("rated").read(row)


def test_each_prompt_of_a_group_also_has_the_answer_of_the_row_before() -> None:
    made = rows()
    (example,) = group(made, SIZE)
    assert [example.columns[LABEL.format(index)] for index in range(SIZE)] == list(GOOD)
    for one, segment in zip(made, example.segments[SIZE:], strict=True):
        assert segment.input_ids.tolist() == one["prompt_ids"] + one["KL_completion_ids"]
        assert int(segment.loss_mask.sum()) == len(one["KL_completion_ids"])
