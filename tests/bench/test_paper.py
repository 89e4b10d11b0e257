"""The paper profiler: FLOPs, bytes, waits and times against hand-computed cases, and steps of several families."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from halftune import cli
from halftune.bench.paper.attention import visible
from halftune.bench.paper.costs import cost_of, touched
from halftune.bench.paper.fake_cuda import CUDA, fake_cuda
from halftune.bench.paper.kinds import ACTIVATION, ATTENTION, COPIES, GEMM, HEAD, KINDS, LINEAR, LORA, NORM, OPTIMIZER
from halftune.bench.paper.recorder import Launch, Recorder, Sync
from halftune.bench.paper.report import profile
from halftune.bench.paper.timeline import timeline
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.core.errors import ConfigError, HalftuneError, PlanError
from halftune.hardware.catalogue import lookup
from halftune.hardware.roofline import HOST_CALL, HOST_LAUNCH, HOST_SYNC, ROOFLINES, Roofline, roofline_of
from halftune.plan import resolve

BF16 = torch.bfloat16
T, H, M, V, HEADS, GROUPS, D, LAYERS, RANK = 512, 256, 512, 384, 4, 2, 64, 3, 24
SIZES = {
    "hidden_size": H,
    "intermediate_size": M,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": D,
    "vocab_size": V,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LINEAR_SIZES = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64}
LINEAR_SIZES |= {"linear_value_head_dim": 64, "linear_conv_kernel_dim": 4}


def recipe(folder: Path, kind: str, *, sizes: dict[str, Any] | None = None, **keys: Any) -> Path:
    AutoConfig.for_model(kind, **(SIZES | (sizes or {}))).save_pretrained(folder)
    tree = {
        "model": {"name_or_path": str(folder)},
        "precision": "bf16",
        "adapter": {"type": "lora", "rank": RANK, "target_modules": "all-linear"},
        "data": {"train": "builtin:python-docs", "max_length": T, "packing": True},
        "training": {"output_dir": str(folder.with_name(f"{folder.name}-run")), "per_device_train_batch_size": 1},
    } | keys
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))
    return path


def recorded(path: Path, machine: str = "h200", **options: Any) -> Any:
    loaded, hardware = load_config(path), lookup(machine)
    plan = resolve(loaded.run, hardware, run_facts(loaded.run))
    return profile(loaded.run, plan, hardware, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return recorded(recipe(tmp_path_factory.mktemp("llama"), "llama"))


def test_flops_of_a_known_model_are_the_closed_formula(llama: Any) -> None:
    q, kv, half = HEADS * D, GROUPS * D, 2 * T
    weights = H * q + 2 * H * kv + q * H + 3 * H * M
    # forward and the gradient of the input; the first layer's query, key and value have no input to differentiate for
    # where the embedding is frozen, but their adapters' inputs do not need one either
    first = H * q + 2 * H * kv
    gemm = LAYERS * 2 * half * weights - half * first
    assert llama.time.kinds[GEMM].flops == gemm
    pairs = T * (T + 1) // 2
    assert llama.time.kinds[ATTENTION].flops == LAYERS * 3.5 * 4 * D * HEADS * pairs
    assert llama.time.kinds[HEAD].flops == 2 * 2 * (T - 1) * H * V
    # an adapter of rank r from a to b: forward two products; backward two for the weights, one for the low rank, one
    # for the input
    sides = [(H, q), (H, kv), (H, kv), (q, H), (H, M), (H, M), (M, H)]
    whole = LAYERS * sum(3 * half * RANK * (a + b) for a, b in sides)
    without_input = sum(half * RANK * a for a, _ in sides[:3])
    # the feed-forward layer's launches compute the updates of gate and up again in the backward pass
    again = LAYERS * 2 * half * RANK * M
    assert llama.time.kinds[LORA].flops + llama.time.kinds[ACTIVATION].flops == whole - without_input + again


def test_kinds_add_up_to_the_step_and_the_gpu_is_as_long_as_its_kernels(llama: Any) -> None:
    time = llama.time
    assert set(time.kinds) == set(KINDS)
    assert sum(one.seconds for one in time.kinds.values()) == pytest.approx(time.gpu)
    assert time.seconds == pytest.approx(time.gpu + time.waiting, rel=1e-3)
    assert sum(one.launches for one in time.kinds.values()) >= len(llama.recorded.launches)
    assert len(time.layers) == LAYERS
    # a launch-bound model: the host is slower than the GPU
    assert time.bound == "host"
    assert llama.tokens_per_second == T / time.seconds


def test_a_shorter_sample_attends_to_less(tmp_path: Path) -> None:
    found = recorded(recipe(tmp_path, "llama"), sample=128)
    assert found.time.kinds[ATTENTION].flops == LAYERS * 3.5 * 4 * D * HEADS * (T // 128) * (128 * 129 // 2)


def test_float8_products_take_their_own_rate(tmp_path: Path, llama: Any) -> None:
    """Every frozen product of a layer but nothing else, at the same FLOPs, with fused feed-forward layers."""
    found = recorded(recipe(tmp_path, "llama", precision={"compute": "bf16", "linear": "fp8"}))
    products = [launch for launch in found.recorded.launches if launch.op == "aten::_scaled_mm"]
    assert len(products) == LAYERS * 14 - 3  # the first layer's query, key and value have no input's gradient
    assert {launch.cost.dtype for launch in products} == {torch.float8_e4m3fn}
    assert sum(launch.cost.flops for launch in products) == llama.time.kinds[GEMM].flops == found.time.kinds[GEMM].flops
    assert f"{LAYERS} feed-forward layers" in found.recorded.fused


def test_float8_training_has_three_products_of_each_weight_and_its_roundings(tmp_path: Path) -> None:
    asked = {"precision": {"compute": "bf16", "linear": "fp8"}, "adapter": {"type": "none"}}
    found = recorded(recipe(tmp_path, "llama", **asked))
    weights = H * HEADS * D * 2 + 2 * H * GROUPS * D + 3 * H * M
    products = [launch for launch in found.recorded.launches if launch.op == "aten::_scaled_mm"]
    assert len(products) == LAYERS * 3 * 7
    assert {(launch.kind, launch.cost.dtype) for launch in products} == {(GEMM, torch.float8_e4m3fn)}
    assert sum(launch.cost.flops for launch in products) == LAYERS * 3 * 2 * T * weights == found.time.kinds[GEMM].flops
    rounded = [one for one in found.recorded.launches if one.op == "aten::exp2"]  # of a scale
    assert len(rounded) == LAYERS * 3 * 7 * 2
    assert {launch.kind for launch in rounded} == {COPIES}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
PADDED = {"train": "builtin:python-docs", "max_length": T, "packing": False}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {"adapter": {"type": "none"}}),
    "qwen3": (
        "qwen3",
        {},
        {"training": {"output_dir": "run", "per_device_train_batch_size": 1, "gradient_checkpointing": True}},
    ),
    "gemma": ("gemma", {}, {"data": PADDED}),
    "mistral": ("mistral", {"sliding_window": 128}, {}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "llama3": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE},
        {},
    ),  # its frequencies are computed and copied when it is made
    "qwen3_next": (
        "qwen3_next",
        {
            **LINEAR_SIZES,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
        {},
    ),
    "phi3": ("phi3", {}, {}),
    "glm4": ("glm4", {}, {}),
    "nemotron_h": (
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M-*-",
            **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2},
        },
        {},
    ),
    "qwen3_5": ("qwen3_5_text", {**LINEAR_SIZES, "num_hidden_layers": 4}, {}),
    # its norms of values have no weight
    "gemma4": ("gemma4_text", {"vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 32}, {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_each_family_runs_without_a_gpu(name: str, tmp_path: Path) -> None:
    kind, sizes, keys = FAMILIES[name]
    found = recorded(recipe(tmp_path, kind, sizes=sizes, **keys), sample=128 if name == "gpt_oss" else None)
    assert len(found.recorded.launches) > 100
    kinds = {launch.kind for launch in found.recorded.launches}
    assert {GEMM, ATTENTION, NORM, HEAD, OPTIMIZER} <= kinds
    assert (LINEAR in kinds) == (name in ("qwen3_next", "qwen3_5", "nemotron_h"))
    if name in ("phi3", "glm4"):  # gate and up in one product
        assert f"{LAYERS} feed-forward layers" in found.recorded.fused
    if name in ("nemotron_h", "qwen3_5"):
        gated = [one for one in found.recorded.launches if one.op.startswith("halftune::gated_rms_norm")]
        assert len(gated) == 2 * int(found.recorded.fused.partition(" gated norms")[0].rpartition(" ")[2]) > 0
    if name == "mistral":
        pairs = visible(T, T, causal=True, window=128)
        assert found.time.kinds[ATTENTION].flops == LAYERS * 3.5 * 4 * D * HEADS * pairs
    if name == "gpt_oss":  # flex attention; a window in every other layer, from the first on
        samples = T // 128
        pairs = [samples * visible(128, 128, causal=True, window=window) for window in (64, None, 64)]
        assert found.time.kinds[ATTENTION].flops == 3.5 * 4 * D * HEADS * sum(pairs)
        assert {launch.cost.rate for launch in found.recorded.launches} == {"", "flex", "flex/backward"}
    if name == "qwen3":  # each layer's forward pass runs again in the backward pass
        assert found.time.kinds[ATTENTION].flops == LAYERS * 4.5 * 4 * D * HEADS * (T * (T + 1) // 2)


@pytest.mark.parametrize(("method", "passes"), [("sft", 1), ("orpo", 3)])
def test_a_trained_head_takes_many_rows_at_a_time(method: str, passes: int, tmp_path: Path) -> None:
    """As many as 1 GiB of logits in fp32; log-probabilities are read, made again and read, and become gradients."""
    words, data = 1_000_000, "builtin:python-pairs" if method == "orpo" else "builtin:python-docs"
    keys = {"adapter": {"type": "none"}, "method": method, "data": {"train": data, "max_length": T, "packing": True}}
    found = recorded(recipe(tmp_path, "llama", sizes={"vocab_size": words}, **keys)).recorded
    chunks = -(-found.trained // (2**30 // (4 * words)))
    assert sum(one.op == "halftune::cross_entropy_" for one in found.launches) == chunks * passes > passes


def test_a_tied_head_is_one_weight(tmp_path: Path) -> None:
    found = {}
    for tied in (False, True):
        (folder := tmp_path / str(tied)).mkdir()
        made = recipe(folder, "llama", sizes={"tie_word_embeddings": tied}, adapter={"type": "none"})
        found[tied] = recorded(made).time.kinds[OPTIMIZER].bytes
    updated = 7 * 4 * H * V  # weight and moments are read and written, the gradient is read
    assert found[False] - found[True] >= updated


@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_expects_the_peak_of_full_fine_tuning_with_checkpointing(tied: bool, tmp_path: Path) -> None:
    """Where weights, gradients and moments decide, and the two gradients of a tied embedding."""
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "gradient_checkpointing": True}
    sizes = {"tie_word_embeddings": tied, "vocab_size": 64_000, "hidden_size": 1024, "intermediate_size": 4096}
    sizes["num_hidden_layers"] = 12
    path = recipe(tmp_path, "llama", sizes=sizes, adapter={"type": "none"}, training=training)
    loaded, hardware = load_config(path), lookup("h200")
    plan = resolve(loaded.run, hardware, run_facts(loaded.run))
    found = profile(loaded.run, plan, hardware).recorded.peak
    assert plan.memory.total - plan.memory.overhead == pytest.approx(found, rel=0.02), tied


def test_no_weight_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models draw again until all values are in range, which values of fake tensors never are."""

    def draw(*_: Any) -> None:
        raise AssertionError("weights are drawn")

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", draw)
    assert recorded(recipe(tmp_path, "llama")).recorded.launches


