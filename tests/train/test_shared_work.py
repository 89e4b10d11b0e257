"""Two processes with every callback, and where one of them works alone: none waits for the other in vain."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT, until
from process_group import apart, curve, in_processes, train_all
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from halftune.core import manifest
from halftune.model.result import save as save_shards
from halftune.train.callbacks import CALLBACKS, chosen
from halftune.train.parallel import barrier as barriers
from halftune.train.parallel.rendezvous import join_rendezvous
from halftune.train.parallel.watchdog import Watchdog

NEED_MORE = {
    "progress_bar",
    "wandb",
    "mlflow",
    "swanlab",
    "trackio",
    "rollouts",
}  # a terminal, an account, packages, prompts
EVERYTHING = (
    "logging.sample_prompts=[Add 2 and 3., Add 4 and 5.]",
    "generation.max_new_tokens=3",
    "logging.report_to=[tensorboard]",
    "logging.profile=1",
    "logging.progress=true",
    "training.on_non_finite=skip",
    "training.eval_steps=2",
    "training.early_stopping_patience=50",
    "training.stop_above_loss=50",
    "training.load_best=true",
    "training.save_steps=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_with_every_callback(recipe, tmp_path: Path, strategy: str, adapter: str) -> None:
    def run(name: str, *more: str):
        where = (f"training.output_dir={tmp_path / name}", f"distributed.strategy={strategy}")
        common = ("training.max_steps=5", "training.per_device_train_batch_size=2", "data.eval_split=3")
        return recipe(f"adapter={adapter}", *where, *common, *more, world_size=2)

    loaded, plan = run("everything", *EVERYTHING)
    assert CALLBACKS.keys() - NEED_MORE <= chosen(loaded.run, plan).keys()
    assert in_processes(2, train_all([(loaded, plan), run("without")])) == [0, 0]

    folder = tmp_path / "everything"
    samples = json.loads((folder / "samples.json").read_text())["samples"]
    assert [set(row) for row in samples] == [{"prompt", "before", "after"}] * 2
    assert all(isinstance(row[when], str) and row[when] for row in samples for when in ("before", "after"))
    for name in ("guard.json", "dtypes.json", "environment.json", "profile.json", "report.html", "finished.json"):
        assert (folder / name).exists(), name
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert "failed, training continues" not in (folder / "train.log").read_text()
    assert apart(curve(folder), curve(tmp_path / "without")) < 1e-6, "looking on changes nothing"


@pytest.mark.slow
def test_for_what_the_main_process_does_alone_nobody_waits_in_a_collective(recipe, tmp_path: Path) -> None:
    """Checksums and the final files: the other process waits at a barrier, which has no fixed limit."""
    loaded, plan = recipe(
        "adapter=none",
        "distributed.strategy=fsdp2",
        f"distributed.timeout_seconds={LIMIT}",
        "training.max_steps=2",
        "training.per_device_train_batch_size=2",
        "training.save_steps=2",
        "data.eval_split=3",
        "training.eval_steps=2",
        "training.load_best=true",
        world_size=2,
    )
    checksum, write, wait = manifest._sha256, save_shards.save_file, barriers._wait
    waiting, alone = multiprocessing.Value("i", 0), [multiprocessing.Value("i", 0) for _ in range(2)]

    def waits(*arguments: Any) -> None:
        waiting.value = 1
        wait(*arguments)
        waiting.value = 0

    def noted_checksum(path: Path) -> str:
        if path.name.startswith("trainable"):
            alone[0].value += 1
            until(lambda: waiting.value, "rank 1 waits at a barrier for a checksum")
        return checksum(path)

    def noted_write(*arguments: Any, **options: Any) -> None:
        alone[1].value += 1
        until(lambda: waiting.value, "rank 1 waits at a barrier for the final files")
        write(*arguments, **options)

    def work(rank: int) -> None:
        if rank == 0:
            manifest._sha256, save_shards.save_file = noted_checksum, noted_write
        else:
            barriers._wait = waits  # pyright: ignore[reportAttributeAccessIssue]
        with Watchdog(join_rendezvous(), LIMIT):
            train_all([(loaded, plan)])(rank)

    assert in_processes(2, work) == [0, 0]
    assert all(count.value for count in alone), "both were seen"
    assert (tmp_path / "run" / "finished.json").exists()


def test_processes_share_the_checksums_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        (tmp_path / name).write_text(name)
    manifest.seal(tmp_path)
    (tmp_path / "d").write_text("D")
    checksum, read = manifest._sha256, list[str]()
    monkeypatch.setattr(manifest, "_sha256", lambda path: (read.append(path.name), checksum(path))[1])
    found = [manifest.damage(tmp_path, thorough=True, share=(rank, 2)) for rank in range(2)]
    assert [bool(wrong) for wrong in found] == [False, True]
    assert sorted(read) == names, "each file is read by one process"
    assert "d " in manifest.damage(tmp_path, thorough=True)


@pytest.mark.slow
def test_processes_share_the_checksums_when_a_run_goes_on(recipe, tmp_path: Path) -> None:
    """Of a damaged checkpoint, which is ignored, and of the one before it; each goes on with its own random numbers."""
    settings = ("training.save_steps=1", "adapter.dropout=0.1")
    made = [recipe(*settings, f"training.max_steps={steps}", world_size=2) for steps in (2, 3)]
    assert in_processes(2, train_all(made[:1])) == [0, 0]
    second = [curve(tmp_path / "run", name)[1] for name in ("loss", "grad_norm")]
    newest = tmp_path / "run" / "checkpoint-2"
    data = bytearray((newest / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "optimizer.safetensors").write_bytes(data)
    checksum = manifest._sha256

    def work(rank: int) -> None:
        read = list[str]()
        manifest._sha256 = lambda path: (read.append(f"{path.parent.name}/{path.name}"), checksum(path))[1]
        try:
            train_all(made[1:])(rank)
        finally:
            (tmp_path / f"read-{rank}").write_text("\n".join(read))

    assert in_processes(2, work) == [0, 0]
    read = [(tmp_path / f"read-{rank}").read_text().splitlines() for rank in (0, 1)]
    for name in ("checkpoint-1", "checkpoint-2"):
        shares = [{one for one in names if one.startswith(f"{name}/")} for names in read]
        assert all(shares), "both read some of it"
        assert not shares[0] & shares[1], "neither reads what the other does"
    assert [curve(tmp_path / "run", name)[1] for name in ("loss", "grad_norm")] == second
    assert (tmp_path / "run" / "set-aside" / "checkpoint-2").is_dir()
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "sums"), [("auto", 1), ("true", 3)])
def test_gradients_are_summed_once_a_step(recipe, tmp_path: Path, asked: str, sums: int) -> None:
    """Of three forward passes, or after each of them; counted for one step of a model of two layers and the rest."""
    rows = ("training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=3")
    how = ("distributed.strategy=fsdp2", f"distributed.fsdp.sync_each_batch={asked}", "training.max_steps=1")
    made = recipe("adapter=none", *rows, *how, world_size=2)

    def work(rank: int) -> None:
        scatter, counted = DefaultReduceScatter.__call__, list[int]()
        DefaultReduceScatter.__call__ = lambda *a, **k: (counted.append(1), scatter(*a, **k))[1]
        train_all([made])(rank)
        assert len(counted) == 3 * sums

    assert in_processes(2, work) == [0, 0]
