"""Losses on pairs of answers: loss, rewards and gradients are those of TRL on the same pairs."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import TOKENS, a_model
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from halftune.config.sections.method import CpoMethod, DpoLoss, DpoMethod, OrpoMethod, SimpoMethod
from halftune.core.errors import ConfigError
from halftune.data.batch import WEIGHT, Batch, collate
from halftune.data.store import Example, Segment
from halftune.methods import AdapterOff, Loss, make_method
from halftune.methods.dpo import LOSSES, Dpo
from halftune.model.policy import PolicyModel

PAD, PAIRS, BETA = 0, 4, 0.3
SMOOTHED = {"robust": 0.2, "exo_pair": 0.1}


class Accelerator:
    """What TRL's loss asks of accelerate in one process."""

    device = torch.device("cpu")
    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)
    unwrap_model = staticmethod(lambda model: model)


def rows(chosen_tokens: int | None = None) -> list[dict[str, Any]]:
    """Pairs as TRL's collator takes them.

    Args:
        chosen_tokens: of each chosen answer; None: between 2 and 8.
    """
    made = []
    for _ in range(PAIRS):
        prompt, chosen, rejected = torch.randint(2, 9, (3,)).tolist()
        lengths = {"prompt_ids": prompt, "chosen_ids": chosen_tokens or chosen, "rejected_ids": rejected}
        made.append({name: torch.randint(3, TOKENS, (length,)).tolist() for name, length in lengths.items()})
    return made


def batch_of(rows: list[dict[str, Any]], *, packed: bool = False) -> Batch:
    examples = []
    for row in rows:
        segments = []
        for name in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor(row["prompt_ids"] + row[name], dtype=torch.int32).numpy()
            segments.append(Segment(ids, torch.arange(len(ids)).numpy() >= len(row["prompt_ids"])))
        examples.append(Example(tuple(segments)))
    batch = collate(examples, PAD, packed=packed)
    batch.columns[WEIGHT] = torch.ones(len(rows))
    return batch


def by_trl(model: Any, rows: list[dict[str, Any]], loss: str, smoothing: float) -> tuple[Tensor, dict[str, float]]:
    trainer: Any = DPOTrainer.__new__(DPOTrainer)
    vars(trainer).update(
        model=model, ref_model=None, accelerator=Accelerator(), precompute_ref_logps=False, aux_loss_enabled=False,
        loss_types=[loss], loss_weights=[1.0], beta=BETA, label_smoothing=smoothing, ld_alpha=None,
        f_divergence_type="reverse_kl", use_weighting=False, _tp_size=1, _total_train_tokens=0,
        args=type("Args", (), {"gradient_checkpointing_kwargs": None}),
    )  # fmt: skip
    names = ("entropy", "num_tokens", "logits/chosen", "logits/rejected", "logps/chosen", "logps/rejected")
    trainer._metrics = {
        mode: {name: [] for name in (*names, "mean_token_accuracy", *Dpo.metrics)} for mode in ("train", "eval")
    }
    found = trainer._compute_loss(model, DataCollatorForPreference(PAD)(rows), return_outputs=False)
    mode = "train" if model.training else "eval"
    return found, {name: trainer._metrics[mode][name][-1] for name in Dpo.metrics}


