"""Cuts of kernels: shipped ones for every GPU, others on trial; and the verdicts that are kept on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from patience import LIMIT, until
from torch.utils._python_dispatch import TorchDispatchMode

from halftune_kernels import __main__ as commands
from halftune_kernels import cases, selfcheck
from halftune_kernels.arguments import ArgumentError
from halftune_kernels.gate import SHARED_MEMORY
from halftune_kernels.launch import Config, standing_in
from halftune_kernels.ops.ssd import simple_decay
from halftune_kernels.ops.ssd.triton import CONFIGS
from halftune_kernels.scan.cuts import configuration, default, on_trial

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "tune_kernels.py"
_spec = importlib.util.spec_from_file_location("tune_kernels", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
tune_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tune_kernels)
CPU, HALF = torch.device("cpu"), torch.bfloat16
ON_GPU: Any = SimpleNamespace(device=CPU, dtype=HALF)  # what `configuration` reads of a tensor; sm_80


def test_only_faster_and_right_cuts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def tuned() -> dict[str, Config]:
        times = iter((10.0, 5.0))  # the shipped cuts, the first other one, then 20
        return tune_kernels.tune("ssd", CPU, HALF, cases.case("ssd", 64, (0, 8)), 64, lambda run: next(times, 20.0))

    seen: list[Config] = []
    shipped = configuration(CONFIGS, "ssd", "prepare", ON_GPU, 64)
    monkeypatch.setattr(tune_kernels, "is_right", lambda *asked: seen.append(asked[-1]["prepare"]) or True)
    assert tuned()["prepare"] == dataclasses.replace(shipped, stages=2) == seen[0]
    monkeypatch.setattr(tune_kernels, "is_right", lambda *asked: False)
    assert tuned()["prepare"] == shipped


def test_a_trial_is_of_its_kernels_and_ends() -> None:
    shipped, other = configuration(CONFIGS, "ssd", "prepare", ON_GPU, 64), Config(16, 2, 1)
    with on_trial("ssd", {"prepare": other}):
        assert configuration(CONFIGS, "ssd", "prepare", ON_GPU, 64) == other
        assert configuration(CONFIGS, "kda", "prepare", ON_GPU, 64) == shipped
        assert configuration(CONFIGS, "ssd", "scan_forward", ON_GPU, 64) != other
    assert configuration(CONFIGS, "ssd", "prepare", ON_GPU, 64) == shipped


class _Seen(TorchDispatchMode):
    """What torch does inside, and in which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.add(func.overloadpacket.__name__)
        self.dtypes |= {x.dtype for x in (*args, out) if isinstance(x, torch.Tensor)}
        return out


def test_only_the_step_is_timed_not_how_its_inputs_are_made() -> None:
    seen, step = _Seen(), tune_kernels.step_of(cases.case("gated_delta_rule", 16, (0, 70)), HALF, CPU)
    with standing_in(90, lambda *started: None), seen:
        step()
    assert {"empty_like", "ones_like"} <= seen.operations
    assert torch.float64 not in seen.dtypes  # what `cases` makes its numbers in
    assert not [name for name in seen.operations if "rand" in name or "normal" in name]


@pytest.mark.parametrize(
    ("operator", "heads", "says"),
    [("kda", (2, 3), "a multiple of those of keys"), ("rwkv7", (2, 4), "as many of values"), ("ssd", (0, 2), "0 of ")],
)
def test_heads_that_an_operator_cannot_have(operator: str, heads: tuple[int, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        cases.case(operator, 16, (0, 80), heads=heads)


def _check(enough: Event) -> None:
    while not enough.is_set():
        for kept in selfcheck.cache_dir().glob("selfcheck/*.json"):
            kept.unlink(missing_ok=True)
        selfcheck.verdict("ssd", CPU, "cpu")


def test_two_processes_at_once_tear_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    enough = multiprocessing.Event()
    detail = "worst: d q" * 5_000  # not written at one go
    monkeypatch.setattr(selfcheck, "check", lambda *args: selfcheck.Verdict("ssd", "cpu", True, detail, 0.1))
    both = [multiprocessing.get_context("fork").Process(target=_check, args=(enough,)) for _ in range(2)]
    for one in both:
        one.start()
    read = list[str]()

    def has_read_many() -> bool:
        for _ in range(100):
            for file in tmp_path.glob("kernels/*/*.json"):
                with contextlib.suppress(FileNotFoundError):
                    read.append(json.loads(file.read_text())["detail"])
        return len(read) > 50 or not all(one.is_alive() for one in both)

    until(has_read_many, "50 verdicts are read")
    enough.set()
    for one in both:
        one.join(LIMIT)
    assert [one.exitcode for one in both] == [0, 0]
    assert len(read) > 50
    assert set(read) == {detail}
    assert not list(tmp_path.glob("kernels/*/*.part"))


@pytest.mark.parametrize("operator", ["ssd", "gated_delta_rule", "kda", "rwkv7"])
def test_every_gpu_has_a_cut_of_every_kernel_and_unknown_ones_that_of_their_family(operator: str) -> None:
    shipped = importlib.import_module(f"halftune_kernels.ops.{operator}.triton").CONFIGS
    for kernel, half in shipped:
        dtype = HALF if half else torch.float32
        for size in (16, 32, 64, 128, 256):
            cuts = {gpu: default(shipped, kernel, gpu, dtype, size) for gpu in (*SHARED_MEMORY, 87, 103, 121)}
            assert (cuts[87], cuts[103], cuts[121]) == (cuts[86], cuts[100], cuts[120])


def test_more_samples_than_a_grid_has_rows() -> None:
    """CUDA's second and third axis end at 65,535."""
    grids = {}
    samples = 70_000
    q, k, v = torch.empty(3, 1, samples, 1, 4, requires_grad=True).unbind()
    g, bounds = torch.empty(1, samples, 1), torch.arange(samples + 1, dtype=torch.int32)
    with standing_in(80, lambda kernel, grid, args, options: grids.setdefault(kernel.fn.__name__, grid)):
        o, _ = simple_decay(q, k, v, g, cu_seqlens=bounds, backend="triton")
        o.sum().backward()
    assert len(grids) == 4
    assert all(grid[0] >= samples and max(grid[1:], default=1) <= 65_535 for grid in grids.values()), grids


def test_the_command_says_what_ran_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    for passed, code, word in ((True, 0, "right"), (False, 1, "WRONG")):
        found = selfcheck.Verdict("ssd", "cpu", passed, "worst: d q", 0.1, lasting=False)
        monkeypatch.setattr(selfcheck, "check", lambda *args, found=found: found)
        assert commands.main(["check", "--operators", "ssd"]) == code
        assert f"ssd: {word}, cpu (the tensors are on the CPU); worst: d q" in capsys.readouterr().out
