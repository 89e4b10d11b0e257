"""Fused layers through what happens to a model: copies, adapters that come and go, generation, compilation, threads."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_fused_layers import SLIDING, adapted, assert_same, batch, counts, trained
from tiny_model import because, nll_sum, plan
from torch import nn

from halftune.model.attention.register import current_guard, registered_attention
from halftune.model.fused import fuse


@pytest.fixture
def attention() -> Iterator[str]:
    made = plan()
    with registered_attention(replace(made, batch=replace(made.batch, packing=because(True)))) as name:
        yield name


def remote_code(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a model without any forward of an instance."""
    for module in model.modules():
        vars(module).pop("forward", None)
    return copy.deepcopy(trained(model))


def test_a_copy_computes_with_its_own_weights(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    fuse(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter *= 0.5
    found = copy.deepcopy(trained(twin))
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert_same(found, remote_code(twin))


def test_a_saved_whole_model_is_still_fused(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    fuse(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert sum("forward" in vars(module) for module in again.modules()) == 15
    assert_same(trained(again), trained(model))


def test_an_adapter_that_is_taken_off_is_gone(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    with torch.no_grad(), model.disable_adapter():
        base = float(nll_sum(model, batch()))
    fuse(model)
    with torch.no_grad():
        assert float(nll_sum(model.unload(), batch())) == pytest.approx(base, rel=1e-6)


def test_an_adapter_that_comes_later_is_trained(attention: str) -> None:
    model = adapted("qwen2", {}, attention).unload().requires_grad_(False)
    assert counts(fuse(model)) == (5, 2, 0)
    later = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    found = copy.deepcopy(trained(later))
    assert len(found[1]) == 28
    assert_same(found, remote_code(later))


@pytest.mark.parametrize("active", ["default", "other", ["default", "other"]], ids=str)
def test_the_active_adapter_counts(attention: str, active: str | list[str]) -> None:
    model = adapted("qwen2", {}, attention)
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.data *= 0.1  # two large updates at once make gradients that fp32 itself knows to 1e-5 only
    fuse(model)
    model.base_model.set_adapter(active)
    found = copy.deepcopy(trained(model))
    assert_same(found, remote_code(model))


def projections(model: nn.Module) -> Any:
    return model.get_submodule("base_model.model.model.layers.1.self_attn")


def test_layers_called_by_themselves_compute_what_they_are_asked(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    fuse(model)
    part, x = projections(model), torch.randn(1, 5, 32)
    with torch.no_grad():
        part.q_proj(x)
    assert part.k_proj(x).requires_grad
    part.q_proj(x)
    x *= 2
    with torch.no_grad():
        part.v_proj.lora_B["default"].weight.mul_(3)
        torch.testing.assert_close(part.v_proj(x), type(part.v_proj).forward(part.v_proj, x))


def test_an_input_that_is_changed_in_place_is_computed_anew(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    fuse(model)
    part, x = projections(model), torch.randn(1, 5, 32)
    group = part.q_proj.forward.__self__.group
    group._begin(part, ())
    with torch.no_grad():
        part.q_proj(x)
        torch.testing.assert_close(part.k_proj(x), type(part.k_proj).forward(part.k_proj, x))
        x *= 2
        torch.testing.assert_close(part.v_proj(x), type(part.v_proj).forward(part.v_proj, x))
    group._end(part, (), None)


def test_an_attempt_that_failed_leaves_nothing_behind(attention: str) -> None:
    """Memory that ran out within a layer is free again before the next attempt."""
    model = adapted("qwen2", {}, attention)
    fuse(model)
    part, seen = projections(model), []

    def keep(_module: nn.Module, _inputs: Any, given: dict[str, Any]) -> None:
        seen.append(weakref.ref(given["hidden_states"]))

    def fail(_module: nn.Module, _inputs: Any) -> None:
        raise MemoryError

    handles = [
        part.register_forward_pre_hook(keep, with_kwargs=True),
        part.o_proj.register_forward_pre_hook(fail),
    ]
    with pytest.raises(MemoryError):
        nll_sum(model, batch())
    for handle in handles:
        handle.remove()
    gc.collect()
    (input_of_the_group,) = seen
    assert input_of_the_group() is None


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_activations_are_told_apart_however_small_the_weights(attention: str, share: float) -> None:
    model = adapted("gemma3_text", SLIDING, attention)  # gelu
    for name, parameter in model.named_parameters():
        if ".mlp." in name:
            parameter.data *= share
    assert counts(fuse(model.bfloat16())) == (13, 0, 14)


def test_layers_of_one_class_may_differ_in_their_activation(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    model.get_submodule("base_model.model.model.layers.1.mlp").act_fn = nn.GELU()
    own = copy.deepcopy(trained(model))
    assert counts(fuse(model)) == (5, 1, 11)
    assert_same(trained(model), own)


def test_the_guard_names_the_line_in_the_norm_that_promotes(attention: str) -> None:
    """And a step gives the same numbers whether it is recorded or not."""
    model = adapted("qwen3", {}, attention)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and "norm" not in name:
            parameter.data = parameter.data.bfloat16()
    fuse(model)
    guard, results = current_guard(), []
    guard.watch(model)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(copy.deepcopy(trained(model)))
    sites = guard.report()["sites"]
    assert len(sites) == 2
    for site in sites:
        query, key = site["promoted"].split("; ")
        assert query.endswith("self_attn.q_norm.weight"), site
        assert key.endswith("self_attn.k_norm.weight"), site
    for other in results[1:]:
        assert other[0] == results[0][0]
        assert all(torch.equal(other[1][name], results[0][1][name]) for name in other[1])


def test_generation_with_a_cache_is_the_same(attention: str) -> None:
    model = adapted("qwen2", {}, attention).eval()
    ids = torch.randint(3, 128, (2, 6))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    own = model.generate(input_ids=ids, **settings)
    fuse(model)
    assert torch.equal(model.generate(input_ids=ids, **settings), own)
    assert torch.equal(copy.deepcopy(model).generate(input_ids=ids, **settings), own)
    with torch.inference_mode():
        assert torch.equal(model.generate(input_ids=ids, **settings), own)


@pytest.mark.slow
def test_a_compiled_model_runs_its_own_code(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    own = copy.deepcopy(trained(model))
    fuse(model)
    model.compile(backend="eager")
    assert_same(trained(model), own)


@pytest.mark.slow
def test_several_threads_of_the_library_and_of_the_caller(attention: str) -> None:
    model = adapted("qwen2", {}, attention)
    own = copy.deepcopy(trained(model))
    packed = {name: value for name, value in batch().items() if name != "labels"}
    with torch.no_grad():
        logits = model(**packed, use_cache=False).logits
    fuse(model)
    before = torch.get_num_threads()
    errors: list[float] = []

    def read() -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            for _ in range(5):
                found = model(**packed, use_cache=False).logits
                errors.append(float((found - logits).norm() / logits.norm()) if found.shape == logits.shape else 1.0)

    torch.set_num_threads(2)
    threads = [threading.Thread(target=read) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(5):
            assert_same(trained(model), own)
    finally:
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)
    assert len(errors) == 15
    assert max(errors) < 1e-5
