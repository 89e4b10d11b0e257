"""Cuts of kernels: shipped ones for every GPU, measured ones kept on disk and believed only if they can be."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halftune_kernels import __main__ as commands
from halftune_kernels import gated_delta_rule, kda, selfcheck, tuning
from halftune_kernels.arguments import ArgumentError
from halftune_kernels.dispatch import Backend
from halftune_kernels.gate import SHARED_MEMORY
from halftune_kernels.launch import Config, standing_in
from halftune_kernels.ops.ssd import simple_decay
from halftune_kernels.ops.ssd.triton import CONFIGS

CPU, HALF = torch.device("cpu"), torch.bfloat16
ON_GPU = SimpleNamespace(is_cuda=True, device=CPU, dtype=HALF)  # what `configuration` reads of a tensor; sm_80


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; what was read from another one is forgotten."""
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "_right", lambda *args: True)
    tuning._measured.cache_clear()
    return tmp_path / "kernels" / "cuts"


def in_turn(*first: float) -> Callable[[Callable[[], object]], float]:
    """A measure that says these milliseconds, then 20."""
    times = iter(first)
    return lambda run: next(times, 20.0)


def prepare() -> Config:
    return tuning.configuration(CONFIGS, "ssd", "prepare", ON_GPU, 64)  # type: ignore[arg-type]


def test_cuts_are_kept_only_if_faster_and_right(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = prepare()
    kept = tuning.tune("ssd", CPU, HALF, 64, in_turn(10.0, 5.0))
    assert kept["prepare"] == dataclasses.replace(shipped, warps=2) == prepare()
    assert [file.name for file in cache.iterdir()] == ["ssd-sm80-bfloat16-64.json"]
    monkeypatch.setattr(tuning, "_right", lambda *args: False)
    assert tuning.tune("ssd", CPU, HALF, 64, in_turn(10.0, 5.0))["prepare"] == shipped == prepare()


def test_a_head_size_is_tuned_for_the_tile_it_is_padded_to(cache: Path) -> None:
    tuning.tune("ssd", CPU, HALF, 48, in_turn(10.0, 5.0))
    assert prepare().warps == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: "{",
        lambda stored: "[]",
        lambda stored: json.dumps({"of": stored["of"]}),
        lambda stored: json.dumps(stored | {"cuts": {"prepare": [1, 2]}}),
        lambda stored: json.dumps(stored | {"cuts": {"prepare": {"tiles": 3}}}),
        lambda stored: json.dumps(stored | {"cuts": {"prepare": stored["cuts"]["prepare"] | {"warps": 0}}}),
        lambda stored: json.dumps(stored | {"cuts": {"prepare": stored["cuts"]["prepare"] | {"warps": "2"}}}),
        lambda stored: json.dumps(stored | {"cuts": {"prepare": stored["cuts"]["prepare"] | {"depth": 4096}}}),
        lambda stored: json.dumps(stored | {"of": "another source, Triton or GPU"}),
    ],
)
def test_what_cannot_be_believed_is_the_shipped_cut(damage: Callable[[dict[str, object]], str], cache: Path) -> None:
    shipped = prepare()
    tuning.tune("ssd", CPU, HALF, 64, in_turn(10.0, 5.0))
    assert prepare() != shipped
    file = next(cache.iterdir())
    file.write_text(damage(json.loads(file.read_text())))
    tuning._measured.cache_clear()
    assert prepare() == shipped


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").write_text("no folder")
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))

    def refuse(run: Callable[[], object]) -> float:
        raise AssertionError("measured")

    with pytest.raises(OSError, match="kernels"):
        tuning.tune("ssd", CPU, HALF, 64, refuse)


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


def test_only_the_step_is_timed_not_how_its_inputs_are_made(cache: Path) -> None:
    seen = _Seen()

    def measure(run: Callable[[], object]) -> float:
        if not seen.operations:
            with standing_in(90, lambda *started: None), seen:
                run()
        return 10.0

    tuning.tune("gated_delta_rule", CPU, HALF, 16, measure, bounds=(0, 70))
    assert {"empty_like", "ones_like"} <= seen.operations
    assert torch.float64 not in seen.dtypes  # what `cases` makes its numbers in
    assert not [name for name in seen.operations if "rand" in name or "normal" in name]


