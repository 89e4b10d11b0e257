"""The compile table resumes where it was stopped, forgets what is out of date, and writes one row for each cut."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

from compile_check import Compiled

from halftune_kernels.dispatch import OPERATORS, has_triton
from halftune_kernels.launch import Config
from halftune_kernels.ops.ssd import triton

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "compile_table.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with an empty cache and a page of its own."""
    spec = importlib.util.spec_from_file_location("compile_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compile_table", module)
    spec.loader.exec_module(module)
    monkeypatch.setenv("HALFTUNE_CACHE", str(tmp_path))
    page = tmp_path / "kernels.md"
    page.write_text(f"before\n{module.BEGIN}\nold rows\n{module.END}\nafter\n")
    monkeypatch.setattr(module, "PAGE", page)
    return module


def needs(gpu: int, kernel: str = "solve", shared: int = 2048, spills: int = 0, cut: str = "4 warps") -> Compiled:
    return Compiled(kernel, gpu, shared, 101_376, 128, spills, True, cut)


def test_every_operator_with_kernels_is_covered_and_refused_gpus_are_not(script: ModuleType) -> None:
    found = list(script.combinations([x for x in OPERATORS if has_triton(x)], script.DTYPES, script.SIZES, [75, 80]))
    assert {one.operator for one in found if one.gpu == 80} == set(OPERATORS) - {"float8_rows"}  # from sm_89
    elementwise = {"causal_conv1d", "gated_rms_norm", "rms_norm", "gated_activation", "rope", "linear_cross_entropy"}
    assert {one.operator for one in found if one.gpu == 75} == elementwise
    assert not any(one.dtype == "bfloat16" for one in found if one.gpu == 75)
    every = list(script.combinations(["kda", "gated_rms_norm"], script.DTYPES, script.SIZES, [75, 86, 89]))
    assert (
        {one.size for one in every if one.gpu == 86} == {one.size for one in every if one.gpu == 75} == {*script.SIZES}
    )
    assert {one.size for one in every if one.gpu == 89} == {128}
    assert {one.size for one in every if one.gpu == 86 and one.dtype == "float16"} == {128, 256}


def test_what_makes_the_sample_no_sample_is_said(script: ModuleType) -> None:
    one = script.Combination("kda", "float32", 128, 86)
    found = {one: [needs(86)], one._replace(gpu=89): [needs(89)]}
    assert not list(script.differences(found))
    found[one._replace(gpu=89)] = [needs(89, spills=8)]
    assert list(script.differences(found)) == ["kda-float32-128-sm89: solve 2,048 / 128 / 8, not 2,048 / 128 / 0"]


def test_a_second_call_compiles_only_what_changed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--operators", "kda", "ssd", "--gpus", "80", "--sizes", "64", "--dtypes", "bfloat16"]
    compiled: list[str] = []

    def compile_one(one: tuple[str, str, int, int], only: Collection[str]) -> list[Compiled]:
        compiled.append(one[0])
        return [needs(one[3])]

    monkeypatch.setattr(script, "compiled", compile_one)
    assert script.main(asked) == 0
    assert compiled == ["kda", "ssd"]
    assert script.main(asked) == 0
    assert compiled == ["kda", "ssd"]
    before = script.fingerprint
    monkeypatch.setattr(
        script, "fingerprint", lambda operator, kernel: "new" if operator == "kda" else before(operator, kernel)
    )
    script.main(asked)
    assert compiled == ["kda", "ssd", "kda"]
    monkeypatch.setattr(script, "fingerprint", lambda operator, kernel: "newer")
    script.main([*asked, "--minutes", "0"])
    assert compiled == ["kda", "ssd", "kda"]


