"""The loss curve does not depend on how many processes share a global batch, or on how they share the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from process_group import apart, curve, in_processes, train_all
from safetensors.torch import load_file

from halftune_kernels.library import everywhere

ROWS = 8  # of a global batch
LORA, FULL = ("adapter={type: lora, rank: 4}",), ("adapter=none",)
PACKED = ("data.packing=true", "data.max_length=128")
PAIRS = "data.train=builtin:python-pairs"
EVALUATED = (
    "data.eval_split=1",
    "training.eval_steps=1",
    "training.early_stopping_patience=50",
)  # fewer rows than processes
CASES: dict[str, tuple[str, ...]] = {
    "lora": (*LORA, *EVALUATED),
    "lora packed": (*LORA, *PACKED),
    "full": (*FULL, "training.gradient_accumulation_steps=2"),
    "full packed": (*FULL, *PACKED, "training.gradient_checkpointing=true"),
    "hybrid": ("model.name_or_path=builtin:qwen3_5-tiny", *FULL, *PACKED),
}


def overrides(case: str, world_size: int, strategy: str, folder: Path) -> list[str]:
    accumulation = 2 if "training.gradient_accumulation_steps=2" in CASES[case] else 1
    rows = f"training.per_device_train_batch_size={ROWS // world_size // accumulation}"
    return [
        *CASES[case],
        "training.max_steps=3",
        rows,
        f"distributed.strategy={strategy}",
        f"training.output_dir={folder}",
    ]


def grid(recipe, tmp_path: Path, cases: list[str], sizes: list[int]) -> dict[tuple[str, int, str], Path]:
    """Trains every case by every strategy with every number of processes."""
    folders: dict[tuple[str, int, str], Path] = {}
    for size in sizes:
        made = []
        for case in cases:
            for strategy in ("ddp", "fsdp2") if size > 1 else ("auto",):
                folder = tmp_path / f"{case.replace(' ', '-')}-{size}-{strategy}"
                made.append(recipe(*overrides(case, size, strategy, folder), world_size=size))
                folders[case, size, strategy] = folder
        assert in_processes(size, train_all(made)) == [0] * size
    return folders


def check(folders: dict[tuple[str, int, str], Path], case: str) -> None:
    alone = folders[case, 1, "auto"]
    for (name, size, strategy), folder in folders.items():
        if name != case or size == 1:
            continue
        assert apart(curve(folder), curve(alone)) < 1e-5, (case, size, strategy)
        if case == "lora":
            assert apart(curve(folder, "eval_loss"), curve(alone, "eval_loss")) < 1e-5
        one, other = (load_file(next((place / "final").glob("*.safetensors"))) for place in (alone, folder))
        assert one.keys() == other.keys()
        assert all(one[key].dtype == other[key].dtype and one[key].shape == other[key].shape for key in one)


@pytest.mark.slow
def test_one_two_and_four_processes_follow_the_same_curve(recipe, tmp_path: Path) -> None:
    by_four = ["lora packed", "full"]  # which differ in all that a case can differ in
    folders = grid(recipe, tmp_path, [case for case in CASES if case not in by_four], [1, 2])
    folders |= grid(recipe, tmp_path, by_four, [1, 2, 4])
    for case in CASES:
        check(folders, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [(*LORA, "method=dpo", PAIRS), (*FULL, "method=orpo", PAIRS), (*LORA, *PACKED)],
    ids=["dpo", "full orpo", "packed"],
)
def test_what_gpus_compute_follows_the_same_curve(more: tuple[str, ...], recipe, tmp_path: Path) -> None:
    """Registered operators on CPUs: fused layers, and log-probabilities in one pass over the logits."""

    def run(name: str, processes: int) -> tuple:
        rows = f"training.per_device_train_batch_size={ROWS // processes}"
        where = (f"distributed.strategy={name}", rows, "training.max_steps=3", f"training.output_dir={tmp_path / name}")
        return recipe(*more, *where, world_size=processes)

    def as_gpus(*recipes: tuple) -> Callable[[int], None]:
        def work(rank: int) -> None:
            with everywhere():
                train_all(recipes)(rank)

        return work

    assert in_processes(2, as_gpus(run("ddp", 2), run("fsdp2", 2))) == [0, 0]
    assert in_processes(1, train_all([run("auto", 1)])) == [0]  # what CPUs compute
    for name in ("ddp", "fsdp2"):
        # a CPU sums the squares of a whole embedding in fp32 with an error of 2e-5, and of its shards with another
        for kind, allowed in (("loss", 1e-5), ("grad_norm", 3e-5)):
            assert apart(curve(tmp_path / name, kind), curve(tmp_path / "auto", kind)) < allowed


@pytest.mark.slow
def test_half_precision_by_shards_rounds_as_whole_models_do(recipe, tmp_path: Path) -> None:
    """Linear layers are gathered in bf16, which is what autocast makes of them; all else in fp32."""
    common = (*FULL, "training.max_steps=6")

    def run(name: str, strategy: str, processes: int, precision: str = "bf16") -> tuple:
        rows = f"training.per_device_train_batch_size={ROWS // processes}"
        where = (f"distributed.strategy={strategy}", rows, f"training.output_dir={tmp_path / name}")
        return recipe(*common, f"precision={precision}", *where, machine="cpu-amx", world_size=processes)

    made = [run("ddp", "ddp", 2), run("fsdp2", "fsdp2", 2)]
    assert made[1][1].parallel.param.value == "bf16"
    assert in_processes(2, train_all(made)) == [0, 0]
    assert in_processes(1, train_all([run("one", "auto", 1), run("exact", "auto", 1, "fp32")])) == [0]
    curves = {name: curve(tmp_path / name) for name in ("ddp", "fsdp2", "one", "exact")}
    assert apart(curves["fsdp2"][:3], curves["ddp"][:3]) < 1e-4
    error = {name: apart(curves[name], curves["exact"]) for name in ("one", "ddp", "fsdp2")}
    assert error["one"] > 1e-5, "bf16 is at work"
    assert max(error.values()) < 2**-8, "no more than bf16 rounds"
    assert error["fsdp2"] < 2 * max(error["one"], error["ddp"])  # which differ, by what a processor sums in which order
    for name in ("ddp", "fsdp2"):
        assert apart(curves[name][:1], curves["one"][:1]) < 1e-6, "one and the same forward pass"
    saved = load_file(next((tmp_path / "fsdp2" / "final").glob("*.safetensors")))
    assert {tensor.dtype for tensor in saved.values()} <= {torch.bfloat16, torch.float32}
