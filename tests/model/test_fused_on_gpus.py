"""What GPUs fuse, on a CPU, family by family: the same losses and gradients, no values needed, whole graphs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_fused_layers import EXPERTS, SLIDING, adapted, assert_same, trained
from tiny_model import because, plan
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.model.attention.register import registered_attention
from halftune.model.fused import FusedLayers, fuse
from halftune_kernels.library import everywhere

# family → config changes, and the numbers of layers: norms, feed-forward, adapted linear, files with rotary embeddings
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "llama": ({}, (5, 2, 8, 1)),
    "qwen2": ({}, (5, 2, 8, 1)),
    "qwen3": ({}, (9, 2, 8, 1)),
    "mistral": ({"sliding_window": 16}, (5, 2, 8, 1)),
    "gemma2": ({**SLIDING, "attn_logit_softcapping": None}, (9, 2, 8, 1)),
    "gemma3_text": (SLIDING, (13, 2, 8, 1)),
    "phi3": ({"sliding_window": 16, "partial_rotary_factor": 0.5}, (5, 2, 4, 1)),
    "glm4": ({}, (9, 2, 8, 1)),
    "qwen3_moe": (EXPERTS, (9, 0, 8, 1)),
    "mixtral": (EXPERTS, (5, 0, 8, 1)),
}
KINDS = ("norms", "feed-forward layers", "adapted linear layers", "rotary embeddings")


@pytest.fixture
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    made = plan()
    if request.node.name.endswith("[gemma2]"):  # its class refuses sdpa
        made = replace(made, attention=replace(made.attention, softmax=because("eager")))
    with registered_attention(replace(made, batch=replace(made.batch, packing=because(True)))) as name:
        yield name


@contextlib.contextmanager
def fused(model: Any, like: Any = None) -> Iterator[FusedLayers]:
    """Inside, the model is fused as on a GPU; its family's functions are as before afterwards."""
    with everywhere():
        done = fuse(model, like)
        try:
            yield done
        finally:
            done.remove()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_trains_the_same(kind: str, attention: str) -> None:
    changes, expected = FAMILIES[kind]
    model = adapted(kind, changes, attention)
    own = copy.deepcopy(trained(model))
    with fused(model) as done:
        assert tuple(done.fused[name] for name in KINDS) == expected, str(done)
        assert_same(trained(model), own)
    assert_same(trained(model), own)


def test_full_fine_tuning_has_the_activation_in_one_launch(attention: str) -> None:
    model = adapted("gemma3_text", SLIDING, attention).merge_and_unload().requires_grad_(True)
    own = copy.deepcopy(trained(model))
    with fused(model) as done:
        assert tuple(done.fused[name] for name in KINDS) == (13, 2, 0, 1), str(done)
        assert_same(trained(model), own)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_a_step_needs_no_values(kind: str) -> None:
    """Nothing waits for the device: a step on one without memory, its layers known from a copy with numbers."""
    real = adapted(kind, FAMILIES[kind][0], "sdpa")
    model = copy.deepcopy(real).to("meta")
    with fused(model, like=real) as done:
        assert tuple(done.fused[name] for name in KINDS) == FAMILIES[kind][1], str(done)
        ids = torch.zeros(1, 9, dtype=torch.int64, device="meta")
        mask: Any = torch.zeros(1, 1, 9, 9, device="meta")  # transformers' own looks at the positions
        if kind == "gemma3_text":
            mask = dict.fromkeys(("full_attention", "sliding_attention"), mask)
        model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False).logits.float().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients
    assert all(gradient is not None and gradient.is_meta for gradient in gradients.values())


@pytest.mark.parametrize(
    ("kind", "full"), [("qwen2", False), ("qwen2", True), pytest.param("gemma3_text", False, marks=pytest.mark.slow)]
)
def test_a_block_is_one_graph(kind: str, full: bool) -> None:
    """No break, with the operators in it, and the results of the uncompiled block."""
    torch._dynamo.reset()
    model = adapted(kind, FAMILIES[kind][0], "sdpa")
    if full:
        model = model.merge_and_unload().requires_grad_(True)
    base = model if full else model.base_model.model
    block, x = base.model.layers[0], torch.randn(1, 7, 32, requires_grad=True)
    angles = torch.randn(1, 7, 8)
    inputs = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}

    def run(code: Any) -> list[torch.Tensor]:
        model.zero_grad()
        x.grad = None
        out = code(x, **inputs)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]

    own = run(block)
    with fused(model) as done:
        assert done.fused["norms"]
        found = run(torch.compile(block, backend="aot_eager", fullgraph=True))
        graph = torch._dynamo.explain(block)(x, **inputs).graphs[0]
        torch._dynamo.reset()
    used = {str(node.target) for node in graph.graph.nodes}
    activation = "gated_activation" if full else "adapted_activation"
    assert {f"halftune.{name}.default" for name in ("rms_norm", activation, "rope")} <= used
    for ours, expected in zip(found, own, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_what_computes_something_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def doubled(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return 2 * q, 2 * k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", doubled)
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    with fused(AutoModelForCausalLM.from_config(config)) as done:
        assert modeling_llama.apply_rotary_pos_emb is doubled
        assert done.left["rotary embeddings that compute something else"] == 1


def test_an_unusual_call_runs_the_own_code(attention: str) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    q, k, angles = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 8)
    given = q, k, angles.cos(), angles.sin()
    with fused(adapted("llama", {}, attention)):
        found = modeling_llama.apply_rotary_pos_emb(*given, unsqueeze_dim=2)
    assert all(torch.equal(x, y) for x, y in zip(found, own(*given, unsqueeze_dim=2), strict=True))
    assert modeling_llama.apply_rotary_pos_emb is own
