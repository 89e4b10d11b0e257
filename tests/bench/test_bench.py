"""``halftune bench``: what it counts, what it compares, what it says when a run fails; and one real measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from halftune.bench import compare
from halftune.bench.compare import BenchError, Case, cases, medians_of
from halftune.bench.flops import training_flops
from halftune.bench.measured import attended, measure, rates
from halftune.bench.meter import Step
from halftune.bench.peak import peak_flops
from halftune.bench.table import text
from halftune.bench.tower_flops import tower_flops
from halftune.cli import main
from halftune.config.facts.model import facts_from_config, read_model_facts
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ConfigError, PlanError
from halftune.core.processes.process import Process

TINY = ModelSection(name_or_path="builtin:qwen2-tiny")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "data": {"train": "rows.jsonl", "max_length": 64, "eval_split": 2},
        "training": {
            "output_dir": "run",
            "per_device_train_batch_size": 4,
            "warmup_steps": 2,
            "max_steps": 5,
            "load_best": True,
        },
        "logging": {"sample_prompts": ["hi"], "profile": 2},
    }
    rows = [{"prompt": f"one and {number}", "completion": "three four five"} for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_flops_of_full_training_are_palms() -> None:
    facts = read_model_facts(TINY)
    found = training_flops(facts, facts.num_parameters, adapter=False, attended=100.0)
    head = 4096 * 192
    assert found.head == 6 * head
    assert found.body == 6 * (facts.num_parameters - head)
    assert found.attention == 12 * 4 * 6 * 32 * 100
    # all tokens trained: PaLM's number for the whole model
    assert found.per_second(10, 10, 2.0) == pytest.approx(5 * (6 * facts.num_parameters + found.attention))


def test_flops_agree_with_torchs_own_count() -> None:
    """Forward and backward of the real model, counted by torch's FlopCounterMode; attention in plain matmuls."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from halftune.config.builtin_models import BUILTIN_MODELS

    config = AutoConfig.for_model(**BUILTIN_MODELS["qwen2-tiny"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(3, 4000, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    facts = read_model_facts(TINY)
    ours = training_flops(facts, facts.num_parameters, adapter=False, attended=64.0).per_second(128, 128, 1.0)
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.01)  # biases and norms are weights, not products


def test_frozen_weights_have_no_gradients_and_experts_are_counted_as_routed() -> None:
    facts = read_model_facts(TINY)
    frozen = training_flops(facts, 1000, adapter=True, attended=10.0)
    assert frozen.body == 4 * (facts.num_parameters - 4096 * 192) + 6000
    assert frozen.head == 4 * 4096 * 192
    raw = {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    moe = facts_from_config(raw, "moe")
    experts = 2 * 8 * 3 * 64 * 32
    found = training_flops(moe, moe.num_parameters, adapter=False, attended=1.0)
    assert found.body == 6 * (moe.num_parameters - experts * 6 // 8 - 2 * 256 * 64)
    assert "2 of 8 experts" in found.convention


@pytest.mark.parametrize(
    ("name", "compute", "tf32", "teraflops"),
    [
        ("NVIDIA H200", "bf16", False, 989),
        ("NVIDIA H200", "fp32", True, 495),
        ("NVIDIA H200", "fp32", False, 67),
        ("NVIDIA H100 PCIe", "bf16", False, 756),
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989),
        ("NVIDIA A100-SXM4-80GB", "fp16", False, 312),
        ("NVIDIA A10G", "bf16", False, 70),
        ("Tesla T4", "fp16", False, 65),
        ("NVIDIA L4", "bf16", False, 121),
        ("NVIDIA L40S", "bf16", False, 362),
    ],
)
def test_peaks_of_known_devices(name: str, compute: Any, tf32: bool, teraflops: float) -> None:
    found = peak_flops(torch.device("cuda"), name, compute, tf32=tf32)
    assert found.flops == teraflops * 1e12
    assert name in found.source


def test_a_cpu_is_measured() -> None:
    found = peak_flops(torch.device("cpu"), "any", "fp32", tf32=False)
    assert found.flops > 1e9
    assert "measured" in found.source


def test_rates() -> None:
    steps = [Step(2.0, 1.0, 100, 80, 40), Step(4.0, 3.0, 200, 160, 80)]
    found = rates(steps)
    assert found["tokens_per_second"] == 50
    assert found["real_per_cpu_second"] == 60
    assert found["trained_per_second"] == 20
    assert (found["step_seconds_p10"], found["step_seconds"], found["step_seconds_p90"]) == (2.2, 3.0, 3.8)


def test_a_token_sees_its_own_sample() -> None:
    """The mean over tokens: of samples of 10 and 30 tokens, three tokens in four see 30."""
    run: Any = SimpleNamespace(data=SimpleNamespace(train=SimpleNamespace(lengths=np.array([10, 30], np.int32))))
    assert attended(run) == 25


def test_cases(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cases([str(recipe)], ["training.seed=1"], ["precision=bf16 attention=sdpa", "data.packing=false"])
    assert [case.label for case in found] == ["recipe.yaml", "precision=bf16 attention=sdpa", "data.packing=false"]
    assert found[1].overrides == ("training.seed=1", "precision=bf16", "attention=sdpa")
    with pytest.raises(ConfigError, match="packin"):
        cases([str(recipe)], [], ["data.packin=false"])
    for mine in ("training.max_steps=50", "training.output_dir=here", "logging.profile=3"):
        with pytest.raises(ConfigError, match=f"bench sets {mine.partition('=')[0]} "):
            cases([str(recipe)], [], [f"training.seed=2 {mine}"])
    monkeypatch.setattr("halftune.bench.compare.this_process", lambda: Process(world_size=2, launched=True))
    with pytest.raises(PlanError, match="single process"):
        cases([str(recipe)], [], [])


def test_comparison_takes_turns_and_divides_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order, numbers = [], iter([10.0, 30.0, 20.0, 60.0, 12.0, 24.0])

    def fake(case: Case, *, steps: int, warm_up: int) -> dict[str, Any]:
        order.append(case.label)
        return {"mfu": next(numbers), "packing": True, "device": "x"}

    monkeypatch.setattr(compare, "measure", fake)
    chosen = [Case("a", "a.yaml", ()), Case("b", "a.yaml", ("precision=bf16",))]
    found = compare.compare(chosen, steps=1, warm_up=1, repeat=3, tell=lambda line: None)
    assert order == ["a", "b"] * 3
    assert [case["median"] for case in found] == [{"mfu": 12.0}, {"mfu": 30.0}]
    assert [case["ratio"] for case in found] == [{"mfu": 1.0}, {"mfu": 2.5}]


@pytest.mark.slow
def test_a_real_measurement(recipe: Path, tmp_path: Path) -> None:
    """In this process, with the overrides of the command: only steps, in the scratch folder."""
    own = {**compare.OWN, compare.FOLDER: str(tmp_path / "scratch")}
    overrides = [f"{key}={value}" for key, value in own.items()]
    found = measure({"config": str(recipe), "overrides": overrides, "steps": 3, "warm_up": 2})
    assert len(found["steps"]) == 5
    assert found["tokens_per_second"] >= found["real_per_second"] > found["trained_per_second"] > 0
    assert 0 < found["mfu"] < 1.5
    assert found["peak_rss_bytes"] > 2**26
    assert found["cpu_seconds_to_first_step"] > found["steps"][0]["cpu_seconds"] > 0
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "scratch" / "final").exists()
    assert not list((tmp_path / "scratch").glob("checkpoint-*"))
    runs = [found, found]
    result = {"label": "recipe.yaml", "median": medians_of(runs), "ratio": {}, "runs": runs}
    shown = text([result, {**result, "label": "again", "ratio": {"mfu": 1.0}}], steps=3, warm_up=2)
    assert "1.00×" in shown
    assert "4N + 6·adapter" in shown


@pytest.mark.slow
def test_the_towers_of_a_real_measurement(recipe: Path, tmp_path: Path) -> None:
    """Patterns are pictures of 8 x 8 patches, one a row."""
    own = {**compare.OWN, compare.FOLDER: str(tmp_path / "scratch")}
    tree = {
        "model": {"name_or_path": "builtin:qwen2_5_vl-tiny", "train": {"vision": "lora"}},
        "adapter": "lora",
        "data": {"train": "builtin:patterns", "images": True, "packing": False, "max_length": 128},
        "training": {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 2},
    }
    recipe.write_text(yaml.safe_dump(tree))
    overrides = [f"{key}={value}" for key, value in own.items()]
    found = measure({"config": str(recipe), "overrides": overrides, "steps": 2, "warm_up": 1})
    config = RunConfig.model_validate(tree)
    fed = {"pixel_values": torch.empty(2 * 64, 1), "image_grid_thw": torch.tensor([[1, 8, 8]] * 2)}
    assert found["tower_flops_per_step"] == tower_flops(read_model_facts(config.model), config, fed) > 0
    assert found["flops_per_second"] * found["step_seconds"] > found["tower_flops_per_step"]


def test_what_the_command_says_of_mistakes(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["bench", *arguments])
        code = left.value.code
        assert isinstance(code, int)
        return code, capsys.readouterr().err

    code, said = leave()
    assert code == 2
    assert said.endswith("[cli.no_recipe]\n")
    code, said = leave("--config", str(recipe), "--steps", "0")
    assert code == 2
    assert "≥ 1" in said
    code, said = leave("--config", str(recipe), "training.max_stepz=3")
    assert code == 2
    assert "max_steps" in said

    def failing(command: list[str], **_: Any) -> Any:
        Path(command[-1]).write_text(json.dumps({"error": "no label anywhere", "exit_code": 5}))
        return type("Done", (), {"returncode": 5, "stderr": ""})

    monkeypatch.setattr(compare.subprocess, "run", failing)
    code, said = leave("--config", str(recipe))
    assert code == 5
    assert "no label anywhere" in said


@pytest.mark.parametrize(
    ("code", "errors", "words"), [(-9, "", "out of memory"), (1, "Traceback\nKeyError: 'x'\n", "KeyError: 'x'")]
)
def test_a_run_that_dies(recipe: Path, monkeypatch: pytest.MonkeyPatch, code: int, errors: str, words: str) -> None:
    done: Callable[..., Any] = lambda *_, **__: type("Done", (), {"returncode": code, "stderr": errors})  # noqa: E731
    monkeypatch.setattr(compare.subprocess, "run", done)
    with pytest.raises(BenchError, match=words):
        compare.measure(Case("x", str(recipe), ()), steps=1, warm_up=1)


@pytest.mark.slow
def test_the_command(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process of its own, with the overrides; what is compared is tested above."""
    words = ["bench", "--config", str(recipe), "data.packing=false", "--steps", "2", "--warmup", "1", "--json"]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert [run["packing"] for run in found["runs"]] == [False]
    assert found["median"]["real_per_second"] > 0
    assert not (recipe.parent / "run").exists()
