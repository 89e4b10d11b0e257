"""Every bad input of the table gets its sentence and its exit code, without a wait for torch where none is needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bad_inputs.case import RECIPE, ROW, TRAIN, Answer, Case, attempt
from bad_inputs.page import page
from bad_inputs.table import CASES
from patience import LIMIT

HERE = Path(__file__).parent
CODE = re.compile(r" \[([a-z]+\.[a-z_0-9]+)\]$", re.MULTILINE)
DOCS = HERE.parent.parent / "docs" / "reference" / "errors.md"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What every case gets: those that need no torch in one process that never imported it, the others here.

    All of them here first: architectures are built without a process for each, and kept on disk.
    """
    os.environ["HALFTUNE_BAD_INPUT_RUNS"] = str(tmp_path_factory.mktemp("runs"))
    here = {case.name: attempt(case) for case in CASES}
    del os.environ["HALFTUNE_BAD_INPUT_RUNS"]
    command = [sys.executable, "-m", "bad_inputs", "quick"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: Answer(*answer[:3]) for name, answer in json.loads(done.stdout).items()}
    return here | found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, answers: dict[str, Answer]) -> None:
    answer = answers[case.name]
    assert answer.code == case.code, answer.message
    assert "Traceback" not in answer.message
    for part in case.says:
        assert part in answer.message
    assert tuple(CODE.findall(answer.message)) == case.error
    assert case.needs_torch or not answer.torch, "the user waited for torch"


BEFORE_TRAINING = [case for case in CASES if case.command == TRAIN and case.code and not case.needs_torch]


@pytest.mark.parametrize("case", BEFORE_TRAINING, ids=lambda case: case.name)
def test_plan_refuses_what_train_refuses(case: Case, answers: dict[str, Answer]) -> None:
    planned = attempt(replace(case, command="plan --config x.yaml"))
    said = answers[case.name].message.replace("halftune train: ", "halftune plan: ", 1)
    assert (planned.code, planned.message) == (case.code, said)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_page_is_up_to_date(answers: dict[str, Answer]) -> None:
    assert DOCS.read_text(encoding="utf-8") == page(answers), (
        "run: python scripts/errors_page.py > docs/reference/errors.md"
    )


def test_every_problem_is_reported_at_once() -> None:
    recipe = RECIPE.replace("max_steps", "max_stepz").replace("fp32", "fp31").replace("rows.jsonl", "gone.jsonl")
    answer = attempt(Case("several", recipe + "  seed: x\n"))
    assert answer.code == 2
    for part in ("max_stepz", "fp31", "gone.jsonl", "training.seed"):
        assert part in answer.message


def run(folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which ``halftune`` is the command, with a small recipe in the folder."""
    (folder / "x.yaml").write_text(RECIPE)
    (folder / "rows.jsonl").write_text(ROW)
    start = f"halftune() {{ {shlex.quote(sys.executable)} -c 'from halftune.cli import main; main()' \"$@\"; }}\n"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    line = ["bash", "-o", "pipefail", "-c", start + command]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("halftune schema | head -1 > /dev/null", (0, 141), ""),
        ("halftune schema > /dev/full", (5,), "the disk is full"),
        ("halftune plan --config x.yaml >&-", (0,), ""),
        ("halftune plan --config x.yaml >&- 2>&-", (0,), ""),
        ("halftune chat gone <&-", (3,), "[config.not_a_run_folder]"),
        ("halftune train --config gone.yaml --traceback", (2,), "Traceback"),
        ("HALFTUNE_TRACEBACK=1 halftune train --config gone.yaml", (2,), "Traceback"),
    ],
)
def test_streams_and_tracebacks(command: str, code: tuple[int, ...], said: str, tmp_path: Path) -> None:
    done = run(tmp_path, command)
    assert done.returncode in code, done.stderr
    assert said in done.stderr
    assert said == "Traceback" or "Traceback" not in done.stderr


def test_output_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    done = run(tmp_path, "halftune train --config gone.yaml", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert r"gone.yaml: no such file \xb7 " in done.stderr


BROKEN = (
    "import halftune.cli.verbs.plan as plan; plan.load_from = lambda args: 1 / 0; from halftune.cli import main; main()"
)


@pytest.mark.parametrize("writable", [True, False])
def test_a_bug_is_one_sentence_and_a_file(writable: bool, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    if not writable:
        cache.write_text("a file")
    variables = {**os.environ, "HALFTUNE_CACHE": str(cache), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", BROKEN, "plan", "--config", "x.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert "a bug in halftune: ZeroDivisionError: division by zero" in done.stderr
    (file,) = tmp_path.rglob("*.txt")
    assert str(file) in done.stderr
    text = file.read_text()
    assert "Traceback" in text
    assert "command: -c plan --config x.yaml" in text
    shown = subprocess.run(
        [*command, "--traceback"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert shown.returncode == 70
    assert "Traceback" in shown.stderr
