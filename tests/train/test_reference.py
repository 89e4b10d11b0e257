"""The reference computed before training: the same as the adapter switched off, kept in the cache, exact to resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_group import apart, curve, in_processes, train_all

from halftune.core.errors import TrainingError
from halftune.train import reference
from halftune.train.reference import _load
from halftune.train.trainer import train

PRECOMPUTED = "{type: dpo, reference: precomputed}"
BATCH = "training.per_device_train_batch_size={}"


@pytest.fixture
def of(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Is {n} even?", "chosen": "yes" * (n % 5 + 1), "rejected": "no " * n + "!"} for n in range(11)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(folder: str, *settings: str, world_size: int = 1, data: Path = path) -> tuple[Any, Any]:
        keys = {
            "data.train": data,
            "data.eval_split": 3,
            "training.output_dir": tmp_path / folder,
            "training.max_steps": 4,
            "training.save_steps": 2,
            "training.eval_steps": 2,
            "training.learning_rate": 1e-3,
        }
        given = (f"{key}={value}" for key, value in keys.items())
        return recipe(*given, *settings, world_size=world_size)

    return make


def near(one: Path, other: Path) -> bool:
    margins = (curve(folder, "rewards/margins") for folder in (one, other))
    same = all(abs(a - b) < 1e-5 for a, b in zip(*margins, strict=True))  # the first ones may be 0
    return same and all(
        apart(curve(one, name), curve(other, name)) < 1e-5 for name in ("loss", "grad_norm", "eval_loss")
    )


@pytest.mark.parametrize("packing", ["true", "false"])
def test_precomputed_is_adapter_off(of: Any, packing: str) -> None:
    settings = (f"data.packing={packing}", "adapter.dropout=0.1", BATCH.format(3))
    off = train(*of("off", "method=dpo", *settings)).folder
    assert near(train(*of("computed", f"method={PRECOMPUTED}", *settings)).folder, off)


def test_older_code_of_media_has_computed_another_reference(
    of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in ("older", "newer"):
        monkeypatch.setattr(reference, "code_of", lambda folder, code=code: f"{code} {folder.name}")
        train(*of(code, f"method={PRECOMPUTED}"))
    assert len(list((tmp_path / "cache" / "reference").glob("*/values.npy"))) == 4  # of training and evaluation


def test_precomputed_is_adapter_off_for_groups(of: Any, tmp_path: Path) -> None:
    rated = [{"prompt": f"Is {n} even?", "completion": "yes " * (n % 5 + 1), "label": n % 2 == 0} for n in range(24)]
    path = tmp_path / "rated.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rated))
    kto = "method={{type: kto, group_size: 2, reference: {}}}"
    folders = [
        train(*of(name, kto.format(name), BATCH.format(3), data=path)).folder for name in ("adapter_off", "precomputed")
    ]
    for name in ("loss", "grad_norm", "eval_loss", "rewards/chosen", "kl"):
        one, other = (curve(folder, name) for folder in folders)
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
        assert len(set(one)) > 1


@pytest.mark.parametrize("cache", ["true", "false"])
def test_full_fine_tuning_resumes_exactly(of: Any, cache: str, tmp_path: Path) -> None:
    settings = ("method=dpo", "adapter=none", f"data.cache={cache}", BATCH.format(3))
    loaded, plan = of("whole", *settings)
    assert plan.method.reference.value == "precomputed"
    whole = train(loaded, plan).folder
    assert curve(whole)[0] != curve(whole)[-1]
    kept = list((tmp_path / "cache" / "reference").glob("*/values.npy"))
    assert len(kept) == (2 if cache == "true" else 0)
    for path in kept:  # flip a bit of a value: it is computed again
        content = bytearray(path.read_bytes())
        content[-1] ^= 64
        path.write_bytes(content)
    again = train(*of("again", *settings, f"training.resume={whole / 'checkpoint-2'}")).folder
    assert curve(again) == curve(whole)[2:]
    assert curve(again, "eval_loss") == curve(whole, "eval_loss")[1:]


def test_a_reference_with_nan_is_named_and_not_read(of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "values.npy", np.array([[0.0], [np.nan]]))
    assert _load(tmp_path, (2, 1)) is None
    monkeypatch.setattr("halftune.train.reference._computed", lambda run, feed, shape: np.full(shape, np.nan))
    with pytest.raises(TrainingError) as refused:
        train(*of("run", f"method={PRECOMPUTED}"))
    assert refused.value.code == "train.non_finite"
    assert str(tmp_path / "pairs.jsonl") in refused.value.where


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_processes_share_the_pass(of: Any, strategy: str, tmp_path: Path) -> None:
    settings = ("method=dpo", "adapter=none", "data.cache=false")
    shared = of("two", *settings, BATCH.format(2), f"distributed.strategy={strategy}", world_size=2)
    assert in_processes(2, train_all([shared])) == [0, 0]
    assert near(tmp_path / "two", train(*of("one", *settings, BATCH.format(4))).folder)


def test_pissa_compares_with_the_model_at_the_start(of: Any) -> None:
    folder = train(*of("run", "method=dpo", "adapter={type: lora, rank: 4, init: pissa}")).folder
    assert curve(folder, "rewards/margins")[0] == pytest.approx(0, abs=1e-6)
