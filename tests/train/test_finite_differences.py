"""The gradient of every loss on log-probabilities and scores is that of finite differences."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter
from tiny_model import a_model
from torch import Tensor

from halftune.config.sections.method import DpoLoss, GrpoMethod, MethodSection
from halftune.data.batch import WEIGHT, Batch, collate
from halftune.data.encode.groups import LABEL
from halftune.data.store import Example, Segment
from halftune.methods import make_method
from halftune.methods.grpo import ADVANTAGES, SAMPLED, SERVED
from halftune.methods.reward import MARGIN
from halftune.model.policy.policy import PolicyModel

EXAMPLES = 3
SMOOTHED = ("robust", "exo_pair", "sigmoid")
CASES: list[dict[str, Any]] = [
    *({"type": "dpo", "loss": one, "beta": 0.3, "label_smoothing": 0.2 * (one in SMOOTHED), "sft_weight": 0.5}
      for one in get_args(DpoLoss)),
    *({"type": "kto", "loss": one, "beta": 0.3, "group_size": 2, "desirable_weight": 1.3}
      for one in ("kto", "apo_zero_unpaired")),
    {"type": "simpo", "sft_weight": 0.5},
    {"type": "orpo", "beta": 0.5},
    {"type": "cpo", "beta": 0.3, "sft_weight": 0.5},
    {"type": "reward", "center_coefficient": 0.1},
    *({"type": "grpo", "rewards": ["exact_answer"], "num_generations": 2, "max_completion_length": 9, "beta": 0.2,
       "num_iterations": 2, "loss": loss, "importance_sampling": level}
      for loss in ("grpo", "dr_grpo", "dapo") for level in ("token", "sequence")),
    {"type": "grpo", "rewards": ["exact_answer"], "num_generations": 2, "server": {"url": "http://localhost:1"}},
]  # fmt: skip


@dataclass
class Told:
    """A model in training, or a reference, that says what it is told to."""

    values: Tensor
    others: Tensor | None = None  # without gradients, where those are asked for alone
    label_counts = staticmethod(PolicyModel.label_counts)
    label_segments = staticmethod(PolicyModel.label_segments)

    def sequence_logprobs(self, batch: Batch) -> Tensor:
        return self.values if self.others is None or torch.is_grad_enabled() else self.others

    scores = sequence_logprobs

    def token_logprobs(self, batch: Batch, temperature: float) -> Tensor:
        return self.values

    def token_logprobs_and_entropies(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        return self.values, torch.zeros_like(self.values)


def a_batch(section: Any) -> tuple[Batch, int]:
    """Examples of random tokens, and their number of labels."""
    made = []
    for _ in range(EXAMPLES):
        lengths = torch.randint(4, 9, (section.segments,)).tolist()
        ids = [torch.randint(3, 30, (length,), dtype=torch.int32).numpy() for length in lengths]
        made.append(Example(tuple(Segment(one, torch.arange(len(one)).numpy() > 1) for one in ids)))
    batch = collate(made, 0, packed=False)
    labels = int((batch.tokens["labels"] >= 0).sum())
    wide = {"dtype": torch.float64}
    batch.columns.update({WEIGHT: torch.ones(EXAMPLES, **wide), MARGIN: torch.rand(EXAMPLES, **wide)})
    batch.columns.update({LABEL.format(index): torch.tensor([1.0, 0.0, 1.0]) for index in range(section.rows)})
    batch.columns[ADVANTAGES] = torch.randn(EXAMPLES * section.segments, **wide)
    if isinstance(section, GrpoMethod):
        batch.columns["reward"] = torch.rand(EXAMPLES, **wide)
        batch.columns[SAMPLED] = -3 * torch.rand(labels, **wide)
        if section.server is not None:
            batch.columns[SERVED] = batch.columns[SAMPLED] + 0.1 * torch.randn(labels, **wide)
    return Batch(**{**vars(batch), "examples": tuple(range(EXAMPLES))}), labels


def logprobs(number: int) -> Tensor:
    return -5 * torch.rand(number, dtype=torch.float64)


@pytest.mark.parametrize(
    "keys", CASES, ids=lambda keys: "-".join(str(keys[key]) for key in ("type", "loss") if key in keys)
)
def test_gradient(keys: dict[str, Any]) -> None:
    section: Any = TypeAdapter(MethodSection).validate_python(keys)
    batch, labels = a_batch(section)
    method, tokens = make_method(section), isinstance(section, GrpoMethod)
    number = labels if tokens else len(batch.segment_of_example)
    values, known = logprobs(number), Told(logprobs(number))
    if tokens:
        values = batch.columns[SAMPLED] + 0.3 * torch.randn(number, dtype=torch.float64)
    if section.type == "kto" and section.loss == "kto":  # half of them belong to mismatched answers
        values = values[: number // 2]
    others = logprobs(len(values))

    def total(values: Tensor) -> Tensor:
        policy: Any = Told(values, others)
        return method.loss(policy, batch, known).total  # type: ignore[arg-type]

    assert float(total(values).detach().abs()) > 0
    assert torch.autograd.gradcheck(total, values.requires_grad_())


def _likeliest(logits: Tensor, labels: Tensor) -> Tensor:
    """EAFT's factor (arXiv:2601.02151): the entropy of the 5 likeliest tokens over 2, to the power 1.5."""
    top = logits.topk(5).values.log_softmax(-1)
    return (-(top.exp() * top).sum(-1) / 2.0) ** 1.5


