"""The script for a machine with a GPU names only files that are there: nobody here would see it fail."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from halftune_kernels.dispatch import OPERATORS, has_triton

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "gpu_check.sh"


def test_its_files_exist_and_it_parses() -> None:
    text = SCRIPT.read_text()
    named = re.findall(r"\b(?:tests|scripts|configs)/[\w/]+\.(?:py|sh|yaml)", text)
    recipes = re.findall(r'^ +trains \S+ \d+ "?([\w/${}]+\.yaml)', text, re.MULTILINE)
    models = re.findall(r'^hybrids="([^"]+)"', text, re.MULTILINE)[0].split()
    assert len(named) > 5
    assert len(recipes) == 7
    named += [f"configs/{recipe.replace('${model}', model)}" for recipe in recipes for model in models]
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def test_every_test_for_a_gpu_is_in_it() -> None:
    marked = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    left = [
        path
        for path in marked
        if path != Path(__file__) and str(path.relative_to(REPOSITORY)) not in SCRIPT.read_text()
    ]
    assert left == []


def test_every_operator_with_a_kernel_checks_itself() -> None:
    listed = re.search(r"for operator in ([\w\s\\]+); do", SCRIPT.read_text())
    assert listed is not None
    assert set(listed[1].replace("\\", "").split()) == {one for one in OPERATORS if has_triton(one)}


def test_parts_whose_packages_are_too_old_are_left_out(tmp_path: Path) -> None:
    old = tmp_path / "transformers-4.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0\n")
    asked = {"GPU_CHECK_DRY": "1", "GPU_CHECK_ONLY": "^plan$", "GPU_CHECK_OUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", SCRIPT], env=os.environ | asked | {"PYTHONPATH": str(tmp_path)}, check=False)
    left = [line.split()[1:4] for line in (tmp_path / "out" / "summary.txt").read_text().splitlines()]
    assert ["plan:", "transformers", "4.0,"] in left
    assert done.returncode == 1, "nothing passed"