def test_every_loss_has_a_name() -> None:
    assert set(LOSSES) == set(get_args(DpoLoss))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_rewards_and_gradients_are_those_of_trl(loss: Any, packed: bool) -> None:
    smoothing = SMOOTHED.get(loss, 0.0)
    section = DpoMethod(type="dpo", loss=loss, beta=BETA, label_smoothing=smoothing)
    model: Any = get_peft_model(a_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    made, policy = rows(), PolicyModel(model)
    mine = Dpo(section).loss(policy, batch_of(made, packed=packed), AdapterOff(policy))
    weights = [one for one in model.parameters() if one.requires_grad]
    ours = torch.autograd.grad(mine.total / PAIRS, weights)
    statistics = ("log_probs", "entropy", "mean_logits", "is_top1")
    add_fused_lm_head(model.get_base_model(), outputs=statistics)
    wanted, metrics = by_trl(model, made, loss, smoothing)
    theirs = torch.autograd.grad(wanted, weights)
    torch.testing.assert_close(mine.total / PAIRS, wanted, rtol=1e-5, atol=1e-7, check_dtype=False)
    assert measured(mine) == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    norm = torch.stack([one.norm() for one in theirs]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
    assert float(apart / norm) < 1e-5


def measured(loss: Loss) -> dict[str, float]:
    return {name: float(total / count) for name, (total, count) in loss.metrics.items()}


def sums(model: Any, rows: list[dict[str, Any]], name: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities of answers from all logits of their own rows, and their numbers of tokens."""
    found = []
    for row in rows:
        ids, start = torch.tensor(row["prompt_ids"] + row[name]), len(row["prompt_ids"])
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[start - 1 :].sum())
    return torch.stack(found), torch.tensor([len(row[name]) for row in rows])


SMOOTHED_SFT = DpoMethod(type="dpo", beta=BETA, label_smoothing=0.2, sft_weight=0.7)
FREE = [
    SimpoMethod(type="simpo", beta=2.0, gamma=0.5),
    SimpoMethod(type="simpo", beta=2.0, gamma=0.5, sft_weight=0.7),
    OrpoMethod(type="orpo", beta=BETA),
    CpoMethod(type="cpo", beta=BETA, sft_weight=0.7),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("section", FREE, ids=lambda section: f"{section.type}-{getattr(section, 'sft_weight', '')}")
def test_methods_without_a_reference(section: Any, packed: bool) -> None:
    model, made = a_model().double(), rows()
    mine = make_method(section).loss(PolicyModel(model), batch_of(made, packed=packed), None)  # type: ignore[arg-type]
    (chosen, chosen_tokens), (rejected, rejected_tokens) = (
        sums(model, made, f"{one}_ids") for one in ("chosen", "rejected")
    )
    each = -chosen / chosen_tokens
    if section.type == "orpo":
        trainer: Any = ORPOTrainer.__new__(ORPOTrainer)
        vars(trainer).update(beta=BETA, accelerator=Accelerator())
        odds, *rewards = trainer.odds_ratio_loss(chosen / chosen_tokens, rejected / rejected_tokens)[:3]
        losses = each - odds
    else:
        trainer = CPOTrainer.__new__(CPOTrainer)
        simpo = section.type == "simpo"
        vars(trainer).update(
            loss_type="simpo" if simpo else "sigmoid", beta=section.beta, alpha=0.0, label_smoothing=0.0,
            simpo_gamma=getattr(section, "gamma", 0.0), accelerator=Accelerator(),
        )  # fmt: skip
        scales = (chosen_tokens, rejected_tokens) if simpo else (1, 1)
        losses, *rewards = trainer.cpo_loss(chosen / scales[0], rejected / scales[1])
        losses = losses + section.sft_weight * each
    tolerance = 1e-5 if section.type == "orpo" else 1e-9  # TRL computes the odds in fp32
    torch.testing.assert_close(mine.total, losses.sum(), rtol=tolerance, atol=0, check_dtype=False)
    expected = {f"rewards/{name}": float(one.mean()) for name, one in zip(("chosen", "rejected"), rewards, strict=True)}
    assert {name: measured(mine)[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    weights = list(model.parameters())
    ours, theirs = (torch.autograd.grad(loss, weights) for loss in (mine.total, losses.sum()))
    norm = torch.stack([one.norm() for one in theirs]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
    assert float(apart / norm) < tolerance


def test_smoothing_and_fine_tuning_beside_the_sigmoid_loss() -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(a_model().double(), lora).double()
    made, policy = rows(), PolicyModel(model)
    mine = Dpo(SMOOTHED_SFT).loss(policy, batch_of(made), AdapterOff(policy))
    chosen, tokens = sums(model, made, "chosen_ids")
    with torch.no_grad(), model.disable_adapter():
        known = [sums(model, made, name)[0] for name in ("chosen_ids", "rejected_ids")]
    margin = BETA * ((chosen - known[0]) - (sums(model, made, "rejected_ids")[0] - known[1]))
    wanted = -(0.8 * margin.sigmoid().log() + 0.2 * (-margin).sigmoid().log()) - 0.7 * chosen / tokens
    torch.testing.assert_close(mine.total, wanted.sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["{type: dpo, loss: hinge, label_smoothing: 0.1}", "{type: dpo, loss: exo_pair}"])
def test_smoothing_belongs_to_some_losses(recipe: Any, method: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(f"method={method}")
    assert refused.value.code in ("config.no_effect", "config.invalid_value")
