"""Images and several processes: the loss curve does not depend on how many share a global batch, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from process_group import apart, curve, in_processes, train_all
from safetensors.torch import load_file
from test_images import recipe as one_process
from tiny_images import asked, image_model, write_rows

from halftune.config.facts.model import read_model_facts
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve

ROWS = [  # of processes that take every other row, one may have no image
    asked("<image>What is it?", images=("images/60x40.png",)), asked("What is red?"),
    asked("<image>And <image>?", images=("images/24x80.png", "images/33x47.png")), asked("What is blue?"),
]  # fmt: skip
TOWERS = {"vision": "lora", "projector": "full"}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "lora": ({"data": {"cache_features": True}}, ("ddp",)),
    "lora packed": ({"data": {"packing": True, "max_length": 128, "cache_features": False}}, ("fsdp2",)),
    "full": ({"adapter": {"type": "none"}, "data": {"cache_features": False}}, ("ddp", "fsdp2")),
    "towers": ({"model": {"train": TOWERS}}, ("ddp", "fsdp2")),
    "towers in full": (
        {"model": {"train": dict.fromkeys(TOWERS, "full")}, "adapter": {"type": "none"}},
        ("ddp", "fsdp2"),
    ),
}


def recipe(folder: Path, case: str, processes: int, strategy: str) -> Any:
    changes, output = CASES[case][0], folder / f"{case.replace(' ', '-')}-{strategy}-{processes}"
    training = {
        "output_dir": str(output), "max_steps": 3, "per_device_train_batch_size": 4 // processes,
        "learning_rate": 0.01, "weight_decay": 0.1,
    }  # fmt: skip
    model = {"name_or_path": str(folder / "model"), **changes.get("model", {})}
    adapter = changes.get("adapter", {"type": "lora", "rank": 2})
    shared = {"strategy": strategy, "num_processes": processes}
    loaded, _ = one_process(
        folder, "qwen3_vl", model=model, adapter=adapter, training=training, distributed=shared,
        data={"packing": False, **changes.get("data", {})},
    )  # fmt: skip
    plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model), world_size=processes)
    assert processes == 1 or plan.distribution.value == strategy
    return (loaded, plan), output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_follow_the_curve_of_one(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    image_model(tmp_path / "model", "qwen3_vl")
    write_rows(tmp_path, ROWS)
    run, alone = recipe(tmp_path, case, 1, "auto")
    assert in_processes(1, train_all([run])) == [0]
    for strategy in CASES[case][1]:
        run, folder = recipe(tmp_path, case, 2, strategy)
        assert in_processes(2, train_all([run])) == [0, 0]
        assert apart(curve(folder), curve(alone)) < 1e-5
        assert apart(curve(folder, "grad_norm"), curve(alone, "grad_norm")) < 1e-4
        one, other = (load_file(next((place / "final").glob("*.safetensors"))) for place in (alone, folder))
        assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in other.items()}
