"""Log-probabilities: those of full fp64 logits, values and gradients, whatever the head; never all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_losses import CAPPED, Plain, V, a_batch
from tiny_model import a_model, batch_of
from torch.utils._python_dispatch import TorchDispatchMode

from halftune.data.batch import Batch
from halftune.data.store import NO_LABEL
from halftune.model.policy import logprobs, policy
from halftune.model.policy.head import HeadRows
from halftune.model.policy.policy import PolicyModel
from halftune_kernels.library import everywhere


def adapted(*more: str, like: str = "qwen2", **changes: Any) -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", *more], init_lora_weights=False)
    torch.manual_seed(0)
    return get_peft_model(a_model(like, **changes), config)


MODELS: dict[str, Callable[[], Any]] = {
    "linear": a_model,
    "tied": lambda: a_model("llama", tie_word_embeddings=True),
    "capped": lambda: a_model("gemma2", **CAPPED),
    "scaled": lambda: a_model("granite", logits_scaling=4.0),
    "adapted": lambda: adapted("lm_head"),
    "frozen": adapted,
    "frozen, tied": lambda: adapted(like="llama", tie_word_embeddings=True),
    "frozen, capped": lambda: adapted(like="gemma2", **CAPPED),
    "frozen, scaled": lambda: adapted(like="granite", logits_scaling=4.0),
    "somebody's own": Plain,
}


def reference(model: Any, batch: dict[str, Any], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the labels in the order of rows, and their sums by row."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    known = (logits / temperature).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return known[labels != NO_LABEL], torch.where(labels != NO_LABEL, known, 0.0).sum(1)


def of(batch: dict[str, Any]) -> Batch:
    made = batch_of(batch)
    return Batch(made.tokens, made.extras, segment_of_example=torch.arange(len(batch["labels"])))


def same(found: torch.Tensor, wanted: torch.Tensor, model: Any) -> None:
    """Values, and gradients of a sum in which each has another factor."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    factors = torch.linspace(-1.0, 2.0, len(found), dtype=found.dtype)
    gradients = [torch.autograd.grad((one * factors).sum(), weights, retain_graph=True) for one in (found, wanted)]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.fixture
def as_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with everywhere() if request.param else nullcontext():
        yield


