"""What the first step would wait for is compiled before it: every kernel, for operands and numbers of a real run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Semaphore, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from patience import LIMIT
from tiny_model import because

pytest.importorskip("triton")

from halftune.config.facts.model import read_model_facts
from halftune.config.load import LoadedConfig, load_config
from halftune.core.errors import PlanError
from halftune.hardware.catalogue import lookup
from halftune.model.attention import compile_kernels as ahead
from halftune.model.attention.linear import route_linear_layers
from halftune.plan import Plan, resolve
from halftune.precision import TRAINED_FLOAT8
from halftune.train.compile_ahead import compile_ahead, prove_kernels
from halftune.train.setup import make_model
from halftune_kernels import dispatch
from halftune_kernels.launch import standing_in

Started = tuple[Any, ...]


@contextmanager
def started() -> Iterator[set[Started]]:
    """What would be started on an A100: each kernel with everything that Triton compiles it for."""
    found: set[Started] = set()

    def kind(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.dtype
        return ("int", x == 1, x % 16 == 0) if isinstance(x, int) and not isinstance(x, bool) else type(x)

    def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.add((kernel.fn.__name__, tuple(map(kind, args)), tuple(sorted(options.items()))))

    with standing_in(80, start):
        yield found


def recipe(tmp_path: Path, name: str, adapter: str, packing: bool) -> tuple[LoadedConfig, Plan]:
    tree = {
        "model": {"name_or_path": f"builtin:{name}"},
        "adapter": {"type": adapter},
        "precision": "bf16",
        "data": {"train": "builtin:python-docs", "max_length": 64, "packing": packing},
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    loaded = load_config(tmp_path / "recipe.yaml")
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))


@pytest.mark.parametrize(
    ("name", "adapter", "packing"),
    [
        ("qwen3_5-tiny", "lora", True),
        ("kimi_linear-tiny", "none", False),
        ("mamba2-tiny", "none", True),
        ("rwkv7-tiny", "lora", False),
    ],
)
def test_a_step_starts_nothing_new(
    tmp_path: Path, name: str, adapter: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plan = recipe(tmp_path, name, adapter, packing)
    monkeypatch.setenv("HALFTUNE_KERNELS", "triton")
    with started() as compiled:
        compile_ahead(loaded.run, plan, torch.device("cpu"), lambda _: None)
    model: Any = make_model(loaded.run, plan)[0]
    route_linear_layers(model, plan)
    with started() as needed, torch.autocast("cpu", dtype=torch.bfloat16):
        for lengths in ((33, 14), (31, 17)):
            ids = torch.randint(3, 99, (1, sum(lengths)))
            row = ahead.packed_row(ids, lengths) if packing else {"input_ids": ids.expand(2, -1)}
            model.train()(**row, use_cache=False).logits.float().mean().backward()
            with torch.no_grad():
                model.eval()(**row, use_cache=False)
    assert len(needed) > 4
    assert needed <= compiled, {(entry[0], entry[1]) for entry in needed - compiled}


def test_a_kernel_that_does_not_fit_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def start(*_: Any) -> None:
        raise OutOfResources(300_000, 101_376, "shared memory")

    loaded, plan = recipe(tmp_path, "mamba2-tiny", "lora", True)
    monkeypatch.setenv("HALFTUNE_KERNELS", "triton")
    refused = pytest.raises(PlanError, match=r"failed: .*shared memory.*HALFTUNE_KERNELS=torch")
    with standing_in(80, start), refused:
        compile_ahead(loaded.run, plan, torch.device("cpu"), lambda _: None)


def test_float8_layers_that_torchao_trains_need_no_kernel_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven: list[set[str]] = []
    monkeypatch.setattr(dispatch, "prove", lambda operators, *_: proven.append(set(operators)))
    monkeypatch.setattr(dispatch, "choose", lambda *_: SimpleNamespace(name="triton"))
    plan = recipe(tmp_path, "qwen2-tiny", "none", packing=False)[1]
    for linear in (None, because("fp8"), because(TRAINED_FLOAT8)):
        one = replace(plan, precision=replace(plan.precision, linear=linear))
        prove_kernels(one, torch.device("cuda"), lambda _: None)
    without, frozen, trained = proven
    assert frozen - without == {"float8_rows"}
    assert trained == without


def test_a_machine_without_a_compiler_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton builds what starts a kernel by the machine's C compiler: a call that fails is no error of Triton's own."""
    triton_s = {"__name__": "triton.runtime.build", "subprocess": subprocess}
    exec("def start(*_): subprocess.check_call(['false'])", triton_s)
    start: Any = triton_s["start"]
    loaded, plan = recipe(tmp_path, "mamba2-tiny", "lora", True)
    monkeypatch.setenv("HALFTUNE_KERNELS", "triton")
    refused = pytest.raises(PlanError, match=r"failed: .*C compiler")
    with standing_in(80, start), refused:
        compile_ahead(loaded.run, plan, torch.device("cpu"), lambda _: None)


def test_nothing_is_compiled_where_torch_computes_and_no_draw_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, plan = recipe(tmp_path, "mamba2-tiny", "lora", True)
    before = torch.get_rng_state()
    with started() as compiled:
        compile_ahead(loaded.run, plan, torch.device("cpu"), lambda _: None)
        assert not compiled
        monkeypatch.setenv("HALFTUNE_KERNELS", "triton")
        compile_ahead(loaded.run, plan, torch.device("cpu"), lambda _: None)
    assert compiled
    assert torch.equal(torch.get_rng_state(), before)


def test_one_process_compiles_and_the_others_go_on_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, both, inside = Semaphore(0), Barrier(2), list[str]()

    class Lock(FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            if "timeout" in options:
                waiting.release()
            return super().acquire(*args, **options)

    def follow() -> None:
        with ahead.first_alone():
            inside.append("follower")
            both.wait(LIMIT)

    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path / "cache"))
    monkeypatch.setattr(ahead, "FileLock", Lock)
    followers = [Thread(target=follow) for _ in range(2)]
    with ahead.first_alone():
        for one in followers:
            one.start()
        assert all(waiting.acquire(timeout=LIMIT) for _ in followers)
        inside.append("first")
    for one in followers:
        one.join(LIMIT)
    assert inside == ["first", "follower", "follower"]
    assert not both.broken
