"""The paper profiler against formulas, and against the same step of a small model on this CPU."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_paper import (
    ATTENTION,
    GEMM,
    GROUPS,
    HEAD,
    HEADS,
    LAYERS,
    LINEAR,
    LINEAR_SIZES,
    LORA,
    D,
    H,
    M,
    T,
    recipe,
    recorded,
)
from torch.profiler import ProfilerActivity, profile

from halftune import cli
from halftune.bench.paper import fake_cuda
from halftune.bench.paper.peers import PEERS, record_peer
from halftune.bench.paper.step import Recorded, micro_batch, record_step, state
from halftune.cli import bench_paper
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.model.attention.register import registered_attention
from halftune.model.meta.model import build, prepare, read_config
from halftune.plan import resolve
from halftune.train.loop.step import finish_step, start_step

SOFTMAX = H * HEADS * D + 2 * H * GROUPS * D + HEADS * D * H  # weights of query, key, value and output
PAIRS = T * (T + 1) // 2


def both_ways(weights: float, without_input: float) -> float:
    """FLOPs of frozen weights, forward and for the inputs' gradient, which the first layer's inputs do not need."""
    return 2 * T * (2 * weights - without_input)


def test_flops_of_a_hybrid_are_the_closed_formula(tmp_path: Path) -> None:
    found = recorded(recipe(tmp_path, "qwen3_5_text", sizes={**LINEAR_SIZES, "num_hidden_layers": 4}))
    key, value, heads = 2 * 64, 4 * 64, 4
    reading = H * (2 * key + 2 * value + 2 * heads)  # query, key, value, gate, and two numbers for each head
    linear, softmax = reading + value * H, SOFTMAX + H * HEADS * D  # its query comes with a gate
    weights = 3 * linear + softmax + 4 * 3 * H * M
    assert found.time.kinds[GEMM].flops == pytest.approx(both_ways(weights, reading), rel=0.01)
    assert found.time.kinds[ATTENTION].flops == 3.5 * 4 * D * HEADS * PAIRS  # of one layer
    assert key == value // 2 == 2 * 64
    chunk, size = 64, 64  # rows, and channels of a head: solve, two scans, chunk_backward
    squares = chunk * size * ((1 + 0.625 + 0.625) + 2 + 2 + 9)
    assert found.time.kinds[LINEAR].flops == 3 * 2 * T * heads * (squares + 9 * size * size)


def test_flops_of_experts_are_the_closed_formula(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    found = recorded(recipe(tmp_path, "qwen3_moe", sizes=experts))
    layer = SOFTMAX + 8 * H + 2 * 3 * H * 128  # a token goes to two experts
    weights = LAYERS * layer
    assert found.time.kinds[GEMM].flops == pytest.approx(both_ways(weights, SOFTMAX - HEADS * D * H), rel=0.01)


@pytest.mark.parametrize(("method", "references"), [("dpo", 1), ("simpo", 0)])
def test_pairs_take_the_reference_too(method: str, references: int, tmp_path: Path) -> None:
    """One more forward pass, of the model without its adapter, where the method has a reference."""
    keys = {"method": {"type": method}, "data": {"train": "builtin:python-pairs", "max_length": T, "packing": True}}
    found = recorded(recipe(tmp_path, "llama", **keys))
    assert found.recorded.tokens == 2 * T
    assert found.time.kinds[ATTENTION].flops == LAYERS * (3.5 + references) * 4 * D * HEADS * 2 * PAIRS
    weights = LAYERS * (SOFTMAX + 3 * H * M)
    expected = both_ways(weights, SOFTMAX - HEADS * D * H) + 2 * T * weights * references
    assert found.time.kinds[GEMM].flops == pytest.approx(2 * expected)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, Any, int]:
    """A step on paper, the same step on this CPU under torch's profiler, and the bytes that it started with."""
    folder = tmp_path_factory.mktemp("both")
    training = {
        "output_dir": str(folder.with_name(f"{folder.name}-run")),
        "per_device_train_batch_size": 2,
        "fused_layers": False,
    }
    data = {"train": "builtin:python-docs", "max_length": T, "packing": False}
    keys = {"precision": "fp32", "attention": "sdpa", "data": data, "training": training}
    config = load_config(recipe(folder, "llama", **keys)).run
    plan = resolve(config, lookup("cpu"), run_facts(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_cuda, "attend_as_cuda", torch.nn.functional.scaled_dot_product_attention)
        paper = record_step(config, plan, lookup("h200").devices[0])
    with registered_attention(plan) as attention:
        model: Any = prepare(build(read_config(config.model), config.model, plan, attention), config, plan, None)
        run = state(config, plan, model, torch.device("cpu"))
        run.late = True  # as on a GPU
        batches = [micro_batch(run, T)]
        before = start_step(run, batches)
        moments = [value for one in run.optimizer.state.values() for value in one.values()]
        held = [*model.parameters(), *model.buffers(), *moments, *batches[0].tokens.values()]
        storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in held}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            start_step(run, batches)
            finish_step(run, before)
    return paper, measured, sum(storages.values())


