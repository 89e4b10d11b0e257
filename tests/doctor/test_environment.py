"""Combinations of packages, drivers and devices that do not work together."""

from __future__ import annotations

from pathlib import Path

import pytest

from halftune.doctor import environment
from halftune.doctor.environment import Check
from halftune.hardware.catalogue import lookup


def failures(monkeypatch: pytest.MonkeyPatch, machine: str, tmp_path: Path, **found: object) -> dict[str, Check]:
    """What fails on a machine; ``cuda``, ``driver`` and versions of packages as given."""
    monkeypatch.setattr(environment, "torch_cuda", lambda: found.get("cuda"))
    monkeypatch.setattr(environment, "driver_version", lambda: found.get("driver"))
    real = environment.version_of
    monkeypatch.setattr(environment, "version_of", lambda name: found.get(name.replace("-", "_"), real(name)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checks = environment.environment(lookup(machine), folder=tmp_path)
    return {one.name: one for one in checks if one.status == "fail"}


@pytest.mark.parametrize(
    ("machine", "cuda", "mended"),
    [
        ("v100", "13.0", "12.6"),  # CUDA 13 begins with Turing
        ("p100", "13.2", "12.6"),
        ("v100", "12.8", "12.6"),
        ("v100", "13", "12.6"),
        ("t4", "13.0", ""),
        ("v100", "12.6", ""),
        ("b200", "12.6", "12.8"),
        ("rtx5090", "12.4", "12.8"),
        ("rtx5090", "12.8", ""),
        ("h100", None, ""),
    ],
)
def test_a_build_without_code_for_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, cuda: str | None, mended: str
) -> None:
    found = failures(monkeypatch, machine, tmp_path, cuda=cuda)
    assert (mended in found["torch"].remedy) if mended else ("torch" not in found)


@pytest.mark.parametrize(
    ("driver", "cuda", "old"), [("570.1", "13.0", True), ("580.1", "13.0", False), ("525", "12.8", False)]
)
def test_a_driver_that_is_older_than_torchs_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, cuda: str, old: bool
) -> None:
    assert ("driver" in failures(monkeypatch, "h100", tmp_path, driver=driver, cuda=cuda)) == old


def test_all_unsupported_versions_are_mended_by_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "versions" not in failures(monkeypatch, "h100", tmp_path)
    found = failures(monkeypatch, "h100", tmp_path, peft="0.10.0", transformers="4.57.1")["versions"]
    assert found.remedy.startswith("pip install ")
    assert "peft<1,>=0.21" in found.remedy
    assert "transformers<6,>=5.21" in found.remedy
    assert "torch" not in found.remedy


@pytest.mark.parametrize(
    ("version", "cuda", "fails"),
    [
        ("2.8.3+cu12torch2.8", "12.8", True),
        ("2.8.3+cu12torch2.13", "12.8", False),
        ("2.8.3+cu11torch2.13", "12.8", True),
    ],
)
def test_a_wheel_for_another_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, cuda: str, fails: bool
) -> None:
    found = failures(monkeypatch, "h100", tmp_path, flash_attn=version, torch="2.13.0", cuda=cuda)
    assert ("flash-attn" in found) == fails
