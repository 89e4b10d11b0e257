"""The commands from Python: the same checks, results that can be used, rows and rewards of the caller's own."""

from __future__ import annotations

import copy
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halftune import api
from halftune.train.callback import Callback
from halftune.train.callbacks.loss_plot import LossPlot

ROWS = [{"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}", "answer": str(2 * n)} for n in range(12)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LossPlot, "_draw", lambda *_: None)


def recipe(**sections: Any) -> dict[str, Any]:
    training = {"output_dir": "run", "max_steps": 2, "per_device_train_batch_size": 2, "save_steps": 1}
    return {
        "model": {"name_or_path": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 2},
        "data": {"train": "builtin:python-docs", "max_length": 64},
        "training": training | sections.pop("training", {}),
        "logging": {"progress": False},
        "generation": {"max_new_tokens": 4},
        **sections,
    }


class Steps(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, run: Any, metrics: Any) -> None:
        self.losses.append(metrics.loss)


def test_a_run_from_rows_to_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    config = api.load_config(recipe(), "training.learning_rate=1e-2", rows=ROWS)
    assert config.run.training.learning_rate == 1e-2
    steps = Steps()
    result = api.train(config, callbacks=[steps])
    assert capsys.readouterr().out == ""
    losses = [line["loss"] for line in result.metrics if "loss" in line]
    assert losses == pytest.approx(steps.losses)
    assert len(losses) == 2
    assert isinstance(result.chat("What is 1 and 1?"), str)
    assert isinstance(result.chat("What is 1 and 1?", base=True), str)
    assert (result.export("merged") / "config.json").is_file()
    again = api.train(api.load_config(recipe(), "training.learning_rate=1e-2", rows=ROWS))
    assert again.metrics == result.metrics  # it was complete
    longer = api.load_config(recipe(training={"max_steps": 3}), "training.learning_rate=1e-2", rows=ROWS)
    assert [line["step"] for line in api.train(longer).metrics if "loss" in line] == [1, 2, 3]
    assert api.open_result("run").folder == Path("run").absolute()


def alternate(completions: list[str], **_: Any) -> list[int]:
    return [n % 2 for n, _ in enumerate(completions)]


def test_a_reward_is_a_function_of_a_file() -> None:
    method = {"type": "grpo", "rewards": [alternate], "num_generations": 2, "max_completion_length": 4}
    result = api.train(api.load_config(recipe(method=method), rows=ROWS))
    assert [line["reward"] for line in result.metrics if "reward" in line] == [0.5, 0.5]
    with pytest.raises(api.HalftuneError) as refused:
        api.load_config(recipe(method={**method, "rewards": [lambda **_: [1]]}))
    assert refused.value.code == "config.bad_reward"


def test_a_plan_reads_like_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    plan = api.plan(recipe(precision="auto"), hardware="t4")
    assert plan.precision.compute.value == "fp16"
    assert "Tesla T4" in str(plan)
    assert "<pre>" in plan._repr_html_()
    with pytest.raises(api.HalftuneError) as refused:
        api.plan(recipe(precision="bf16"), hardware="t4")
    assert refused.value.code


def test_several_processes_are_for_the_command() -> None:
    with pytest.raises(api.HalftuneError) as refused:
        api.train(recipe(distributed={"num_processes": 2}))
    assert refused.value.code == "cli.several_processes"


def test_planning_imports_no_torch() -> None:
    code = f"import sys\nfrom halftune import api\napi.plan({recipe()!r})\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.nightly
def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "python.md"
    (block,) = [part.partition("```")[0] for part in page.read_text().split("```python\n")[1:]]
    exec(compile(block, str(page), "exec"), {})
    assert "Tesla T4" in capsys.readouterr().out
    assert Path("models/from-python/config.json").is_file()


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    """Each cell prints what the notebook shows, but for numbers that depend on the processor."""
    root = Path(__file__).parents[2]
    stored = json.loads((root / "docs" / "tutorials" / "python.ipynb").read_text(encoding="utf-8"))
    notebook = copy.deepcopy(stored)
    runpy.run_path(str(root / "scripts" / "notebook.py"))["run"](notebook)
    for cell, before in zip(notebook["cells"], stored["cells"], strict=True):
        assert [one["output_type"] for one in cell.get("outputs", ())] == [
            one["output_type"] for one in before.get("outputs", ())
        ]
    (answers,) = [
        output["data"]["text/plain"]
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result" and "France" in str(output["data"])
    ]
    assert "Paris" in "".join(answers)
    assert Path("models/capitals/config.json").is_file()
