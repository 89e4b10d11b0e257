"""``bench --paper``: time and money of the whole run, MFU, modules, warnings; machines that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_paper import GROUPS, HEADS, LAYERS, RANK, D, H, M, T, V, recipe
from test_paper_checks import run

from halftune.bench.paper.report import profile
from halftune.bench.paper.timeline import seconds_of
from halftune.bench.peak import listed_peak
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.core.choice import Format
from halftune.hardware.catalogue import CATALOGUE, lookup
from halftune.hardware.roofline import ROOFLINES, roofline_of
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve

HOUR, MILLION = 3600, 1e6


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))


def of_epochs(folder: Path, *, packing: bool) -> tuple[Path, list[int]]:
    """A recipe of two epochs over a file of texts, and the number of tokens of each."""
    model = {"name_or_path": str(folder), "tokenizer": "builtin:qwen2-tiny"}
    texts = ["one two three", "a longer sentence of some words", "short", "another one of them"]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"train": str(rows), "max_length": T, "packing": packing}
    training = {
        "output_dir": str(folder.with_name(f"{folder.name}-run")),
        "per_device_train_batch_size": 1,
        "num_train_epochs": 2,
    }
    path = recipe(folder, "llama", model=model, data=data, training=training, method={"type": "pretrain"})
    tokenizer = load_tokenizer(load_config(path).run.model)
    return path, [len(tokenizer(text)["input_ids"]) + 1 for text in texts]  # and an end token


@pytest.mark.parametrize("packing", [True, False])
def test_a_run_of_epochs_has_its_time_and_its_price(
    packing: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lengths = of_epochs(tmp_path, packing=packing)
    words = ("bench", "--paper", "--config", str(path), "--hardware", "h200", "--price", "3")
    (found,) = json.loads(run(capsys, *words, "--json")[1])["results"]
    fed = sum(lengths) if packing else sum(-(-length // 8) * 8 for length in lengths)
    assert found["run"]["tokens"] == pytest.approx(2 * fed)
    assert found["run"]["seconds"] == pytest.approx(2 * fed / found["tokens_per_second"])
    assert found["run"]["price"] == pytest.approx(2 * fed / MILLION * found["price_per_million_tokens"])
    assert found["warnings"]  # the tokenizer is too large for the model
    said = run(capsys, *words)[1]
    assert f"{fed:,} tokens" in said
    assert all(warning in said for warning in found["warnings"])


def test_what_is_not_here_leaves_the_length_of_the_run_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1})  # without a tokenizer
    words = ("bench", "--paper", "--config", str(path), "--hardware", "h200", "--price", "3", "--json")
    (found,) = json.loads(run(capsys, *words)[1])["results"]
    assert found["run"] == {"tokens": None, "seconds": None, "price": None}
    (found,) = json.loads(run(capsys, *words, "training.max_steps=7")[1])["results"]
    assert found["run"]["tokens"] == 7 * T
    assert found["run"]["price"] == pytest.approx(found["run"]["seconds"] / HOUR * 3)


def test_utilisation_is_that_of_the_models_operations_and_modules_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, "llama")
    (found,) = json.loads(run(capsys, "bench", "--paper", "--config", str(path), "--hardware", "h100", "--json")[1])[
        "results"
    ]
    q, kv = HEADS * D, GROUPS * D
    sides = [(H, q), (H, kv), (H, kv), (q, H), (H, M), (H, M), (M, H)]
    norms = (2 * LAYERS + 1) * H
    weights = LAYERS * sum(a * b for a, b in sides) + norms
    adapters = LAYERS * sum(RANK * (a + b) for a, b in sides)
    labelled = (T - 1) / T  # the first token is predicted by none
    token = 4 * weights + 6 * adapters + 12 * LAYERS * HEADS * D * T + labelled * 4 * H * V
    assert found["flops_per_second"] == pytest.approx(token * found["tokens_per_second"])
    assert found["mfu"] == pytest.approx(found["flops_per_second"] / 989e12)
    modules = found["modules"]
    assert "model.layers.*.mlp" in modules
    assert not any(part.isdigit() for name in modules for part in name.split("."))
    for key in ("launches", "seconds", "flops", "bytes"):
        assert sum(one[key] for one in modules.values()) == pytest.approx(
            sum(one[key] for one in found["kinds"].values())
        )


@pytest.mark.parametrize("machine", ["h100x8", "a100+t4", "8xh100"])
def test_a_machine_of_several_gpus_is_refused(machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recipe(tmp_path, "llama"))
    code, said = run(capsys, "bench", "--paper", "--config", path, "--hardware", machine, "--price", "20", "--json")
    assert (code, json.loads(said)["error"]["code"]) == (2, "bench.paper_unsupported")


def test_a_refused_machine_leaves_the_others_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1}))
    words = ("bench", "--paper", "--config", path, "--json", "--hardware")
    code, said = run(capsys, *words, "h100,h100x8,mi300x", "--price", "3,24,2")
    known, several, unknown = json.loads(said)["results"]
    assert code == 0
    assert known["tokens_per_second"] > 0
    assert [one["error"]["code"] for one in (several, unknown)] == ["bench.paper_unsupported", "bench.no_roofline"]
    code, said = run(capsys, *words, "mi300x,h100x8")
    assert code == 2
    assert [one["error"]["code"] for one in json.loads(said)["results"]] == [
        "bench.no_roofline",
        "bench.paper_unsupported",
    ]


def test_every_gpu_with_tensor_cores_has_rates_below_its_peaks() -> None:
    devices = {name: machine.devices[0] for name, machine in CATALOGUE.items() if machine.devices[0].kind == "cuda"}
    found = {name: roofline_of(device.name) for name, device in devices.items()}
    assert {name for name, row in found.items() if row is None} == {"p100", "gtx1660"}
    assert {row.name for row in found.values() if row is not None} == {row.name for row in ROOFLINES}
    for name, row in found.items():
        if row is None:
            continue
        device = devices[name]
        assert device.capability is not None
        assert ("bf16" in row.gemm) == (device.capability >= (8, 0))
        assert "fp8" not in row.gemm or device.capability >= (8, 9)
        half: Format = "bf16" if "bf16" in row.gemm else "fp16"
        rates = {listed_peak(device.name, half, tf32=False): row.gemm[half]}
        if "tf32" in row.gemm:
            rates[listed_peak(device.name, "fp32", tf32=True)] = row.gemm["tf32"]
        for peak, rate in rates.items():
            assert peak is not None
            assert 0.4 * peak.flops < rate < peak.flops
        assert all(rate < row.gemm["fp16"] for pair in row.attention.values() for rate in pair)


def test_an_a100_of_40_gb_has_its_own_bandwidth() -> None:
    small, large = (roofline_of(lookup(name).devices[0].name) for name in ("a100-40", "a100"))
    assert small is not None
    assert large is not None
    assert small.bandwidth / large.bandwidth == pytest.approx(1.555 / 2.039, rel=0.01)
    assert small.gemm == large.gemm
    assert roofline_of("NVIDIA A100-SXM4-40GB") == small


@pytest.mark.parametrize(
    ("machine", "package", "kernel"),
    [
        ("h100", {"flash-attn-3": "3"}, "fa3"),
        ("b200", {"flash-attn-4": "4.0.0"}, "fa4"),
        ("a100", {"flash-attn": "2.8.3"}, "fa2"),
    ],
)
def test_described_flash_attention_need_not_be_installed(
    machine: str, package: dict[str, str], kernel: str, tmp_path: Path
) -> None:
    """The step is that of torch's FlashAttention-2 with another kernel: with a window in the model, too."""
    config = load_config(recipe(tmp_path, "mistral", sizes={"sliding_window": 128, "num_hidden_layers": 1})).run
    found: list[Any] = []
    for packages in (None, package):
        hardware = lookup(machine, packages)
        found.append(profile(config, resolve(config, hardware, run_facts(config)), hardware))
    own, described = ([one.cost for one in each.recorded.launches if one.cost.rate] for each in found)
    assert [one.rate for one in own] == ["fa2", "fa2/backward"]
    assert [one.rate for one in described] == [kernel, f"{kernel}/backward"]
    for ours, theirs in zip(own, described, strict=True):
        assert ours.flops == theirs.flops > 0
        assert (ours.launches, ours.dtype) == (theirs.launches, theirs.dtype)
        assert ours.read + ours.written == pytest.approx(theirs.read + theirs.written, rel=0.01)
    assert found[0].recorded.peak == pytest.approx(found[1].recorded.peak, rel=0.01)


