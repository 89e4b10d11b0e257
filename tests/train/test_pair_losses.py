"""Losses on pairs of answers: loss, log-probabilities, rewards and all gradients are those of TRL on the same pairs."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig, get_peft_model
from tiny_model import TOKENS, a_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from halftune.config.sections.method import CpoMethod, DpoLoss, DpoMethod, OrpoMethod, SimpoMethod
from halftune.core.errors import ConfigError
from halftune.data.batch import WEIGHT, Batch, collate
from halftune.data.store import Example, Segment
from halftune.methods import AdapterOff, Loss, make_method
from halftune.methods.dpo import LOSSES, Dpo
from halftune.methods.reference_free import Orpo, Simpo
from halftune.model.policy.policy import PolicyModel

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

PAD, PAIRS, BETA, SEEDS = 0, 4, 0.3, 3
SMOOTHED = {"robust": 0.2, "exo_pair": 0.1}
LOGPS = ("logps/chosen", "logps/rejected")  # TRL's means over the pairs


class Accelerator:
    """What TRL's loss asks of accelerate in one process."""

    device = torch.device("cpu")
    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)
    unwrap_model = staticmethod(lambda model: model)


def rows(chosen_tokens: int | None = None, prompt_tokens: int | None = None) -> list[dict[str, Any]]:
    """Pairs as TRL's collator takes them.

    Args:
        chosen_tokens, prompt_tokens: of each chosen answer, and of each prompt; None: between 2 and 8.
    """
    made = []
    for _ in range(PAIRS):
        prompt, chosen, rejected = torch.randint(2, 9, (3,)).tolist()
        lengths = {"prompt_ids": prompt_tokens or prompt, "chosen_ids": chosen_tokens or chosen}
        lengths["rejected_ids"] = rejected
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


def by_trl(model: Any, rows: list[dict[str, Any]], losses: dict[str, float], smoothing: float) -> tuple[Tensor, Any]:
    """TRL's loss of DPO and its metrics, with the weights of its losses."""
    trainer: Any = DPOTrainer.__new__(DPOTrainer)
    vars(trainer).update(
        model=model, ref_model=None, accelerator=Accelerator(), precompute_ref_logps=False, aux_loss_enabled=False,
        loss_types=list(losses), loss_weights=list(losses.values()), beta=BETA, label_smoothing=smoothing,
        ld_alpha=None, f_divergence_type="reverse_kl", use_weighting=False, _tp_size=1, _total_train_tokens=0,
        args=type("Args", (), {"gradient_checkpointing_kwargs": None}),
    )  # fmt: skip
    trainer._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    found = trainer._compute_loss(model, DataCollatorForPreference(PAD)(rows), return_outputs=False)
    mode = "train" if model.training else "eval"
    return found, {name: trainer._metrics[mode][name][-1] for name in (*Dpo.metrics, *LOGPS)}


