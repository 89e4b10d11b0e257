"""Checkpoints in shards: exact with as many processes as before, and read by any other number, by either strategy."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_group import Recipe, apart, curve, in_processes, train_all
from safetensors.torch import load_file
from torch import nn

from halftune.cli import main
from halftune.train.parallel import fsdp2, saving
from halftune.train.run_folder.checkpoints import OPTIMIZER, TRAINABLE, find_damage, parts

ROWS, STEPS, HALF = 8, 6, 3
FULL, LORA = "adapter=none", "adapter={type: lora, rank: 4}"


class Runs:
    """Recipes of one kind of run by their names, its folders under ``place``."""

    def __init__(self, recipe, place: Path, *common: str) -> None:
        self.recipe, self.place, self.common = recipe, place, common

    def __call__(
        self, name: str, processes: int, strategy: str, *more: str, after: str = "", save: int = HALF
    ) -> Recipe:
        """A run of so many processes; ``after`` names the one from whose first half it goes on."""
        loaded, plan = self.recipe(
            f"training.max_steps={STEPS}",
            f"training.save_steps={save}",
            f"training.per_device_train_batch_size={ROWS // 2}",  # as two processes share it
            f"distributed.strategy={strategy}",
            f"training.output_dir={self.place / name}",
            *self.common,
            *more,
            world_size=processes,
        )
        resume = f"{self.place / after}/checkpoint-{HALF}" if after else "auto"  # need not be there yet
        training = loaded.run.training.model_copy(update={"resume": resume})
        return replace(loaded, run=loaded.run.model_copy(update={"training": training})), plan

    def same(self, one: str, other: str) -> bool:
        ours, theirs = (load_file(next((self.place / name / "final").glob("*.safetensors"))) for name in (one, other))
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

    def exported(self, name: str, what: str) -> dict[str, torch.Tensor]:
        """The plain model of a run or of a checkpoint, by ``halftune export``."""
        output = self.place / f"{name}-{what}"
        with pytest.raises(SystemExit, match="0"):
            main(["export", str(self.place / name / what), "--output", str(output)])
        return load_file(output / "model.safetensors")

    def continues(self, name: str, after: str) -> bool:
        return apart(curve(self.place / name), curve(self.place / after)[HALF:]) < 1e-5


@pytest.mark.slow
def test_two_shards_go_on_as_two_exactly_and_as_one(recipe, tmp_path: Path) -> None:
    runs = Runs(recipe, tmp_path, FULL)
    two = [runs("whole", 2, "fsdp2"), runs("again", 2, "fsdp2", after="whole")]
    assert in_processes(2, train_all(two)) == [0, 0]
    assert runs.same("again", "whole")
    assert curve(tmp_path / "again") == curve(tmp_path / "whole")[HALF:]

    checkpoint = tmp_path / "whole" / f"checkpoint-{HALF}"
    assert parts(checkpoint, TRAINABLE) == [f"trainable-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    sizes = [(checkpoint / part).stat().st_size for part in parts(checkpoint, OPTIMIZER)]
    assert max(sizes) < 1.1 * min(sizes), "each process writes its share only"

    model, last = runs.exported("whole", "final"), runs.exported("whole", f"checkpoint-{STEPS}")
    assert all(torch.equal(last[key], model[key]) for key in model | last)
    half = runs.exported("whole", f"checkpoint-{HALF}")
    assert not any(torch.equal(half[key], model[key]) for key in model)

    assert in_processes(1, train_all([runs("alone", 1, "auto", after="whole")])) == [0]
    assert runs.continues("alone", "whole")
    batch = json.loads((tmp_path / "alone" / "plan.json").read_text())["batch"]
    assert (batch["micro_batch"], batch["accumulation"]) == (4, 2), "one process takes the same global batch"

    (checkpoint / parts(checkpoint, TRAINABLE)[1]).unlink()
    assert "is missing" in find_damage(checkpoint, thorough=False)


@pytest.mark.slow
def test_any_number_of_processes_goes_on_by_either_strategy(recipe, tmp_path: Path) -> None:
    full, lora = Runs(recipe, tmp_path / "full", FULL), Runs(recipe, tmp_path / "lora", LORA)
    begin = [full("shards", 2, "fsdp2"), full("copies", 2, "ddp"), lora("shards", 2, "fsdp2")]
    then = [
        full("as copies", 2, "ddp", after="shards"),
        full("as shards", 2, "fsdp2", after="copies"),
        lora("again", 2, "fsdp2", after="shards"),
        lora("as copies", 2, "ddp", after="shards"),
    ]
    assert in_processes(2, train_all([*begin, *then])) == [0, 0]
    assert in_processes(4, train_all([full("four", 4, "fsdp2", after="shards")])) == [0] * 4
    assert in_processes(1, train_all([full("one", 1, "auto", after="copies")])) == [0]
    for name, after in (("as copies", "shards"), ("as shards", "copies"), ("four", "shards"), ("one", "copies")):
        assert full.continues(name, after), name
    assert lora.same("again", "shards")
    assert lora.continues("as copies", "shards")
    checkpoint = tmp_path / "lora" / "shards" / f"checkpoint-{HALF}"
    assert parts(checkpoint, TRAINABLE) == [TRAINABLE], "adapters are plain"
    model, last = lora.exported("shards", "final"), lora.exported("shards", f"checkpoint-{STEPS}")
    assert all(torch.equal(last[key], model[key]) for key in model | last)
    assert len(parts(tmp_path / "full" / "four" / f"checkpoint-{STEPS}", TRAINABLE)) == 4


@pytest.mark.slow
def test_a_process_that_cannot_write_is_named_by_all_and_leaves_nothing(recipe, tmp_path: Path, capfd) -> None:
    made = Runs(recipe, tmp_path, FULL)("full disk", 2, "fsdp2", save=1)

    def work(rank: int) -> None:
        write = saving.write_shares

        def full(folder: Path, *rest) -> Path:
            if "checkpoint-2" in folder.name and rank == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(folder, *rest)

        saving.write_shares = full
        train_all([made])(rank)

    assert in_processes(2, work) == [1, 1]
    said = capfd.readouterr().err
    assert said.count(".writing: rank 1 of 2 cannot write its part of the checkpoint: [Errno 28]") == 2
    assert "free space" in said
    found = sorted(path.name for path in (tmp_path / "full disk").glob("*checkpoint*"))
    assert found == ["checkpoint-1"]
    assert find_damage(tmp_path / "full disk" / "checkpoint-1", thorough=True) == ""


def test_gradients_are_reduced_in_the_dtype_of_their_weights(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of linear layers that are gathered in bf16."""
    _, plan = recipe(FULL, "precision=bf16", "distributed.strategy=fsdp2", machine="cpu-amx", world_size=2)
    said: list[tuple[Any, Any]] = []

    def shard(_modules: Any, *, mp_policy: Any, **_: Any) -> None:
        said.append((mp_policy.param_dtype, mp_policy.reduce_dtype))

    monkeypatch.setattr(fsdp2, "fully_shard", shard)
    nothing: Any = None
    strategy, layer = fsdp2.Fsdp2(nothing, plan), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    strategy._shard(layer, nothing, plan.parallel, reshard=True)
    assert said == [(torch.bfloat16, torch.float32), (None, torch.float32)]


