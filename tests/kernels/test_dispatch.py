"""Which implementation runs, and why."""

from __future__ import annotations

import itertools

import pytest
import torch

from halftune_kernels import gate, selfcheck
from halftune_kernels.arguments import ArgumentError
from halftune_kernels.dispatch import choose, expected, has_triton, prove, triton_version

CPU, HALF = torch.device("cpu"), torch.bfloat16


def test_a_cpu_gets_the_cpu_path() -> None:
    backend = choose("ssd", CPU, torch.float32)
    assert (backend.name, backend.reason) == ("cpu", "the tensors are on the CPU")


def test_requests_come_before_variables_and_one_operator_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFTUNE_KERNELS", "reference")
    assert choose("ssd", CPU, HALF).reason == "HALFTUNE_KERNELS=reference"
    monkeypatch.setenv("HALFTUNE_KERNELS_SSD", "torch")
    assert choose("ssd", CPU, HALF).reason == "HALFTUNE_KERNELS_SSD=torch"
    assert choose("causal_conv1d", CPU, HALF).name == "reference"
    assert choose("ssd", CPU, HALF, "cpu").reason == "asked for"
    monkeypatch.setenv("HALFTUNE_KERNELS_SSD", "auto")
    assert choose("ssd", CPU, HALF).name == "reference"


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="operator is 'attention', expected one of"):
        choose("attention", CPU, HALF)
    monkeypatch.setenv("HALFTUNE_KERNELS", "cuda")
    with pytest.raises(ArgumentError, match="HALFTUNE_KERNELS is 'cuda', expected one of 'triton'"):
        choose("ssd", CPU, HALF)


def test_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("HALFTUNE_KERNELS", "triton")
    with pytest.raises(ArgumentError, match="HALFTUNE_KERNELS is 'triton', expected cpu"):
        choose("ssd", torch.device("cpu"), torch.float32)
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: True
    )  # what the variable is for; some tensors are not there
    assert choose("ssd", CPU, HALF).name == "cpu"
    with pytest.raises(ArgumentError, match="ssd: requested is 'triton'"):
        choose("ssd", CPU, HALF, "triton")


@pytest.mark.parametrize(
    ("operator", "capability", "version", "dtype", "name", "reason"),
    [
        ("gated_delta_rule", 80, (3, 7, 1), HALF, "triton", "right on this machine"),
        ("gated_delta_rule", 75, (3, 7, 1), torch.float16, "torch", "no tensor-core instructions"),
        ("kda", 89, (3, 7, 1), HALF, "triton", "right on this machine"),
        ("rwkv7", 100, (3, 7, 1), HALF, "triton", "raced before Triton 3.8"),
        ("rwkv7", 75, (3, 7, 1), torch.float16, "torch", "no tensor-core instructions"),
        ("causal_conv1d", 75, (3, 7, 1), torch.float16, "triton", "sm_75"),
        ("causal_conv1d", 75, (3, 7, 1), HALF, "torch", "bfloat16"),
        ("gated_delta_rule", 90, (3, 6, 0), HALF, "triton", "on Hopper"),
        ("gated_delta_rule", 90, (3, 7, 1), HALF, "triton", "warp counts"),
        ("ssd", 90, (3, 7, 1), HALF, "triton", "right on this machine"),
        ("ssd", 100, (3, 7, 1), HALF, "triton", "raced before Triton 3.8"),
        ("ssd", 100, (3, 8, 0), HALF, "triton", "right on this machine"),
        ("ssd", 80, None, HALF, "torch", "not installed"),
        ("ssd", 80, (3, 5, 1), HALF, "torch", "3.5.1 is older than 3.6.0"),
        ("ssd", 61, (3, 7, 1), torch.float16, "torch", "older than sm_70"),
        ("ssd", 80, (3, 7, 1), torch.float64, "torch", "no kernel for torch.float64"),
    ],
)
def test_gpus_that_are_not_here(
    operator: str, capability: int, version: tuple[int, ...] | None, dtype: torch.dtype, name: str, reason: str
) -> None:
    backend = expected(operator, capability, version, dtype)
    assert backend.name == name
    assert reason in backend.reason


def test_a_gpu_proves_itself_once_and_scans_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no verdict can be kept on disk: the second dtype's would come in a training step."""
    checked: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def verdict(operator: str, device: torch.device, *, dtypes: tuple[torch.dtype, ...]) -> selfcheck.Verdict:
        checked.append((operator, dtypes))
        return selfcheck.Verdict(operator, "triton", True, "right", 1.0)

    gpu = torch.device("cuda:7")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("halftune_kernels.dispatch.triton_version", lambda: (3, 7, 1))
    monkeypatch.setattr(selfcheck, "verdict", verdict)
    three = (torch.bfloat16, torch.float16, torch.float32)
    prove(["kda"], gpu, torch.bfloat16)
    for operator, dtype in itertools.product(("kda", "rope"), (*three, torch.bfloat16)):
        assert choose(operator, gpu, dtype).reason.endswith("self-check passed")
    assert checked == [*(("kda", (dtype,)) for dtype in three), ("rope", selfcheck.DTYPES)]


def test_the_gate_covers_operators_that_exist_and_versions_in_order() -> None:
    for row in gate.ROWS:
        assert row.capabilities[0] < row.capabilities[1]
        assert row.versions[0] < row.versions[1]
    assert has_triton("gated_delta_rule")
    version = triton_version()
    assert version is None or version >= gate.OLDEST_TRITON