def by_trl_without_reference(model: Any, rows: list[dict[str, Any]], section: Any) -> tuple[Tensor, Any]:
    """TRL's loss of ORPO, CPO and SimPO and its metrics."""
    kind = ORPOTrainer if section.type == "orpo" else CPOTrainer
    trainer: Any = kind.__new__(kind)
    vars(trainer).update(
        accelerator=Accelerator(), is_encoder_decoder=False, aux_loss_enabled=False, pad_token_id=PAD,
        padding_value=PAD, beta=section.beta, loss_type="simpo" if section.type == "simpo" else "sigmoid", alpha=0.0,
        label_smoothing=0.0, simpo_gamma=getattr(section, "gamma", 0.0), cpo_alpha=getattr(section, "sft_weight", 0.0),
    )  # fmt: skip
    given: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        whole = [torch.tensor(row["prompt_ids"] + row[f"{side}_ids"]) for row in rows]
        labels = [torch.tensor([-100] * len(row["prompt_ids"]) + row[f"{side}_ids"]) for row in rows]
        given[f"{side}_input_ids"] = pad_sequence(whole, batch_first=True, padding_value=PAD)
        given[f"{side}_labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
        given[f"{side}_attention_mask"] = pad_sequence([one * 0 + 1 for one in whole], batch_first=True)
    found, metrics = trainer.get_batch_loss_metrics(model, given)
    return found, {name: metrics[name] for name in (*Dpo.metrics, *LOGPS)}


def check(model: Any, method: Any, made: list[dict[str, Any]], theirs: Any, *, packed: bool) -> None:
    """Compares loss, rewards, log-probabilities and all gradients with TRL's."""
    policy, batch = PolicyModel(model), batch_of(made, packed=packed)
    mine: Loss = method.loss(policy, batch, AdapterOff(policy))
    weights = [one for one in model.parameters() if one.requires_grad]
    ours = torch.autograd.grad(mine.total / PAIRS, weights)
    logps = policy.sequence_logprobs(batch).detach()
    if isinstance(method, Simpo | Orpo):  # per token
        logps = logps / policy.label_counts(batch)
    logps = logps.view(-1, 2).mean(0).tolist()
    wanted, metrics = theirs(model, made)
    gradients = torch.autograd.grad(wanted, weights)
    torch.testing.assert_close(mine.total / PAIRS, wanted, rtol=1e-5, atol=1e-7, check_dtype=False)
    assert {**measured(mine), **dict(zip(LOGPS, logps, strict=True))} == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    norm = torch.stack([one.norm() for one in gradients]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, gradients, strict=True)]).norm()
    assert float(apart / norm) < 1e-5


def with_adapter() -> Any:
    return get_peft_model(a_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def test_every_loss_has_a_name() -> None:
    assert set(LOSSES) == set(get_args(DpoLoss))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_dpo_is_that_of_trl(loss: Any, packed: bool) -> None:
    smoothing = SMOOTHED.get(loss, 0.0)
    method = Dpo(DpoMethod(type="dpo", loss=loss, beta=BETA, label_smoothing=smoothing))
    theirs = partial(by_trl, losses={loss: 1.0}, smoothing=smoothing)
    for _ in range(SEEDS):
        check(with_adapter(), method, rows(), theirs, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
def test_dpo_with_fine_tuning_is_that_of_trl_where_answers_are_equally_long(packed: bool) -> None:
    theirs = partial(by_trl, losses={"sigmoid": 1.0, "sft": 0.7}, smoothing=0.0)
    check(with_adapter(), Dpo(DpoMethod(type="dpo", beta=BETA, sft_weight=0.7)), rows(5), theirs, packed=packed)


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
def test_methods_without_a_reference_are_those_of_trl(section: Any, packed: bool) -> None:
    """TRL's cross-entropy is a mean over tokens, of ORPO also the prompt's: equal where both have one length only."""
    plain = not getattr(section, "sft_weight", 1.0)
    prompt = 1 if section.type == "orpo" else None  # a first token is not predicted
    theirs = partial(by_trl_without_reference, section=section)
    for _ in range(SEEDS):
        made = rows() if plain else rows(5, prompt)
        check(a_model(), make_method(section), made, theirs, packed=packed)


@pytest.mark.parametrize("section", FREE, ids=lambda section: f"{section.type}-{getattr(section, 'sft_weight', '')}")
def test_cross_entropy_is_that_of_each_answer_where_their_lengths_differ(section: Any) -> None:
    model, made = a_model().double(), rows()
    mine = make_method(section).loss(PolicyModel(model), batch_of(made), None)  # type: ignore[arg-type]
    (chosen, chosen_tokens), (rejected, rejected_tokens) = (
        sums(model, made, f"{one}_ids") for one in ("chosen", "rejected")
    )
    mean, other = chosen / chosen_tokens, rejected / rejected_tokens
    if section.type == "orpo":
        odds = [one - torch.log(-torch.expm1(one)) for one in (mean, other)]
        wanted = -mean - BETA * (odds[0] - odds[1]).sigmoid().log()
    elif section.type == "simpo":
        wanted = -(section.beta * (mean - other) - section.gamma).sigmoid().log() - section.sft_weight * mean
    else:
        wanted = -(section.beta * (chosen - rejected)).sigmoid().log() - section.sft_weight * mean
    torch.testing.assert_close(mine.total, wanted.sum(), rtol=1e-9, atol=0)


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