def test_another_cut_compiles_its_kernel_again_where_it_is_used(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--operators", "ssd", "--gpus", "80", "90", "--sizes", "64", "128", "--dtypes", "float32", "bfloat16"]
    again: list[tuple[str, set[str]]] = []

    def compile_one(one: Any, only: Collection[str]) -> list[Compiled]:
        again.append((one.key, set(only)))
        return [needs(one.gpu, name, spills=len(again)) for name in only or ("prepare", "scan_forward")]

    monkeypatch.setattr(script, "compiled", compile_one)
    script.main(asked)
    assert len(again) == 8
    rows = triton.CONFIGS["scan_forward", False]
    monkeypatch.setitem(triton.CONFIGS, ("scan_forward", False), ((64, (90,), Config(16, 2, 1)), *rows))
    script.main([*asked, "--minutes", "0", "--write"])
    page = script.PAGE.read_text()
    assert "\n7 of " in page
    assert ": ssd, float32, head size 64 (sm_90)." in page
    script.main(asked)
    assert again[8:] == [("ssd-float32-64-sm90", {"scan_forward"})]
    one = script.Combination("ssd", "float32", 64, 90)
    kernels, stale = script.Kept(script.cache_dir() / "compiled").get(one)
    assert not stale
    assert [(kernel.kernel, kernel.spills) for kernel in kernels][1] == ("scan_forward", 9)


def test_a_kernel_is_of_what_it_calls_and_of_no_comment_or_cut(script: ModuleType) -> None:
    plain = script.without_cuts("A = 1\nCONFIGS: dict[str, Rows] = {}\n")
    assert plain == script.without_cuts("# a word\nA = 1\nCONFIGS: dict[str, Rows] = {'scan': SCAN}\n")
    assert plain != script.without_cuts("A = 2\nCONFIGS: dict[str, Rows] = {}\n")
    own = "def scan(x):\n    return _part(x)\ndef _part(x):\n    return x * LEAST\ndef solve(x):\n    return x\n"
    scan = script.closure("scan", own, "LEAST = 2")
    assert scan == script.closure("scan", own.replace("return x\n", "return -x\n"), "LEAST = 2")
    assert scan != script.closure("scan", own.replace("x * ", "x + "), "LEAST = 2")
    assert scan != script.closure("scan", own, "LEAST = 3")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("chunk_kernels", "live = place * C + c < here.length", "live = c < left"),
        ("chunk_kernels", "class Tile(NamedTuple):", "class Tile(tuple):"),
        ("delta_kernels", "count = tl.cdiv(here.length, C)", "count = here.length // C"),
        ("chunk_launch", "CHUNK = 64", "CHUNK = 32"),
    ],
)
def test_what_scans_share_is_part_of_a_scan(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, before: str, after: str
) -> None:
    package = tmp_path / "package"
    shutil.copytree(script._package(), package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(script, "_package", lambda: package)
    scan, conv = script.fingerprint("kda", "scan_backward"), script.fingerprint("causal_conv1d", "conv_backward")
    source = package / "scan" / f"{file}.py"
    assert before in source.read_text()
    source.write_text(source.read_text().replace(before, after))
    script.fingerprint.cache_clear()
    assert scan != script.fingerprint("kda", "scan_backward")
    assert conv == script.fingerprint("causal_conv1d", "conv_backward")


def test_a_kernel_that_is_a_trap_does_not_fit(script: ModuleType) -> None:
    assert needs(100).fits
    assert not dataclasses.replace(needs(100), tensor_memory=640).fits


def test_the_page_has_a_row_for_each_cut_and_names_what_does_not_fit(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_one(one: tuple[str, str, int, int], only: Collection[str]) -> list[Compiled]:
        gpu = one[3]
        return [needs(gpu, "solve", spills=8), needs(gpu, "scan", 204_800, cut=f"{gpu // 10} warps")]

    monkeypatch.setattr(script, "compiled", compile_one)
    asked = ["--operators", "rwkv7", "--gpus", "80", "90", "--sizes", "64", "--dtypes", "bfloat16"]
    assert script.main([*asked, "--write"]) == 1
    assert "rwkv7-bfloat16-64-sm80: scan needs 204,800 bytes of 101,376" in capsys.readouterr().out
    page = script.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old rows" not in page
    assert "| rwkv7 | bfloat16 | 4 | 2 | 8 | `solve`, head size 64, sm_80 |" in page
    assert "**rwkv7, bfloat16**" in page
    assert "| 64 | solve | 4 warps | 2 / 128 / 8 | 2 / 128 / 8 |" in page
    assert "| 64 | scan | 8 warps | 200 / 128 / 0 **does not fit** |  |" in page
    assert "| 64 | scan | 9 warps |  | 200 / 128 / 0 **does not fit** |" in page