def test_the_norm_of_offloaded_gradients_is_that_of_all_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is offloaded: here the shares are stand-ins, and the other process has a norm of 4."""

    class Share:
        def __init__(self, *own: float) -> None:
            self.own = torch.tensor(own)

        def to_local(self) -> torch.Tensor:
            return self.own

    monkeypatch.setattr(fsdp2, "DTensor", Share)
    monkeypatch.setattr(fsdp2, "sum_over_processes", lambda _, values: [values[0] + 4.0**2])
    plan: Any = SimpleNamespace(parallel=SimpleNamespace(offload=True))
    gradients: Any = [Share(0.0, 2.0), Share(2.0), Share(1.0)]
    nothing: Any = None
    assert float(fsdp2.Fsdp2(nothing, plan).total_norm(gradients)) == 5.0


def test_nothing_stays_gathered_after_an_evaluation_or_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward pass would compute with the weights from before the update."""

    class Gathered(nn.Module):
        times = 0

        def reshard(self) -> None:
            self.times += 1

    monkeypatch.setattr(fsdp2, "FSDPModule", Gathered)
    plan: Any = SimpleNamespace(parallel=SimpleNamespace(gather_once=None, reshard=True))
    nothing: Any = None
    strategy, layers = fsdp2.Fsdp2(nothing, plan), [Gathered(), Gathered()]
    model = nn.Sequential(*layers, nn.Linear(2, 2))
    state: Any = SimpleNamespace(_lazy_init=lambda: None)
    strategy.root = SimpleNamespace(_get_fsdp_state=lambda: state, unshard=lambda: None)  # type: ignore[assignment]
    strategy.after_evaluation(model)
    assert [layer.times for layer in layers] == [1, 1]
    with strategy.generating(model):
        pass
    assert [layer.times for layer in layers] == [2, 2]
