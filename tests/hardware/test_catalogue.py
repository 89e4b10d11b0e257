"""Made-up machines: their names, counts and mixtures."""

from __future__ import annotations

import pytest

from halftune.core.errors import PlanError
from halftune.hardware.catalogue import ALIASES, CATALOGUE, lookup


@pytest.mark.parametrize("name", [*CATALOGUE, *ALIASES])
def test_every_name_is_found(name: str) -> None:
    hardware = lookup(name)
    assert len(hardware.devices) == 1
    assert hardware.version("torch") == "2.13.0"
    assert hardware.version("flash-attn") is None
    assert (hardware.devices[0].capability is not None) == (hardware.kind == "cuda")


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("t4x2", ["Tesla T4"] * 2),
        ("2xT4", ["Tesla T4"] * 2),
        ("a100+t4", ["NVIDIA A100 80GB", "Tesla T4"]),
        ("RTX4090x8", ["GeForce RTX 4090"] * 8),
        ("rtx 4090", ["GeForce RTX 4090"]),
        ("mi300xx4", ["AMD Instinct MI300X"] * 4),
        ("a100-40x2+h100", ["NVIDIA A100 40GB"] * 2 + ["NVIDIA H100"]),
    ],
)
def test_counts_and_mixtures(name: str, devices: list[str]) -> None:
    assert [device.name for device in lookup(name).devices] == devices


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a10O", "did you mean a10"),
        ("t4x0", "'t4x0'"),
        ("h20x2", "did you mean h200"),
        ("toaster", "known: "),
        ("", "no machine given"),
        ("a100+", "'a100+'"),
        ("t4x99999999", "99,999,999 devices"),
        ("t4x1000+a100x25", "1,025 devices"),
        ("a100+mi300x", "accelerators of one kind"),
        ("cpux2", "accelerators of one kind"),
        ("cpu+t4", "accelerators of one kind"),
    ],
)
def test_what_is_no_machine(name: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        lookup(name)
    assert says in str(caught.value)


def test_packages_can_be_added_and_replaced() -> None:
    hardware = lookup("h100", {"flash-attn": "2.8.3", "torch": "2.11.0"})
    assert (hardware.version("flash-attn"), hardware.version("torch")) == ("2.8.3", "2.11.0")