WEIGHTED: dict[str, tuple[dict[str, Any], Any]] = {
    "eaft": (
        {"type": "sft", "loss": "eaft", "eaft_tokens": 5, "eaft_alpha": 1.5, "eaft_scale": 2.0},
        _likeliest,
    ),
    "dft": (
        {"type": "sft", "loss": "dft"},
        lambda logits, labels: logits.softmax(-1).gather(-1, labels[:, None]).squeeze(-1),
    ),
    "asft": (
        {"type": "distill", "teacher": "builtin:qwen2-tiny", "divergence_weight": 0.3, "sft_weight": 0.7,
         "sft_loss": "dft"},
        lambda logits, labels: 0.7 * logits.softmax(-1).gather(-1, labels[:, None]).squeeze(-1),
    ),
}  # fmt: skip


def wide_model() -> Any:
    """A tiny model whose norms compute in fp64, too: transformers' round to fp32."""
    model: Any = a_model().eval()
    norms = [name for name, one in model.named_modules() if type(one).__name__.endswith("RMSNorm")]
    for name in norms:
        old, norm = model.get_submodule(name), torch.nn.RMSNorm(model.config.hidden_size, eps=model.config.rms_norm_eps)
        norm.weight = old.weight
        model.set_submodule(name, norm)
    return model.double()


@pytest.mark.parametrize("name", WEIGHTED)
def test_gradient_through_the_model_with_factors_that_have_none(name: str) -> None:
    """Along random directions of all weights, in fp64: the factors stay those of the weights before, as they have no
    gradient; the divergence of ASFT moves with the weights."""
    keys, factor = WEIGHTED[name]
    section: Any = TypeAdapter(MethodSection).validate_python(keys)
    batch, _ = a_batch(section)
    model, before = wide_model(), wide_model()
    with torch.no_grad():
        for one in before.parameters():
            one += 0.02 * torch.randn_like(one)
    known: Any = SimpleNamespace(head_rows=torch.no_grad()(PolicyModel(before).head_rows))
    weights = list(model.parameters())
    gradients = torch.autograd.grad(make_method(section).loss(PolicyModel(model), batch, known).total, weights)

    labels = batch.tokens["labels"][:, 1:].flatten()
    kept = labels >= 0

    def logits_of(one: Any) -> Tensor:
        return one(**batch.inputs).logits[:, :-1].flatten(0, 1)[kept]

    with torch.no_grad():
        teacher = logits_of(before).log_softmax(-1)
        factors = factor(logits_of(model), labels[kept])

    @torch.no_grad()
    def value() -> float:
        logs = logits_of(model).log_softmax(-1)
        total = -(factors * logs.gather(-1, labels[kept][:, None]).squeeze(-1)).sum()
        return float(total + 0.3 * (teacher.exp() * (teacher - logs)).sum() if name == "asft" else total)

    size = 1e-5
    for _ in range(3):
        along = [torch.randn_like(one) for one in weights]
        found = []
        for step in (size, -2 * size, size):  # there, back past the middle, and to the middle
            with torch.no_grad():
                for one, direction in zip(weights, along, strict=True):
                    one += step * direction
            found.append(value())
        wanted = (found[0] - found[1]) / (2 * size)
        mine = sum(float((a * b).sum()) for a, b in zip(gradients, along, strict=True))
        assert mine == pytest.approx(wanted, rel=1e-6)