# What a CPU computes by other operators: the loss, on GPUs a kernel of halftune, and the gradient of an index. What it
# has no need of: copies between host and GPU.
LOSS, OTHERS = "_LinearCrossEntropySum", {"aten::index_put", "aten::_to_copy", "aten::copy"}


def test_launches_are_the_calls_of_the_same_step_on_a_cpu(both: tuple[Recorded, Any, int]) -> None:
    paper, measured, _ = both
    ours = Counter(one.op.removesuffix("_") for one in paper.launches if one.kind != HEAD)
    taken_apart = {one.op for one in paper.launches}  # calls inside one of these belong to it

    def alone(event: Any) -> bool:
        while (event := event.cpu_parent) is not None:
            if event.name in taken_apart or LOSS in event.name:
                return False
        return True

    found = Counter(event.name.removesuffix("_") for event in measured.events() if alone(event))
    differing = {op: (count, found[op]) for op, count in ours.items() if count != found[op] and op not in OTHERS}
    assert not differing
    products = {kind: sum(one.op == "aten::mm" and one.kind == kind for one in paper.launches) for kind in (GEMM, LORA)}
    assert products == {GEMM: LAYERS * 14 - 3, LORA: LAYERS * 42 - 3}


def test_peak_memory_is_that_of_the_same_step_on_a_cpu(both: tuple[Recorded, Any, int]) -> None:
    paper, measured, start = both
    live = most = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    assert paper.peak == pytest.approx(start + most, rel=0.01)


def test_other_tools_compute_the_same_and_keep_all_logits(tmp_path: Path) -> None:
    config = load_config(recipe(tmp_path, "llama")).run
    plan, device = resolve(config, lookup("h100"), run_facts(config)), lookup("h100").devices[0]
    found = {name: record_peer(name, config, plan, device) for name in PEERS}
    weights = LAYERS * (SOFTMAX + 3 * H * M)
    for made in found.values():
        assert made.tokens == T
        gemm = sum(one.cost.flops for one in made.launches if one.kind == GEMM)
        assert gemm == both_ways(weights, SOFTMAX - HEADS * D * H)
        attention = sum(one.cost.flops for one in made.launches if one.kind == ATTENTION)
        assert attention == LAYERS * 3.5 * 4 * D * HEADS * PAIRS
    names = Counter(one.op for one in found["automodel"].launches)
    adapters = LAYERS * 7
    assert names["triton::lora_forward"] == names["triton::lora_db"] == names["triton::lora_da_dx"] == adapters
    assert len(found["automodel"].launches) < len(found["transformers"].launches)


