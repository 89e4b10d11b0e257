"""The self-check finds wrong gradients, and its verdict is kept."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from halftune_kernels import cases, selfcheck
from halftune_kernels.ops.ssd import cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize("operator", ["causal_conv1d", "gated_rms_norm", "ssd", "gated_delta_rule"])
def test_the_cpu_path_passes(operator: str) -> None:
    verdict = selfcheck.check(operator, CPU, "cpu", (16,))
    assert verdict.passed, verdict.detail
    assert "bound" in verdict.detail


def test_a_wrong_gradient_with_a_right_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu._SimpleDecay.backward

    def wrong(*args: Any) -> Any:
        (d_q, d_k, *others), entering = right(*args)
        return (d_q, d_k * 1.02, *others), entering

    monkeypatch.setattr(cpu._SimpleDecay, "backward", wrong)
    verdict = selfcheck.check("ssd", CPU, "cpu", (16,))
    assert not verdict.passed
    assert verdict.detail.startswith("d k float32, head size 16: error 2.0e-02")


def test_numbers_that_are_not_finite_fail() -> None:
    assert selfcheck.relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_verdicts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    first = selfcheck.verdict("gated_rms_norm", CPU, "cpu")
    kept = next((tmp_path / "kernels" / "selfcheck").glob("*.json"))

    def refuse(*args: object) -> None:
        raise AssertionError("checked again")

    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "check", refuse)
        assert selfcheck.verdict("gated_rms_norm", CPU, "cpu") == first
    kept.write_text('{"operator": "gated')  # a full disk tore it
    assert selfcheck.verdict("gated_rms_norm", CPU, "cpu").passed


@pytest.mark.parametrize("changed", ["delta_kernels.py", "launch.py"])  # of the scans, of all operators
def test_changed_kernels_are_checked_again(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = selfcheck.fingerprint("kda", CPU, "triton"), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == changed))
    assert selfcheck.fingerprint("kda", CPU, "triton") != before


class NotOfPython(TritonError):
    """As Triton's own: no RuntimeError."""


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (OutOfResources(131_072, 101_376, "shared memory"), True),
        (NotOfPython("ptxas died"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (subprocess.CalledProcessError(1, ["gcc", "launcher.c"]), False),
        (FileNotFoundError("no gcc"), False),
    ],
)
def test_what_does_not_run_is_a_verdict_and_a_full_memory_is_not_kept(
    error: Exception, lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(case: cases.Case, dtype: torch.dtype, device: torch.device, backend: str) -> dict[str, torch.Tensor]:
        if backend == "triton":
            raise error
        return {}

    monkeypatch.setattr(cases.Case, "call", call)
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    found = selfcheck.verdict("ssd", CPU, "triton")
    assert not found.passed
    assert type(error).__name__ in found.detail
    assert bool([*tmp_path.rglob("*.json")]) == lasting


def test_a_check_of_its_own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What lies in the current folder is not imported; a process that dies is a failure, and not kept."""
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    found = selfcheck._check_apart("gated_rms_norm", CPU, "cpu", (torch.float16,))
    assert found.passed
    assert " float16, head size" in found.detail
    found = selfcheck._check_apart("gated_rms_norm", CPU, "no such backend")
    assert (found.passed, found.lasting) == (False, False)


def test_kernels_that_read_ahead_are_checked_in_loops() -> None:
    """Forward and backward: with few rows and columns every program has one tile."""
    from halftune_kernels.ops.adapted_activation import triton as adapted

    for columns, (_, rows) in selfcheck.LOOPS["adapted_activation"]:
        for tile, over in ((adapted._FORWARD, 1), (adapted._BACKWARD, 0)):
            sizes = rows, columns
            tiles = [-(-size // length) for size, length in zip(sizes, tile, strict=True)]
            assert adapted._parts(tiles[1 - over], tiles[over])[1] > 1
            assert rows % tile[0]


def test_a_check_in_a_process_of_its_own_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several run side by side: with all cores for each, they were not done in two minutes on a GPU machine."""
    seen: dict[str, str] = {}

    def run(*_: Any, env: dict[str, str], **__: Any) -> Any:
        seen.update(env)
        raise OSError

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    selfcheck._check_apart("ssd", CPU, "cpu")
    assert seen["OMP_NUM_THREADS"] == "1"


def test_the_references_products_are_exact_where_a_run_allows_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(selfcheck, "_errors", lambda *_: seen.append(torch.get_float32_matmul_precision()) or {})
    torch.set_float32_matmul_precision("high")
    try:
        selfcheck.check("ssd", CPU, "cpu", (16,))
        assert set(seen) == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_first_problem_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong gradient at the first head size is not put down to a memory that was full at the next."""

    def call(case: cases.Case, dtype: torch.dtype, device: torch.device, backend: str) -> dict[str, torch.Tensor]:
        if backend == "triton" and case.inputs["x"].shape[-1] == 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"d x": torch.ones(1) * (2 if backend == "triton" else 1)}

    monkeypatch.setattr(cases.Case, "call", call)
    found = selfcheck.check("gated_rms_norm", CPU, "triton")
    assert found.detail.startswith("d x float32, head size 64: error 1.0e+00")
    assert found.lasting


def test_every_case_has_all_gradients() -> None:
    case = cases.case("ssd", 16, (0, 3))
    assert {f"d {name}" for name in case.inputs} < case.call(torch.float32, CPU, "cpu").keys()
