"""The loss: exact against full logits, whatever the chunks; logits at labels only; the batches that have none."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import TOKENS, a_model, batch_of, because, nll_sum, plan
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from halftune.core.errors import ModelError
from halftune.data.batch import LABEL_POSITIONS
from halftune.data.store import NO_LABEL
from halftune.model.attention.register import registered_attention
from halftune.model.policy import logprobs as logprobs_file
from halftune.model.policy.cross_entropy import cross_entropy_sum
from halftune.model.policy.head import HeadRows, hidden_instead_of_logits
from halftune.model.policy.logprobs import logprobs
from halftune.model.policy.policy import PolicyModel, check_router_loss

N, V = 23, TOKENS


def made(dtype: torch.dtype = torch.float64, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator, dtype=torch.float64) * spread
    return logits.to(dtype), torch.randint(0, V, (N,), generator=generator)


def both(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0, **settings: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(loss, gradient) of ours and of torch's on the full logits, each scaled by 1/7 as a training step would."""
    results = []
    for function in (
        lambda x: cross_entropy_sum(x, targets, label_smoothing=label_smoothing, **settings),
        lambda x: F.cross_entropy(
            x.float() if x.dtype != torch.float64 else x, targets, reduction="sum", label_smoothing=label_smoothing
        ),
    ):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf * 1)
        (loss / 7).backward()
        assert leaf.grad is not None
        results.append((loss.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 22, 23, 24, 1000])
@pytest.mark.parametrize("ignored", ["none", "some", "all but one"])
def test_exact_in_fp64(rows: int, overwrite: bool, ignored: str) -> None:
    logits, targets = made()
    if ignored == "some":
        targets[::3] = NO_LABEL
    elif ignored == "all but one":
        targets[:-1] = NO_LABEL
    (loss, grad), (expected, expected_grad) = both(logits, targets, chunk_bytes=rows * 4 * V, overwrite=overwrite)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-15)
    assert (grad[targets == NO_LABEL] == 0).all()


@pytest.mark.parametrize("overwrite", [False, True])
def test_label_smoothing_is_exact_in_fp64(overwrite: bool) -> None:
    logits, targets = made()
    targets[::3] = NO_LABEL
    settings = {"label_smoothing": 0.3, "chunk_bytes": 5 * 4 * V, "overwrite": overwrite}
    (loss, grad), (expected, expected_grad) = both(logits, targets, **settings)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_as_torch_does(dtype: torch.dtype) -> None:
    logits, targets = made(dtype)
    targets[4] = NO_LABEL
    (loss, grad), (expected, expected_grad) = both(logits, targets, chunk_bytes=4 * 4 * V)
    assert loss.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=2e-7, atol=0)
    # one rounding to the format of the logits, as torch; fp32 noise of the softmax may tip it
    spacing = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(grad, expected_grad, rtol=spacing, atol=1e-8)


def test_hopeless_targets_keep_a_finite_loss() -> None:
    logits = torch.tensor([[500.0, -500.0, 0.0]])
    (loss, grad), (expected, expected_grad) = both(logits, torch.tensor([1]))
    assert loss == expected == 1000
    torch.testing.assert_close(grad, expected_grad)


def test_no_targets_at_all() -> None:
    logits = made(torch.float32)[0].requires_grad_()
    loss = cross_entropy_sum(logits * 1, torch.full((N,), NO_LABEL))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_the_gradient_takes_the_place_of_logits_that_nothing_needs() -> None:
    hidden, head = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    targets = made()[1]
    logits = F.linear(hidden[None], head)
    before = logits.detach().clone()
    cross_entropy_sum(logits.flatten(0, 1), targets).backward()
    assert not torch.equal(logits.detach(), before)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(hidden, head), targets, reduction="sum"), (hidden, head))
    torch.testing.assert_close((hidden.grad, head.grad), expected)
    # a head that ends in tanh needs its result: left alone
    hidden.grad = None
    logits = torch.tanh(F.linear(hidden, head))
    before = logits.detach().clone()
    cross_entropy_sum(logits, targets).backward()
    assert torch.equal(logits.detach(), before)
    expected = torch.autograd.grad(
        F.cross_entropy(torch.tanh(F.linear(hidden, head)), targets, reduction="sum"), hidden
    )
    torch.testing.assert_close(hidden.grad, expected[0])