def test_noise_on_embeddings_is_part_of_the_step(tmp_path: Path, llama: Any) -> None:
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "neftune_alpha": 5.0}
    noisy = recorded(recipe(tmp_path, "llama", training=training))
    assert any(one.op == "aten::uniform_" for one in noisy.recorded.launches)
    assert len(noisy.recorded.launches) > len(llama.recorded.launches)


def test_a_known_reference_spares_its_forward_pass(tmp_path: Path) -> None:
    keys = {"method": {"type": "dpo"}, "data": {"train": "builtin:python-pairs", "max_length": T, "packing": True}}
    runs = {}
    for reference in ("adapter_off", "precomputed"):
        (tmp_path / reference).mkdir()
        method = {"type": "dpo", "reference": reference}
        runs[reference] = recorded(recipe(tmp_path / reference, "llama", **{**keys, "method": method}))
    flops = {name: run.time.kinds[ATTENTION].flops for name, run in runs.items()}
    assert flops["adapter_off"] * 3.5 == flops["precomputed"] * 4.5
    assert [len(run.recorded.syncs) for run in runs.values()] == [1, 1]


@pytest.mark.parametrize(("rank", "padded"), [(RANK, RANK), (3, 8)])
def test_experts_multiply_their_tokens_and_read_each_weight_once(tmp_path: Path, rank: int, padded: int) -> None:
    experts, each, m = 8, 2, 64
    sizes = {"num_experts": experts, "num_experts_per_tok": each, "moe_intermediate_size": m}
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = {"type": "lora", "rank": rank, "target_modules": [], "target_parameters": names}
    found = recorded(recipe(tmp_path, "qwen3_moe", sizes=sizes, adapter=adapter))
    calls = [one for one in found.recorded.launches if one.op == "aten::_grouped_mm"]
    base, low = ([one for one in calls if one.kind == kind] for kind in (GEMM, LORA))
    rows, up, down = T * each, (H, 2 * m), (m, H)
    weights, sides = H * 2 * m + m * H, sum(up) + sum(down)
    # forward and the gradient of the input, which the first layer's lacks where its attention is not adapted
    assert sum(one.cost.flops for one in base) == 2 * rows * (2 * LAYERS * weights - H * 2 * m)
    assert sum(one.cost.flops for one in low) == 2 * rows * padded * (3 * LAYERS * sides - H)
    forward = {(one.cost.read, one.cost.written) for one in base if not one.backward}
    assert forward == {(2 * (rows * i + experts * i * o) + 4 * experts, 2 * rows * o) for i, o in (up, down)}
    assert not any(one.op.endswith("baddbmm") for one in found.recorded.launches)