def _started(run: Callable[[], object]) -> set[tuple[object, ...]]:
    """What Triton compiles apart: a kernel, the constants, and which pointers there are and to what."""
    kinds = set()

    def note(kernel: Any, grid: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        pointers = tuple(x.dtype if isinstance(x, torch.Tensor) else x is None for x in args)
        kinds.add((kernel.fn.__name__, pointers, tuple(sorted(options.items()))))

    with standing_in(90, note):
        run()
    return kinds


@pytest.mark.parametrize(("operator", "heads"), [("gated_delta_rule", (3, 6)), ("kda", (3, 3)), ("ssd", (1, 5))])
def test_what_is_warmed_is_what_a_run_starts(operator: str, heads: tuple[int, int]) -> None:
    keys, values = heads
    q, k = torch.randn(2, 1, 130, keys, 24, dtype=HALF).unbind()
    v, beta = torch.randn(1, 130, values, 24, dtype=HALF), torch.rand(1, 130, values, dtype=HALF)
    g = -torch.rand(1, 130, values, *([24] if operator == "kda" else []))
    bounds = torch.tensor([0, 50, 130], dtype=torch.int32)

    def run(final: bool = False) -> torch.Tensor:
        more = {"cu_seqlens": bounds, "output_final_state": final, "backend": "triton"}
        if operator == "ssd":
            return simple_decay(q, k, v, g, w=beta.float(), **more)[0]
        delta = kda if operator == "kda" else gated_delta_rule
        return delta(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **more)[0]

    for x in (q, k, v, g, beta):
        x.requires_grad_()
    wanted = _started(lambda: run().sum().backward())
    with torch.no_grad():
        wanted |= _started(run) | _started(lambda: run(final=True))
    assert wanted <= _started(lambda: tuning.prewarm(operator, CPU, HALF, 24, heads))
    assert not wanted <= _started(lambda: tuning.prewarm(operator, CPU, HALF, 24))  # of other heads


@pytest.mark.parametrize(
    ("operator", "heads", "says"),
    [("kda", (2, 3), "a multiple of those of keys"), ("rwkv7", (2, 4), "as many of values"), ("ssd", (0, 2), "0 of ")],
)
def test_heads_that_an_operator_cannot_have(operator: str, heads: tuple[int, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        tuning.prewarm(operator, CPU, HALF, 16, heads)


def test_the_commands_hand_heads_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    warmed: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(commands, "choose", lambda *args: Backend("triton", ""))
    monkeypatch.setattr(tuning, "prewarm", lambda *args: warmed.append((args[0], *args[2:])))
    asked = ["warm", "--operators", "ssd", "kda", "--heads", "2", "6", "--sizes", "64", "--dtypes", "float16"]
    assert commands.main(asked) == 0
    assert commands.main(["warm", "--operators", "kda"]) == 0
    half = torch.float16
    assert warmed == [("ssd", half, 64, (2, 6)), ("kda", half, 64, (2, 6)), ("kda", HALF, 128, None)]
    with pytest.raises(SystemExit):
        commands.main(["check", "--heads", "2", "4"])
    assert "check takes every dtype" in capsys.readouterr().err


def _tune_and_check(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tuning.tune("ssd", CPU, HALF, 64, in_turn(10.0, 5.0))
        for kept in selfcheck.cache_dir().glob("selfcheck/*.json"):
            kept.unlink(missing_ok=True)
        selfcheck.verdict("ssd", CPU, "cpu")


def test_two_processes_at_once_tear_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detail = "worst: d q" * 5_000  # not written at one go
    monkeypatch.setattr(selfcheck, "check", lambda *args: selfcheck.Verdict("ssd", "cpu", True, detail, 0.1))
    both = [multiprocessing.get_context("fork").Process(target=_tune_and_check, args=(1.0,)) for _ in range(2)]
    for one in both:
        one.start()
    read = set()
    while any(one.is_alive() for one in both):
        for file in cache.parent.glob("*/*.json"):
            with contextlib.suppress(FileNotFoundError):
                json.loads(file.read_text())
                read.add(file.parent.name)
    for one in both:
        one.join()
    assert [one.exitcode for one in both] == [0, 0]
    assert read == {"cuts", "selfcheck"}
    assert not list(cache.parent.glob("*/*.part"))
    tuning._measured.cache_clear()
    assert prepare().warps == 2


@pytest.mark.parametrize("operator", ["ssd", "gated_delta_rule", "kda", "rwkv7"])
def test_every_gpu_has_a_cut_of_every_kernel_and_unknown_ones_that_of_their_family(operator: str) -> None:
    shipped = importlib.import_module(f"halftune_kernels.ops.{operator}.triton").CONFIGS
    for kernel, half in shipped:
        dtype = HALF if half else torch.float32
        for size in (16, 32, 64, 128, 256):
            cuts = {gpu: tuning.default(shipped, kernel, gpu, dtype, size) for gpu in (*SHARED_MEMORY, 87, 103, 121)}
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


def test_the_commands_need_a_gpu_only_where_there_is_something_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    right = selfcheck.Verdict("ssd", "cpu", True, "worst: d q", 0.1)
    monkeypatch.setattr(selfcheck, "check", lambda *args: right)
    assert commands.main(["check", "--operators", "ssd"]) == 0
    assert "ssd: right, cpu (the tensors are on the CPU); worst: d q" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert commands.main(["tune", "--operators", "ssd"]) == 2
    assert "tune: no CUDA device here" in capsys.readouterr().err