def test_a_second_backward_is_an_error_and_not_a_wrong_gradient() -> None:
    hidden, head = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8)
    loss = cross_entropy_sum(F.linear(hidden, head), made()[1])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def a_batch(rows: int = 3, length: int = 16) -> dict[str, Any]:
    """Right-padded rows whose answers stand in different places."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (rows, length), generator=generator)
    labels = torch.full_like(ids, NO_LABEL)
    for row in range(rows):
        labels[row, 4 + row : 9 + 2 * row] = ids[row, 4 + row : 9 + 2 * row]
    labels[0, 0] = ids[0, 0]  # predicted from nothing: never counts
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def reference(model: Any, batch: dict[str, Any], label_smoothing: float = 0.0) -> torch.Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    logits, labels = logits[:, :-1].flatten(0, 1).double(), batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)


def compare(model: Any, batch: dict[str, Any], label_smoothing: float = 0.0) -> None:
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = PolicyModel(model, label_smoothing=label_smoothing).nll_sum(batch_of(batch))
    found = torch.autograd.grad(loss, weights)
    wanted = reference(model, batch, label_smoothing)
    expected = torch.autograd.grad(wanted, weights)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=2e-7, atol=0)
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-6


CAPPED = {"final_logit_softcapping": 2.0, "head_dim": 8, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("qwen2", {}), ("llama", {"tie_word_embeddings": True}), ("gemma2", CAPPED), ("granite", {"logits_scaling": 4.0})],
)
@pytest.mark.parametrize(("rows", "smoothing"), [(1, 0.0), (3, 0.0), (3, 0.2)])
def test_same_as_full_logits(kind: str, changes: dict[str, Any], rows: int, smoothing: float) -> None:
    compare(a_model(kind, **changes), a_batch(rows), smoothing)


class Waits(TorchDispatchMode):
    """Counts the operations that a GPU would have to be waited for."""

    WAITS = (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default)

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func in self.WAITS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "changes"), [("qwen2", {}), ("gemma2", CAPPED)])
def test_the_loss_of_a_row_with_known_positions_waits_for_nothing(kind: str, changes: dict[str, Any]) -> None:
    """With the model's own head fused into the loss, and with one that caps its logits."""
    model, batch = a_model(kind, **changes), a_batch(rows=1)
    del batch["attention_mask"]  # as in packed rows
    known = {**batch, LABEL_POSITIONS: (batch["labels"][0, 1:] != NO_LABEL).nonzero().squeeze(1)}
    with Waits() as of_the_model:
        model(batch["input_ids"], use_cache=False)
    results = []
    for inputs in (batch, known):
        nll_sum(model, inputs)  # looks at the head once
        with Waits() as waits:
            loss = nll_sum(model, inputs)
        results.append((waits.seen, loss.detach(), torch.autograd.grad(loss, model.lm_head.weight)[0]))
    assert results[0][0] > results[1][0] == of_the_model.seen
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])


def test_through_adapters_on_every_layer_and_the_head() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    compare(get_peft_model(a_model(), config), a_batch())


def test_the_head_sees_labelled_positions_only() -> None:
    model, batch = a_model(), a_batch()
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    nll_sum(model, batch)
    assert seen == [int((batch["labels"][:, 1:] != NO_LABEL).any(0).sum())]
    assert seen[0] < batch["labels"].shape[1]


