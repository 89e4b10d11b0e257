"""The scripts that measure: what they say is what happened."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of scripts/bench or scripts by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "bench"))
    before = set(sys.modules)

    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(SCRIPTS)):
            del sys.modules[name]


def test_sides_take_turns_and_the_ratio_is_of_rounds(scripts: Any) -> None:
    harness, calls = scripts("harness"), []
    values = {"one": iter([9, 2, 4, 60]), "two": iter([9, 1, 1, 2])}

    def side(name: str) -> Any:
        return lambda: calls.append(name) or next(values[name])

    found = harness.in_turn({name: side(name) for name in values}, rounds=3, warm=1)
    assert calls == ["one", "two"] * 4
    assert found == {"one": [2, 4, 60], "two": [1, 1, 2]}
    assert harness.ratio(found, "one", "two") == 4


def test_forked_ranks_answer_and_failures_are_told(scripts: Any) -> None:
    harness = scripts("harness")
    assert harness.forked(2, lambda rank: [rank, os.environ["RANK"], os.environ["WORLD_SIZE"]]) == [
        [0, "0", "2"],
        [1, "1", "2"],
    ]
    with pytest.raises(SystemExit, match="failed"):
        harness.forked(2, lambda rank: 1 // rank)


def test_a_case_has_a_process_of_its_own(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPTS / 'bench')!r})\n"
        "import json, os, harness\nwords = harness.case()\n"
        "print('noise'); print(json.dumps({'pid': os.getpid(), 'half': 6 // int(words[0])}))\n"
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    harness = scripts("harness")
    found = harness.fresh(2)
    assert found["half"] == 3
    assert found["pid"] != os.getpid()
    assert "ZeroDivisionError" in harness.fresh(0)["note"]


def test_the_page_keeps_its_words(scripts: Any, tmp_path: Path) -> None:
    replace, page = scripts("harness").replace_section, tmp_path / "page.md"
    text = "a\n<!-- bench -->\nold\n<!-- /bench -->\nb\n<!-- growth -->\n<!-- /growth -->\n"
    page.write_text(text)
    for _ in range(2):
        replace(page, "bench", "new")
        assert page.read_text() == text.replace("old", "new")
    with pytest.raises(SystemExit, match="no section"):
        replace(page, "peers", "new")


def test_the_real_page_has_every_section_and_each_command_a_script(scripts: Any) -> None:
    page = scripts("page")
    text = page.PAGE.read_text(encoding="utf-8")
    for name, command in page.SECTIONS.items():
        assert f"<!-- {name} -->" in text
        assert f"<!-- /{name} -->" in text
        assert command.startswith("-m halftune ") or (SCRIPTS.parent / command.split()[0]).is_file()


def test_a_case_that_ended_leaves_a_gap_in_the_table(scripts: Any) -> None:
    ours, theirs = {"cpu": 3000.0, "peak": 2**30}, {"note": "ended at 20 GiB"}
    row = scripts("beside_trainer").growth_row(4096, 512, ours, theirs)
    assert row == "| 4,096 | 512 | 3,000 | ended at 20 GiB | – | 1.00 | – |"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-7b", 7.616),
        ("llama-3.1-8b", 8.030),
        ("qwen3.5-9b", 8.954),
    ],
)
def test_models_of_the_gpu_table_have_the_published_number_of_weights(scripts: Any, name: str, billions: float) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**scripts("gpu_step").sizes(name, 0)))
    assert sum(one.numel() for one in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)


def test_the_gpu_table_compares_with_the_trainer(scripts: Any) -> None:
    ours = {"model": "a", "way": "fused", "layers": 0, "median": 3000.0, "predicted": 4000.0, "peak": 2**30, "mfu": 0.5}
    theirs = {"model": "a", "way": "trainer", "layers": 0, "median": 1500.0, "peak": 2**31}
    failed = {"model": "a", "way": "fp8", "layers": 0, "note": "not here"}
    lines = scripts("gpu_step").table([ours, failed, theirs]).splitlines()[2:]
    assert [one.split(" | ")[1:] for one in lines] == [
        ["3,000", "4,000", "2.00", "1.0", "–", "50% |"],
        ["not here", "–", "–", "–", "–", "– |"],
        ["1,500", "–", "–", "2.0", "–", "– |"],
    ]


def test_cases_of_the_memory_estimate_are_recipes(scripts: Any, tmp_path: Path) -> None:
    from halftune.config.load import load_config

    memory = scripts("memory_estimate")
    (tmp_path / "recipe.yaml").write_text(memory.RECIPE)
    cases = memory.yaml.safe_load(memory.CASES.read_text())
    for one in (one for table in cases.values() for one in table.values()):
        words = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in one.items()]
        load_config(tmp_path / "recipe.yaml", words, look_at_files=False)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_torch_sends_what_the_formulas_say(scripts: Any, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    scaling = scripts("scaling")
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test may have trained alone in this process
    monkeypatch.setattr(scaling, "ROWS", 2)
    monkeypatch.setattr(scaling, "LENGTH", 32)
    for told in scaling.run("full", strategy, 2):
        assert told["sent"] == pytest.approx(told["expected"], abs=1000)  # beside them a few sums of numbers
        assert told["sent"] > 1e6


def test_code_lines_complexity_and_duplicates_are_counted(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = scripts("code_numbers")
    body = '    """Docs\n    in two lines."""\n    # a comment\n\n    if x and y or z:\n        return 1\n' + "".join(
        f"    value_{n} = call({n})\n" for n in range(6)
    )
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    for name in ("one", "two"):
        (tmp_path / "kernels").mkdir(exist_ok=True)
        (tmp_path / "kernels" / f"{name}.py").write_text(f"def {name}(x, y, z):\n{body}")
    assert len(numbers.code_lines(tmp_path / "kernels" / "one.py")) == 9
    assert numbers.complexity(ast.parse(f"def f(x, y, z):\n{body}").body[0]) == 4
    assert numbers.duplicates() == ["kernels/one.py:6 ~ kernels/two.py:6"]
    assert numbers.lines_per_package()["kernels"] == 18
