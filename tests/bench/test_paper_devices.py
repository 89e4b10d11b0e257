"""The paper profiler: kernels that depend on the GPU, and micro-batches that are not run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_paper import ATTENTION, BF16, GEMM, GROUPS, HEADS, LAYERS, PADDED, D, H, M, T, empty, recipe, recorded
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from halftune.bench.paper import micro_batches
from halftune.bench.paper.costs import Cost
from halftune.bench.paper.fake_cuda import CUDA, fake_cuda
from halftune.bench.paper.kinds import HEAD
from halftune.bench.paper.peers import record_peer
from halftune.bench.paper.recorder import Launch, Recorder
from halftune.bench.paper.step import record_step
from halftune.bench.paper.timeline import seconds_of
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.hardware.roofline import ROOFLINES
from halftune.plan import resolve

FP16, FP32 = torch.float16, torch.float32


@contextmanager
def on(machine: str) -> Iterator[Recorder]:
    recorder = Recorder()
    with fake_cuda(recorder, lookup(machine).devices[0]):
        recorder.on_gpu = True
        yield recorder


@pytest.mark.parametrize(
    ("machine", "dtype", "heads", "size", "masked", "expected"),
    [
        ("h100", BF16, 4, 64, False, "flash"),
        ("h100", BF16, 2, 256, False, "flash"),
        ("h100", BF16, 4, 264, False, "efficient"),
        ("h100", BF16, 4, 64, True, "efficient"),
        ("h100", BF16, 2, 64, True, None),  # heads that share keys
        ("h100", FP32, 4, 64, False, "efficient"),
        ("h100", FP32, 2, 64, False, None),
        ("h100", FP32, 4, 66, False, None),  # not aligned
        ("h100", torch.float64, 4, 64, False, None),
        ("a100", FP16, 4, 64, False, "flash"),
        ("t4", FP16, 4, 64, False, "efficient"),
        ("t4", FP16, 2, 64, False, None),
        ("t4", BF16, 4, 64, False, None),
    ],
)
def test_attention_is_the_kernel_that_cuda_chooses(
    machine: str, dtype: torch.dtype, heads: int, size: int, masked: bool, expected: str | None
) -> None:
    with on(machine) as gpu:
        query, key, value = (empty(1, many, T, size, dtype=dtype).requires_grad_() for many in (4, heads, heads))
        mask = torch.ones(T, T, dtype=torch.bool, device=CUDA) if masked else None
        with gpu.recording():
            out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=not masked, enable_gqa=heads < 4)
            out.sum().backward()
    assert out.shape == query.shape == query.grad.shape  # type: ignore[union-attr]
    assert key.grad is not None
    assert key.grad.shape == key.shape
    found = {one.op.removeprefix("aten::_scaled_dot_product_"): one for one in gpu.launches if one.cost.rate}
    assert set(found) == ({f"{expected}_attention", f"{expected}_attention_backward"} if expected else set())
    pairs = T * T if masked or not expected else T * (T + 1) // 2
    flops = sum(one.cost.flops for one in gpu.launches)
    assert flops == (3.5 if expected else 3) * 4 * size * 4 * pairs  # what is not fused keeps its scores
    assert {one.cost.dtype for one in found.values()} <= {dtype}


def test_attention_in_fp32_is_no_faster_than_products_in_fp32(tmp_path: Path) -> None:
    flops = 1e12
    for roofline in ROOFLINES:
        for dtype, products in ((FP32, "fp32"), (FP16, "fp16")):
            cost = Cost(0, 0, flops, dtype=dtype, rate="efficient")
            found = seconds_of(Launch("", ATTENTION, "", None, False, cost, 0), roofline, tf32=True)
            most = min(roofline.attention["efficient"][0], roofline.gemm[products])  # type: ignore[index]
            assert found == pytest.approx(flops / most)
    keys = {"attention": "sdpa", "data": PADDED, "precision": "fp32", "training": {"output_dir": "run"}}
    step = recorded(recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1, "num_key_value_heads": 4}, **keys))
    kernels = [one for one in step.recorded.launches if one.kind == ATTENTION]
    assert {one.cost.rate for one in kernels} == {"efficient", "efficient/backward"}


def test_a_checkpoint_attends_again_by_the_same_kernel(tmp_path: Path) -> None:
    keys = {"attention": "sdpa", "data": PADDED, "training": {"output_dir": "run", "gradient_checkpointing": True}}
    step = recorded(recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1, "num_key_value_heads": 4}, **keys))
    rates = [one.cost.rate for one in step.recorded.launches if one.cost.rate]
    assert set(rates) == {"fa2", "fa2/backward"}
    assert rates.count("fa2") == 2 * rates.count("fa2/backward")


@pytest.mark.parametrize(("machine", "precision"), [("t4", "fp16"), ("h100", "fp32")])
def test_a_checkpoint_asks_again_where_tensors_are(tmp_path: Path, machine: str, precision: str) -> None:
    """Heads of packed rows that share keys are repeated on a GPU without FlashAttention, and not on a CPU."""
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "gradient_checkpointing": True}
    keys = {"precision": precision, "attention": "sdpa", "training": training}
    step = recorded(recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1}, **keys), machine)
    rates = [one.cost.rate for one in step.recorded.launches if one.cost.rate]
    assert sorted(rates) == ["efficient", "efficient", "efficient/backward"]


@pytest.mark.parametrize(
    ("machine", "dtype", "one"),
    [("h100", BF16, True), ("b200", BF16, True), ("h100", FP16, False), ("a100", BF16, False), ("h100", FP32, False)],
)
def test_groups_are_one_product_each_where_there_is_no_kernel_for_all(
    machine: str, dtype: torch.dtype, one: bool
) -> None:
    with on(machine) as gpu:
        x, weights = empty(64, 32, dtype=dtype).requires_grad_(), empty(4, 32, 16, dtype=dtype).requires_grad_()
        with gpu.recording():
            out = F.grouped_mm(x, weights, offs=torch.zeros(4, dtype=torch.int32, device=CUDA))
            out.backward(empty(64, 16, dtype=dtype))
    products = [found.cost for found in gpu.launches if found.op == "aten::_grouped_mm"]
    assert [cost.launches for cost in products] == [1 if one else 4] * 3
    assert [cost.flops for cost in products] == [2 * 64 * 32 * 16] * 3
    assert len(gpu.syncs) == (0 if one else 3)


def test_an_old_gpu_multiplies_frozen_experts_for_their_gradients_too(tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    found = {
        machine: recorded(recipe(tmp_path / machine, "qwen3_moe", sizes=sizes, precision=compute), machine)
        for machine, compute in (("t4", "fp16"), ("h100", "bf16"))
    }
    forward, backward = (
        [one for one in found["t4"].recorded.launches if one.op == f"transformers::grouped_mm_fallback{name}"]
        for name in ("", "_backward")
    )
    assert [one.cost.launches for one in forward] == [8 + 1] * 2
    assert [one.cost.launches for one in backward] == [2 * (8 + 1)] * 2
    products = sum(one.cost.flops for one in forward)
    assert sum(one.cost.flops for one in backward) == 2 * products > 0
    assert sum(one.what == "sizes of groups" for one in found["t4"].recorded.syncs) == 4
    more = found["t4"].time.kinds[GEMM].flops - found["h100"].time.kinds[GEMM].flops
    assert more == products


PAIRS = {"method": {"type": "dpo"}, "data": {"train": "builtin:python-pairs", "max_length": T, "packing": True}}
STEPS: list[Any] = [
    (3, {}),
    *(pytest.param(many, {}, marks=pytest.mark.nightly) for many in (2, 4)),
    *(pytest.param(3, keys, marks=pytest.mark.nightly) for keys in (PAIRS, {"precision": "fp16"})),
]


def accumulating(folder: Path, many: int, **keys: Any) -> Path:
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "gradient_accumulation_steps": many}
    return recipe(folder, "llama", training=training, **keys)


@pytest.mark.parametrize(("many", "keys"), STEPS)
def test_micro_batches_that_are_not_run_launch_what_they_would(
    many: int, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(accumulating(tmp_path, many, sizes={"num_hidden_layers": 1}, **keys)).run
    plan, device = resolve(config, lookup("h100"), run_facts(config)), lookup("h100").devices[0]
    ways = [lambda: record_step(config, plan, device)]
    if not keys:
        ways.append(lambda: record_peer("transformers", config, plan, device))
    found = [way() for way in ways]
    monkeypatch.setattr(micro_batches, "RUN", many)
    assert [way() for way in ways] == found
    assert {made.micro_batches for made in found} == {many}


def test_time_and_a_layers_numbers_do_not_grow_with_accumulation(tmp_path: Path) -> None:
    passes: list[int] = []

    def count(module: torch.nn.Module, _: Any) -> None:
        passes[-1] += type(module).__name__ == "LlamaDecoderLayer"

    def profiled(many: int) -> Any:
        passes.append(0)
        return recorded(accumulating(tmp_path / str(many), many, sizes={"num_hidden_layers": 1}))

    handle = register_module_forward_pre_hook(count)
    try:
        one, many = profiled(1), profiled(8)
    finally:
        handle.remove()
    assert passes[1] - passes[0] == 1  # of the second micro-batch
    assert many.launches_per_layer == one.launches_per_layer > 0
    assert many.time.layer_kinds[ATTENTION].seconds == pytest.approx(one.time.layer_kinds[ATTENTION].seconds)
    assert many.time.kinds[ATTENTION].flops == 8 * one.time.kinds[ATTENTION].flops


@pytest.mark.parametrize("single", [False, True], ids=["nested", "single"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_weights_of_4_bits_are_unpacked_at_each_use(tmp_path: Path, *, single: bool, fused: bool) -> None:
    pytest.importorskip("bitsandbytes")
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "fused_layers": fused}
    found = {}
    for name in ("plain", "packed"):
        folder = tmp_path / name
        model = {"name_or_path": str(folder)}
        if name == "packed":
            model["quantization"] = "nf4_single" if single else "nf4"
        found[name] = recorded(recipe(folder, "llama", model=model, training=training)).recorded
    plain, packed = found["plain"], found["packed"]
    assert packed.fused == plain.fused
    for kind in (GEMM, ATTENTION, HEAD):
        first, second = (sum(x.cost.flops for x in one.launches if x.kind == kind) for one in (plain, packed))
        assert first == second > 0
    uses = [one for one in packed.launches if one.op == "bitsandbytes::dequantize_4bit"]
    # query, key and value of the first layer have no input to differentiate for
    linear = 7 * LAYERS
    assert len(uses) == 2 * linear - 3
    assert sum(one.op == "bitsandbytes::dequantize_blockwise" for one in packed.launches) == len(uses) * (not single)
    down = [one.cost for one in uses if one.cost.written == 2 * H * M]
    assert down
    scales = 4 * H * M // 64
    assert {one.read for one in down} == {H * M // 2 + scales}
    saved = sum(weight * 2 for weight in (H * HEADS * D * 2, 2 * H * GROUPS * D, 3 * H * M)) * LAYERS
    assert 0.4 * saved < plain.peak - packed.peak < 0.75 * saved


def test_packed_weights_with_dora_are_refused(tmp_path: Path) -> None:
    adapter = {"type": "lora", "rank": 8, "use_dora": True}
    model = {"name_or_path": str(tmp_path), "quantization": "nf4"}
    with pytest.raises(PlanError) as refused:
        recorded(recipe(tmp_path, "llama", model=model, adapter=adapter))
    assert refused.value.code == "bench.paper_unsupported"


def test_an_answer_of_kto_costs_a_step_and_a_mismatched_one_a_forward_pass(tmp_path: Path) -> None:
    data = tmp_path / "rated.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "b", "label": True}) + "\n")
    keys = {"data": {"train": str(data), "max_length": T, "packing": True}, "method": {"type": "kto"}}
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "fused_layers": False}
    found = recorded(recipe(tmp_path, "llama", **keys, training=training)).recorded
    up = [one.cost for one in found.launches if one.kind == GEMM and one.module.endswith("up_proj")]
    tokens = found.tokens // 2
    once = 2 * tokens * H * M
    # of the reference both halves; of the model mismatched answers, then answers and their gradient
    assert sorted(cost.flops for cost in up) == sorted([2 * once, once, once, once] * LAYERS)