class Plain(nn.Module):
    """A model of somebody's own: full logits, no such argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = a_model()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, use_cache: bool = True
    ) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask, use_cache=use_cache)


def test_models_that_return_all_logits() -> None:
    compare(Plain(), a_batch())


@pytest.mark.parametrize("kind", ["qwen2", "plain"])
@pytest.mark.parametrize("length", [1, 6])
def test_a_batch_without_labels_is_zero_with_a_graph_through_every_weight(kind: str, length: int) -> None:
    model = Plain() if kind == "plain" else a_model()
    ids = torch.randint(3, V, (2, length))
    labels = torch.full_like(ids, NO_LABEL)
    labels[:, 0] = 5  # a first token has nothing before it
    loss = nll_sum(model, {"input_ids": ids, "labels": labels})
    assert float(loss.detach()) == 0.0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


def test_batch_is_left_as_it_was() -> None:
    batch = a_batch()
    before = {name: value.clone() for name, value in batch.items()}
    nll_sum(a_model(), batch)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[name], before[name]) for name in before)


def test_the_auxiliary_loss_of_experts_trains_but_is_not_evaluated() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    model = a_model("qwen3_moe", **experts, output_router_logits=True, router_aux_loss_coef=0.5)
    batch = a_batch()
    with_it = nll_sum(model, batch)
    count = int((batch["labels"][:, 1:] != NO_LABEL).sum())
    with torch.no_grad():
        without = nll_sum(model, batch)
        outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    torch.testing.assert_close(without.double(), reference(model, batch), rtol=1e-6, atol=0)
    torch.testing.assert_close(with_it, without + 0.5 * outputs.aux_loss * count)


@pytest.mark.parametrize(("asked", "expected"), [("model", 0.5), (0.125, 0.125), (0, 0), (None, 0)])
def test_the_auxiliary_loss_of_experts_on_request(asked: Any, expected: float) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    model, batch = a_model("qwen3_moe", **experts, router_aux_loss_coef=0.5), a_batch()
    count = int((batch["labels"][:, 1:] != NO_LABEL).sum())
    found = PolicyModel(model, router_loss=asked).nll_sum(batch_of(batch))
    with torch.no_grad():
        without = PolicyModel(model, router_loss=asked).nll_sum(batch_of(batch))
        mask = batch["attention_mask"]
        outputs = model(batch["input_ids"], attention_mask=mask, use_cache=False, output_router_logits=True)
    torch.testing.assert_close(found, without + expected * outputs.aux_loss * count)


def test_a_model_without_experts_has_no_auxiliary_loss() -> None:
    with pytest.raises(ModelError) as refused:
        check_router_loss(a_model())
    assert refused.value.code == "model.no_router_loss"


def test_under_autocast_the_sum_is_fp32() -> None:
    model, batch = a_model(), a_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nll_sum(model, batch)
        wanted = reference(model, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    loss.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_a_row_of_one_token() -> None:
    row = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[0]]), "labels": torch.tensor([[5]])}
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 1, "max_length_k": 1}
    made = plan()
    with registered_attention(replace(made, batch=replace(made.batch, packing=because(True)))) as attention:
        model = a_model()
        model.set_attn_implementation(attention)
        loss = nll_sum(model, {**row, **packed})
    assert float(loss.detach()) == 0.0


def test_other_threads_get_logits_meanwhile() -> None:
    head, x = nn.Linear(8, V), torch.randn(2, 8)
    found: list[torch.Tensor] = []
    with hidden_instead_of_logits(head):
        thread = threading.Thread(target=lambda: found.append(head(x)))
        thread.start()
        thread.join()
        assert torch.equal(head(x), x)
    assert torch.equal(found[0], head(x))


class _Living(TorchDispatchMode):
    """The most bytes that the results of operators had at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or place in self.known:
            return
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._ended, place, size)

    def _ended(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


@pytest.mark.parametrize("frozen", [False, True])
def test_log_probabilities_take_a_few_chunks_at_one_time(frozen: bool) -> None:
    head, rows = torch.randn(8000, 16), torch.randn(16 * 128, 16, requires_grad=True)
    own = HeadRows(rows, lambda part: part @ head.t(), 8000, torch.arange(len(rows)), torch.arange(len(rows)), frozen)
    with pytest.MonkeyPatch.context() as patch, _Living() as living:
        patch.setattr(logprobs_file, "_KEPT_BYTES", 0)
        logprobs(own, 1.0, 128).sum().backward()
    assert 1 <= living.most / (128 * 8000 * 4) < 4  # of 16 chunks


@pytest.mark.nightly  # by the memory of a process; the test above counts it
def test_log_probabilities_take_the_memory_of_a_few_chunks() -> None:
    """Also where freed memory is kept, as in training: its holes are used again."""
    code = """
import resource, torch
from halftune.model.policy.head import HeadRows
from halftune.model.policy.logprobs import logprobs
from halftune.train.parallel.processes import keep_freed_memory
keep_freed_memory()
head, rows = torch.randn(40_000, 16), torch.randn(16 * 128, 16, requires_grad=True)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
for frozen in (False, True):
    own = HeadRows(rows, lambda part: part @ head.t(), 40_000, torch.arange(len(rows)), torch.arange(len(rows)), frozen)
    logprobs(own, 1.0, 128).sum().backward()
print((peak() - before) / (128 * 40_000 * 4))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 6  # of 16 chunks