@pytest.mark.parametrize(("rows", "read"), [(64, 4), (4, 4), (3, 3)])
def test_an_expert_without_a_row_is_not_read(gpu: Recorder, rows: int, read: int) -> None:
    x, weights, offsets = empty(rows, 32), empty(4, 32, 16), torch.zeros(4, dtype=torch.int32).to(CUDA)
    expected = 2 * (rows * 32 + read * 32 * 16) + 16, 2 * rows * 16
    assert cost(gpu, lambda: torch.nn.functional.grouped_mm(x, weights, offs=offsets)) == expected


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    recorder = Recorder()
    with fake_cuda(recorder, lookup("a100").devices[0]):
        yield recorder


def cost(recorder: Recorder, call: Any) -> tuple[int, int]:
    """Bytes read and written by the last launch of a call."""
    with recorder.recording():
        call()
    last = recorder.launches[-1].cost
    return last.read, last.written


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


N = 64 * 32


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, _: x + x, (2 * N, 2 * N)),  # the same operand once
        (lambda x, y: x + y, (4 * N, 2 * N)),
        (lambda x, y: x.add_(y), (4 * N, 2 * N)),
        (lambda x, y: x.copy_(y), (2 * N, 2 * N)),
        (lambda x, _: x.zero_(), (0, 2 * N)),
        (lambda x, _: x.float(), (2 * N, 4 * N)),
        (lambda x, _: x * empty(32), (2 * N + 64, 2 * N)),
        (lambda x, _: x + empty(64, 1).expand(64, 32), (2 * N + 128, 2 * N)),  # broadcast: its own storage
        (lambda x, _: x[:, ::2] * 2, (N, N)),  # a view reads its own elements
        (lambda x, _: x.t().contiguous(), (2 * N, 2 * N)),
        (lambda x, _: x.sum(0), (2 * N, 64)),
        (lambda x, y: torch.add(x, y, out=empty(64, 32)), (4 * N, 2 * N)),
        (lambda x, _: x @ empty(32, 16), (2 * N + 2 * 32 * 16, 2 * 64 * 16)),
        (lambda x, y: torch.cat([x, y]), (4 * N, 4 * N)),
        (lambda x, _: torch.nn.functional.embedding(torch.zeros(5, dtype=torch.long).to(CUDA), x), (40 + 320, 320)),
        (lambda x, _: x[torch.arange(3).to(CUDA)], (24 + 192, 192)),
    ],
)  # fmt: skip
def test_bytes_are_those_of_memory(gpu: Recorder, call: Any, expected: tuple[int, int]) -> None:
    x, y = empty(64, 32), empty(64, 32)
    assert cost(gpu, lambda: call(x, y)) == expected


