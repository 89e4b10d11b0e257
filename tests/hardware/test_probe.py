"""The probe, on made-up drivers and system files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from halftune.hardware import Device, probe
from halftune.hardware import probe as host
from halftune.hardware import probe as nvidia
from halftune.hardware import probe as sysfs
from halftune.hardware.probe import TorchBuild, accelerators

CARDS = [
    ("NVIDIA A100", (8, 0), "GPU-aaaa1111"),
    ("NVIDIA A100", (8, 0), "GPU-aaaa2222"),
    ("Tesla T4", (7, 5), "GPU-bbbb"),
]
CUDA, CPU_ONLY = TorchBuild("2.13.0", frozenset({"cuda"})), TorchBuild("2.13.0+cpu", frozenset())


def unsupported(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """An NVML with three devices; a handle is its index."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = list(CARDS)
    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(found),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: found[handle][0],
        "nvmlDeviceGetUUID": lambda handle: found[handle][2],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: found[handle][1],
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=(handle + 1) * 2**30),
        "nvmlDeviceGetMigMode": unsupported,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": unsupported,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    return found


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, [0, 1, 2]),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-bbbb", [2]),
        ("GPU-aaaa2222,0", [1, 0]),
        ("GPU-b", [2]),
        ("GPU-aaaa", []),  # names two devices
        ("", []),
        ("-1", []),
        ("0,-1,2", [0]),  # CUDA stops at the first that names no device
        ("0,7,1", [0]),
        ("1,1", [1]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices(
    cards: list, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[int]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices, notes = nvidia.nvidia_devices()
    assert [device.memory_bytes >> 30 for device in devices] == [index + 1 for index in names]
    assert bool([note for note in notes if "hidden" in note]) is (not names)


def test_devices_that_differ_need_one_order(cards: list, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in nvidia.nvidia_devices()[1][0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert nvidia.nvidia_devices()[1] == []
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert nvidia.nvidia_devices()[1] == []


def test_a_mig_instance_has_its_own_memory_and_its_parents_capability(
    cards: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: 2 if uuid == "MIG-1" else unsupported())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", lambda handle: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert nvidia.nvidia_devices()[0] == [Device("cuda", "Tesla T4", 3 * 2**30, capability=(8, 0))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    assert nvidia.nvidia_devices()[0] == []


def test_a_device_without_memory_of_its_own_has_the_hosts(cards: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", unsupported)
    assert nvidia.nvidia_devices()[0][0].memory_bytes == host.host_memory_bytes()


def test_without_a_driver_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", unsupported)
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path / "version")
    assert nvidia.nvidia_devices() == ([], [])
    (tmp_path / "version").write_text("NVRM")
    assert "NVML fails" in nvidia.nvidia_devices()[1][0]


def test_a_gpu_that_torch_cannot_use_is_named_with_the_remedy(cards: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    devices, notes = accelerators(CPU_ONLY)
    assert devices == ()
    assert notes[0].startswith("2 × NVIDIA A100 cannot be used: torch 2.13.0+cpu")
    assert "reinstall torch 2.13.0 with CUDA" in notes[0]
    devices, notes = accelerators(CUDA)
    assert [device.name for device in devices] == ["NVIDIA A100"] * 2
    assert notes == []
    assert accelerators(None)[0] == ()
    assert "torch is not installed" in accelerators(None)[1][0]


def node(root: Path, number: int, properties: dict[str, int], memory: int = 0, name: str = "") -> None:
    folder = root / f"class/kfd/kfd/topology/nodes/{number}"
    (folder / "mem_banks/0").mkdir(parents=True)
    (folder / "properties").write_text("".join(f"{key} {value}\n" for key, value in properties.items()))
    (folder / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {memory}\n")
    (folder / "name").write_text(name)


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    node(tmp_path, 0, {"cpu_cores_count": 64, "simd_count": 0, "gfx_target_version": 0})
    node(tmp_path, 1, {"simd_count": 1216, "gfx_target_version": 90402}, 192 << 30, "aqua_vanjaram")
    node(tmp_path, 2, {"simd_count": 440, "gfx_target_version": 90010}, 64 << 30)
    node(tmp_path, 10, {"simd_count": 192, "gfx_target_version": 110000}, 24 << 30)
    return tmp_path


def test_amd_devices(amd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(d.arch, d.memory_bytes >> 30) for d in sysfs.amd_devices(amd)] == [
        ("gfx942", 192),
        ("gfx90a", 64),
        ("gfx1100", 24),
    ]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert [device.arch for device in sysfs.amd_devices(amd)] == ["gfx90a"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert sysfs.amd_devices(amd) == []
    assert sysfs.amd_devices(amd / "nothing") == []


def test_intel_devices(tmp_path: Path) -> None:
    for card, vendor, kind in (
        ("card0", "0x8086", "0x030000"),
        ("card1", "0x10de", "0x030000"),
        ("card0-HDMI-A-1", "", ""),
    ):
        (tmp_path / "class/drm" / card / "device").mkdir(parents=True)
        (tmp_path / "class/drm" / card / "device/vendor").write_text(vendor)
        (tmp_path / "class/drm" / card / "device/class").write_text(kind)
    (tmp_path / "class/drm/card0/lmem_total_bytes").write_text("0x400000000\n")
    assert [(d.kind, d.memory_bytes >> 30) for d in sysfs.intel_devices(tmp_path)] == [("xpu", 16)]


def test_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(probe.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(probe.platform, "mac_ver", lambda: ("14.5", ("", "", ""), ""))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="Apple M2\n"))
    (device,) = accelerators(TorchBuild("2.13.0", frozenset()))[0]
    assert (device.kind, device.name, device.features) == ("mps", "Apple M2", frozenset({"macos13", "macos14"}))
    monkeypatch.setattr(probe.platform, "machine", lambda: "x86_64")
    assert accelerators(TorchBuild("2.2.0", frozenset()))[0] == ()


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("model name\t: Xeon\nflags\t: fpu avx512_bf16 amx_bf16 amx_tile\n", {"avx512_bf16", "amx_bf16"}),
        ("model name\t: Xeon\nflags\t: fpu avx512_bf16\n", {"avx512_bf16"}),
        ("vendor_id\t: AuthenticAMD\nmodel name\t: EPYC\nflags\t: avx512_bf16\n", {"avx512_bf16", "amd"}),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", {"bf16"}),
        ("", set()),
    ],
)
def test_cpu_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, features: set[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    assert host.cpu_device(1).features == features


@pytest.mark.parametrize(
    ("membership", "files", "memory_gib", "cores"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(3 << 30), "a/cpu.max": "150000 100000"}, 3, 2),
        ("0::/gone\n", {"memory.max": str(2 << 30), "cpu.max": "50000 100000"}, 2, 1),
        ("4:memory:/x\n2:cpu,cpuacct:/x\n", {"memory/x/memory.limit_in_bytes": str(1 << 30)}, 1, 8),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, 16, 8),
        ("", {}, 16, 8),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], memory_gib: int, cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    (tmp_path / "cgroup").write_text(membership)
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(total=16 << 30))
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert (host.host_memory_bytes() >> 30, host.cpu_cores()) == (memory_gib, cores)


def test_this_machine_is_found_without_torch() -> None:
    code = (
        "import sys; from halftune.hardware.probe import probe; hw = probe(); "
        "assert hw.devices and hw.cpu_cores > 0 and hw.version('torch'); "
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