def test_peft_adds_to_a_copy_of_the_experts_weights(tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    adapter = {"type": "lora", "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    config = load_config(recipe(tmp_path, "qwen3_moe", sizes=sizes, adapter=adapter)).run
    plan, device = resolve(config, lookup("h100"), run_facts(config)), lookup("h100").devices[0]
    made = record_peer("transformers", config, plan, device)
    copies = [one.cost.written for one in made.launches if one.op == "aten::baddbmm" and not one.backward]
    assert {2 * 8 * H * 2 * 64, 2 * 8 * H * 64} <= set(copies)
    assert "aten::baddbmm" not in {one.op for one in record_step(config, plan, device).launches}


@pytest.mark.parametrize(("packing", "rows"), [(True, T // 128), (False, 1)])
def test_other_tools_take_the_same_samples_and_steps(packing: bool, rows: int, tmp_path: Path) -> None:
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    data = {"train": "builtin:python-docs", "max_length": T, "packing": packing}
    path = recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1}, training=training, data=data)
    config = load_config(path).run
    plan, device = resolve(config, lookup("h100"), run_facts(config)), lookup("h100").devices[0]
    ours = record_step(config, plan, device, sample=128)
    made = record_peer("transformers", config, plan, device, sample=128)
    assert made.tokens == ours.tokens == 3 * rows * 128
    assert made.sample == ours.sample == 128
    for kind in (ATTENTION, GEMM):
        first, second = (sum(x.cost.flops for x in one.launches if x.kind == kind) for one in (ours, made))
        assert first == second > 0
    assert sum("adamw" in one.op for one in made.launches) == 1
    with pytest.raises(PlanError) if packing else nullcontext() as refused:
        record_peer("transformers", config, plan, device, sample=100)
    assert not refused or refused.value.code == "bench.paper_unsupported"


def test_a_step_that_does_not_fit_has_no_price_and_no_kept_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    path = str(recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1}))
    words = ("bench", "--paper", "--config", path, "--hardware", "h200", "--price", "3", "--json")
    small, memory = lookup("h200"), 2**20
    small = replace(small, devices=(replace(small.devices[0], memory_bytes=memory),))
    monkeypatch.setattr(bench_paper, "lookup", lambda *_: small)
    (found,) = json.loads(run(capsys, *words)[1])["results"]
    assert found["fits"] is False
    assert found["memory_bytes"] == memory < found["peak_bytes"]
    assert found["price_per_million_tokens"] is None
    said, *_ = run(capsys, *words[:-1])[1].partition("warning")
    assert said.count("GiB") == 2  # of the step and of the device
    assert not (tmp_path / "cache" / "predicted").exists()


def test_other_tools_are_compared_for_lora_only(tmp_path: Path) -> None:
    config = load_config(recipe(tmp_path, "llama", adapter={"type": "none"})).run
    plan = resolve(config, lookup("h100"), run_facts(config))
    with pytest.raises(PlanError) as refused:
        record_peer("transformers", config, plan, lookup("h100").devices[0])
    assert refused.value.code == "bench.paper_unsupported"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0), capsys.readouterr().out


def test_machines_prices_and_the_plans_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    path = str(recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1}))
    words = ("bench", "--paper", "--config", path, "--hardware", "h200,a100", "--price", "3,1.5")
    code, said = run(capsys, *words, "--compare", "transformers", "--json")
    assert code == 0
    first, second = json.loads(said)["results"]
    assert (first["machine"], second["machine"]) == tuple(lookup(name).devices[0].name for name in ("h200", "a100"))
    for one, price in ((first, 3), (second, 1.5)):
        assert one["price_per_million_tokens"] == pytest.approx(price / 3600 / one["tokens_per_second"] * 1e6)
        other = one["compare"]
        assert other["ratio"] == pytest.approx(one["tokens_per_second"] / other["tokens_per_second"])
        assert other["peak_bytes"] > one["peak_bytes"] > 0
        assert one["fits"] is other["fits"] is True
        assert one["launches_per_layer"] < other["launches_per_layer"]
    speed = f"{first['tokens_per_second']:,.0f} tokens/s"
    plan = ("plan", "--config", path, "training.max_steps=700", "--hardware")
    assert speed in run(capsys, *plan, "h200")[1]
    assert speed not in run(capsys, *plan, "h100")[1]
    assert speed not in run(capsys, *plan, "h200", "adapter.rank=8")[1]
    assert run(capsys, *words, "--price", "3")[0] == 2
    for bad in ("0", "cheap", "nan"):
        assert run(capsys, *words, "--price", bad)[0] == 2