def test_views_and_allocations_launch_nothing(gpu: Recorder) -> None:
    x = empty(64, 32)
    with gpu.recording():
        x.view(32, 64).t()[3:].unsqueeze(0).detach()
        torch.empty_like(x)
        x.to(BF16).to(x.device)
    assert gpu.launches == []
    assert touched(empty(1, 8).expand(100, 8)) == 16


def test_fused_adamw_reads_gradients_and_changes_the_rest(gpu: Recorder) -> None:
    weights = [torch.nn.Parameter(empty(64, 32, dtype=torch.float32)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for _ in range(2):
        for weight in weights:
            weight.grad = empty(64, 32, dtype=torch.float32)
        with gpu.recording():
            optimizer.step()
    found = next(one.cost for one in gpu.launches if "adamw" in one.op)
    steps = 3 * 4
    assert (found.read, found.written) == (3 * 4 * 4 * N + steps, 3 * 3 * 4 * N)
    assert found.launches == 1


WAITS = {
    "item": lambda x, i: x.sum().item(),
    "bool": lambda x, i: bool((i > 1).any()),
    "tolist": lambda x, i: i.tolist(),
    "nonzero": lambda x, i: (i > 1).nonzero(),
    "masked_select": lambda x, i: torch.masked_select(i, i > 1),
    "mask": lambda x, i: i[i > 1],
    "unique": lambda x, i: i.unique(),
    "cpu": lambda x, i: i.cpu(),
    "float": lambda x, i: float(x[0, 0]),
    "synchronize": lambda x, i: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_planted_waits_are_found_with_their_line(gpu: Recorder, name: str) -> None:
    x, numbers = empty(4, 4), torch.arange(5).to(CUDA)
    with gpu.recording():
        WAITS[name](x, numbers)
    assert len(gpu.syncs) == 1
    assert "test_paper.py" in gpu.syncs[0].line


def test_values_of_integers_are_known_and_floats_read_as_ones(gpu: Recorder) -> None:
    numbers = torch.arange(5).to(CUDA)
    assert (numbers * 2)[numbers > 2].tolist() == [6, 8]
    assert numbers.cumsum(0)[-1].item() == 10
    assert empty(3).sum().item() == 1.0
    assert bool(torch.isfinite(empty(3).sum()))
    assert numbers.to("cpu").tolist() == [0, 1, 2, 3, 4]
    with gpu.recording():
        torch.arange(4).tolist()
        torch.zeros(2).to("cuda", non_blocking=True)
    assert gpu.syncs == []


def test_autocast_casts_by_cudas_rules(gpu: Recorder) -> None:
    x, w = empty(4, 4, dtype=torch.float32), empty(4, 4, dtype=torch.float32)
    with torch.autocast("cuda", dtype=BF16):
        assert (x @ w).dtype == BF16
        assert torch.softmax(x.to(BF16), -1).dtype == torch.float32
    assert (x @ w).dtype == torch.float32


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys", "window"), [(5, 5, None), (3, 7, None), (7, 7, 3), (1, 9, 4), (9, 9, 20)])
def test_visible_pairs_are_those_of_the_mask(queries: int, keys: int, window: int | None, causal: bool) -> None:
    if not causal and queries != keys and window is not None:
        pytest.skip("towers attend to themselves")
    at = torch.arange(queries)[:, None] + keys - queries
    distance = at - torch.arange(keys)
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    mask &= distance < (window or keys)
    if causal:
        assert visible(queries, keys, causal=True, window=window) == int(mask.sum())
    elif window is None:
        assert visible(queries, keys, causal=False, window=None) == queries * keys


def launch(seconds: float, roofline: Roofline) -> Launch:
    """A launch whose traffic takes that long."""
    made = partial(Launch, "aten::mul", NORM, "", None, False)
    found = cost_of(torch.ops.aten.mul.Tensor, (torch.ones(1), torch.ones(1)), {}, torch.ones(1), lambda _: None)
    return made(type(found)(round(seconds * roofline.bandwidth), 0), 0)


def test_the_timeline_waits_for_the_slower_of_host_and_gpu() -> None:
    roofline = ROOFLINES[0]
    slow, fast = launch(1e-3, roofline), launch(roofline.kernel, roofline)
    busy = timeline([slow] * 4, [], 0, roofline, tf32=False)
    assert busy.seconds == pytest.approx(4e-3 + HOST_LAUNCH, rel=1e-6)
    starved = timeline([fast] * 100, [], 0, roofline, tf32=False)
    assert starved.seconds == pytest.approx(100 * HOST_LAUNCH + roofline.kernel, rel=1e-6)
    assert starved.bound == "host"
    waited = timeline([slow] * 4, [Sync("item", "", 2, 2)], 3, roofline, tf32=False)
    assert waited.seconds == pytest.approx(4e-3 + 2 * HOST_LAUNCH + HOST_SYNC, rel=1e-6)
    late = timeline([slow] * 4, [Sync("event", "", 2, 0)], 0, roofline, tf32=False)
    assert late.seconds == pytest.approx(4e-3 + HOST_LAUNCH, rel=1e-6)
    assert HOST_CALL < HOST_LAUNCH


def test_every_gpu_of_the_table_is_found_by_its_name() -> None:
    names = {"h200": "H200", "h100": "H100", "a100": "A100", "rtx4090": "RTX 4090", "t4": "T4"}
    for name, expected in names.items():
        found = roofline_of(lookup(name).devices[0].name)
        assert found is not None
        assert found.name == expected
    assert roofline_of(lookup("m2").devices[0].name) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_drivers_names_are_known_but_not_those_of_parts_and_variants(name: str, expected: str | None) -> None:
    found = roofline_of(name)
    assert (found and found.name) == expected


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1}))
    words = ["--config", path, "precision=fp16", "training.max_steps=700"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--paper", "--hardware", "t4", *words])
    assert ended.value.code == 0
    assert "700 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--paper", "--hardware", "h100", "--config", path, "--json", "--sample-length", "64"])
    assert ended.value.code == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["measured"] is False
    assert found["sample_tokens"] == 64
    assert found["tokens_per_second"] == pytest.approx(found["tokens_per_step"] / found["step_seconds"])
    assert set(found["kinds"]) == set(KINDS)


@pytest.mark.parametrize(
    ("machine", "keys", "code"),
    [
        ("mi300x", {}, "bench.no_roofline"),
        ("h200", {"attention": "flex", "data": PADDED}, "bench.paper_unsupported"),
        ("h200", {"training": {"output_dir": "run", "torch_compile": True}}, "bench.paper_unsupported"),
    ],
)
def test_what_cannot_be_predicted_is_refused(machine: str, keys: dict[str, Any], code: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refused:
        recorded(recipe(tmp_path, "llama", **keys), machine)
    assert refused.value.code == code


def test_options_that_do_not_belong_together(tmp_path: Path) -> None:
    import argparse

    from halftune.cli.verbs.bench import add_arguments, run  # the verb without its parser's exit

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for words in (["--paper"], ["--hardware", "h200"], ["--sample-length", "8"]):
        with pytest.raises(HalftuneError) as refused:
            run(parser.parse_args(["--config", "x.yaml", *words]))
        assert isinstance(refused.value, ConfigError)
        assert refused.value.code == "cli.option_conflict"


def test_recording_leaves_torch_as_it_was(llama: Any) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    assert float(x.grad.sum()) == 16.0
    assert not torch.is_autocast_enabled("cuda")