@pytest.mark.parametrize("as_gpu", [False, True], indirect=True, ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("as_gpu")
def test_as_full_logits_in_fp64(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (policy, logprobs):
        monkeypatch.setattr(module, "rows_at_a_time", lambda *_, **__: 4)
    monkeypatch.setattr(logprobs, "_KEPT_BYTES", rows % 3)  # none
    model, batch = MODELS[kind]().double(), a_batch(rows)
    tokens, sequences = reference(model, batch)
    same(PolicyModel(model).token_logprobs(of(batch)), tokens, model)
    same(PolicyModel(model).sequence_logprobs(of(batch)), sequences, model)
    with torch.no_grad():
        alone = PolicyModel(model).token_logprobs(of(batch))
    torch.testing.assert_close(alone, tokens.detach(), rtol=1e-12, atol=1e-12)
    values, entropies = PolicyModel(model).token_logprobs_and_entropies(of(batch), temperature=0.7)
    same(values, reference(model, batch, 0.7)[0], model)
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1]
    chances = (logits / 0.7).log_softmax(-1)
    wanted = -(chances.exp() * chances).sum(-1)[batch["labels"][:, 1:] != NO_LABEL]
    torch.testing.assert_close(entropies, wanted, rtol=1e-12, atol=1e-12)
    assert not entropies.requires_grad


@pytest.mark.parametrize(("kind", "over"), [("frozen", True), ("frozen, tied", True), ("frozen, capped", False),
                                            ("frozen, scaled", False), ("adapted", False)])  # fmt: skip
def test_gpus_write_the_gradient_over_the_logits_of_a_plain_frozen_head(
    kind: str, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bool] = []
    losses = logprobs._losses
    monkeypatch.setattr(logprobs, "_losses", lambda *a, wanted: written.append(wanted) or losses(*a, wanted=wanted))
    model, batch = MODELS[kind](), of(a_batch())
    with everywhere():
        PolicyModel(model).token_logprobs(batch)
        PolicyModel(model).token_logprobs(batch, temperature=0.7)
        assert written == [True] * over
        with torch.no_grad():
            PolicyModel(model).token_logprobs(batch)
    assert written == [*[True] * over, False]


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_gpus_write_the_gradient_over_the_logits_of_a_plain_trained_head(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward pass, where they may have been computed again; a second one over them is an error."""
    written: list[bool] = []
    losses = logprobs._losses
    monkeypatch.setattr(logprobs, "_losses", lambda *a, wanted: written.append(wanted) or losses(*a, wanted=wanted))
    monkeypatch.setattr(logprobs, "_KEPT_BYTES", kept)
    monkeypatch.setattr(logprobs, "rows_at_a_time", lambda *_, **__: 4)
    monkeypatch.setattr(policy, "rows_at_a_time", lambda *_, **__: 4)
    with everywhere():
        found = PolicyModel(MODELS["linear"]()).token_logprobs(of(a_batch())).sum()
        assert written == [False] * len(written) != [False]  # several chunks
        found.backward(retain_graph=True)
        assert written.count(True) == written.count(False) / (1 if kept else 2)
        if kept:
            with pytest.raises(RuntimeError):
                found.backward()


class Products(TorchDispatchMode):
    """Number of products with the head's weight."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += V in args[-1].shape and args[-2].ndim == 2
        return func(*args, **(kwargs or {}))


def test_logits_are_computed_again_only_where_they_are_many_and_the_head_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_backward = []
    for kind, kept in (("frozen", 0), ("adapted", 1 << 20), ("adapted", 0)):
        monkeypatch.setattr(logprobs, "_KEPT_BYTES", kept)
        model, batch = MODELS[kind](), of(a_batch())
        PolicyModel(model).token_logprobs(batch)  # looks at the head once
        found = PolicyModel(model).token_logprobs(batch)
        with Products() as seen:
            found.sum().backward()
        in_backward.append(seen.count)
    frozen, few, many = in_backward
    assert frozen == 1 < few < many  # one row of the model's own output stays in the graph


def test_impossible_tokens_add_nothing_to_the_entropy() -> None:
    logits = torch.randn(5, 9, dtype=torch.float64)
    logits[:, ::2] = -torch.inf
    own = HeadRows(logits, lambda rows: rows, 9, torch.full((5,), 3), torch.arange(5))
    found = logprobs.logprobs(own, 1.0, 2, entropies_of=0)[1]
    torch.testing.assert_close(found, torch.distributions.Categorical(logits=logits[:, 1::2]).entropy())


def test_they_sum_up_to_the_loss() -> None:
    model, batch = a_model(), of(a_batch())
    torch.testing.assert_close(
        PolicyModel(model).sequence_logprobs(batch).sum(), -PolicyModel(model).nll_sum(batch).double()
    )


class Largest(TorchDispatchMode):
    """The most rows of logits that any operation makes."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            weight = (32, V)  # transposed, as torch multiplies with it
            if isinstance(one, torch.Tensor) and one.ndim and one.shape[-1] == V and one.shape != weight:
                self.rows = max(self.rows, one.numel() // V)
        return out


@pytest.mark.parametrize("kind", ["linear", "capped", "scaled", "adapted"])
def test_logits_of_a_few_rows_exist_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (policy, logprobs):
        monkeypatch.setattr(module, "rows_at_a_time", lambda *_, **__: 4)
    monkeypatch.setattr(logprobs, "_KEPT_BYTES", 0)
    model, batch = MODELS[kind](), of(a_batch())
    model.requires_grad_(False).get_input_embeddings().requires_grad_()  # no gradient has the head's own shape
    PolicyModel(model).token_logprobs(batch)  # looks at the head once
    with Largest() as seen:
        PolicyModel(model).token_logprobs(batch).sum().backward()
    assert 0 < seen.rows <= 4
    assert "forward" not in vars(PolicyModel(model).model.get_base_model() if kind == "adapted" else model.base_model)


def test_without_labels_the_sums_are_zero_with_a_graph_through_every_weight() -> None:
    model, batch = a_model(), a_batch()
    batch["labels"] = torch.full_like(batch["labels"], NO_LABEL)
    sums = PolicyModel(model).sequence_logprobs(of(batch))
    assert sums.tolist() == [0.0] * 3
    sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


def test_without_its_adapter_a_model_is_the_one_below_without_dropout() -> None:
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
    base, batch = a_model(attention_dropout=0.5), of(a_batch())
    with torch.no_grad():
        wanted = PolicyModel(base.eval()).sequence_logprobs(batch)
        model = get_peft_model(base, config).train()
        with PolicyModel(model).without_adapter():
            assert torch.equal(PolicyModel(model).sequence_logprobs(batch), wanted)
        assert all(module.training for module in model.modules())
        assert not torch.equal(PolicyModel(model.eval()).sequence_logprobs(batch), wanted)