def test_float8_rounds_and_adds_up_at_rates_of_their_own(tmp_path: Path) -> None:
    training = {"output_dir": "run", "per_device_train_batch_size": 1, "gradient_checkpointing": True}
    asked = {"precision": {"compute": "bf16", "linear": "fp8"}, "training": training}
    path = recipe(tmp_path, "llama", sizes={"num_hidden_layers": 1}, **asked)
    config, hardware = load_config(path).run, lookup("h200")
    row = roofline_of(hardware.devices[0].name)
    assert row is not None
    made = profile(config, resolve(config, hardware, run_facts(config)), hardware).recorded.launches
    products = [one for one in made if one.op == "aten::_scaled_mm"]
    # of each weight: forward, again in the backward pass, and the input's gradient, which adds up in fp32
    assert len(products) == 3 * 7
    assert sum(one.cost.exact for one in products) == sum(one.cost.exact for one in made) == 7
    for one in (products[0], next(one for one in products if one.cost.exact)):
        large = replace(one, cost=replace(one.cost, flops=1e15))
        rate = row.gemm["fp8"] * (row.exact if one.cost.exact else 1.0)
        assert seconds_of(large, row, tf32=False) == pytest.approx(1e15 / rate)
    rounded = [one for one in made if "float8_rows" in one.op]
    assert rounded
    moved = replace(rounded[0], cost=replace(rounded[0].cost, read=2 * 10**9, written=10**9))
    assert seconds_of(moved, row, tf32=False) == pytest.approx(3e9 / (row.rounding * row.bandwidth))
    gated = next(one for one in made if one.op == "halftune::adapted_activation")
    moved = replace(gated, cost=replace(gated.cost, read=2 * 10**9, written=10**9))
    assert seconds_of(moved, row, tf32=False) == pytest.approx(3e9 / (row.gated * row.bandwidth))
    assert max(row.exact, row.rounding, row.gated) < 1
