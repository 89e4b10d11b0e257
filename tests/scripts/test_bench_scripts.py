"""The scripts that compare frameworks and rewrite the page of measurements: what they measure is what happened."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of scripts/bench by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("peer", "peers", "page", "growth"):
            del sys.modules[name]


TRAINS = """\
import torch
embedding, head = torch.nn.Embedding(2000, 4), torch.nn.Linear(4, 1)
embedding.weight.requires_grad = False
optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters()])
for step in range(5):
    ids = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]])
    with torch.autocast("cpu", torch.bfloat16):
        head(embedding(ids)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
embedding.eval()
embedding(ids)
"""


def test_a_training_script_is_measured_from_outside(scripts: Any, tmp_path: Path) -> None:
    measure = scripts("peer.measure")
    (tmp_path / "train.py").write_text(TRAINS)
    found = measure.run_measured([sys.executable, str(tmp_path / "train.py")], tmp_path, threads=1, timeout=120)
    numbers = measure.summary(found, warm_up=2)
    assert numbers["rc"] == 0
    assert (numbers["num_steps"], numbers["measured_steps"]) == (5, 3)
    assert (numbers["tokens_per_step"], numbers["real_per_step"]) == (8, 4)
    assert numbers["trained"] == 5  # the frozen embedding is not trained
    assert (numbers["weights"], numbers["trained_dtypes"], numbers["autocast"]) == ("float32", ["float32"], "bfloat16")
    assert 0 < numbers["cpu_to_first_step"] <= numbers["cpu_seconds"] + 0.05
    assert numbers["peak_rss_bytes"] > 2**26


def test_a_command_that_hangs_is_ended(scripts: Any, tmp_path: Path) -> None:
    measure = scripts("peer.measure")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    found = measure.run_measured(command, tmp_path, threads=1, timeout=1.5)
    assert found["rc"] == 124
    assert found["steps"] == []


def test_summary_leaves_the_first_steps_out(scripts: Any) -> None:
    summary = scripts("peer.measure").summary
    steps = [
        {"time": 100.0 + i, "cpu": 10.0 + (5 if i else 0) + 0.5 * i, "tokens": 20 * (i + 1), "real": 10 * (i + 1)}
        for i in range(6)
    ]
    first = {"rss": 1, "cpu_before": 2.0, "trained": 3, "trained_dtypes": [], "weights": "", "autocast": ""}
    steps = [{**first, "optimizer": "AdamW", **step} for step in steps]
    found = {"rc": 0, "began": 99.0, "wall_seconds": 9, "cpu_seconds": 20, "peak_rss_bytes": 1, "steps": steps}
    numbers = summary(found, warm_up=2)
    assert numbers["cpu_to_first_step"] == 12.0
    assert numbers["wall_to_first_step"] == 1.0
    assert numbers["measured_steps"] == 4
    assert numbers["tokens_per_cpu_second"] == 20.0  # the expensive second step is not in it
    assert numbers["tokens_per_second"] == 10.0


def test_ratios_are_to_the_best_other_framework(scripts: Any) -> None:
    def result(name: str, speed: float, rc: int = 0) -> dict[str, Any]:
        return {
            "framework": name,
            "model": "3M",
            "precision": "fp32",
            "packed": False,
            "rc": rc,
            "tokens_per_cpu_second": speed,
        }

    results = [result("halftune", 300), result("trl", 100), result("plain", 150), result("axolotl", 900, rc=1)]
    rows = [line for line in scripts("peer.tables").speeds(results).splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]] == ["halftune", "plain", "trl", "axolotl"]
    assert rows[1].split(" | ")[2] == "2.00"
    assert rows[3].split(" | ")[2] == "0.67"
    assert rows[4].endswith("| 1 |")  # what failed does not count as the best


def test_every_framework_is_asked_for_the_same(scripts: Any, tmp_path: Path) -> None:
    frameworks, job = scripts("peer.frameworks"), scripts("peer.job")
    (tmp_path / "model").mkdir()
    sizes = ("vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    more = ("intermediate_size", "max_position_embeddings", "rms_norm_eps")
    (tmp_path / "model" / "config.json").write_text(json.dumps(dict.fromkeys((*sizes, *more), 7)))
    asked = job.Job(tmp_path / "model", tmp_path / "data", tmp_path, "bf16", True, 3, 77, 11, learning_rate=0.125)
    for name, framework in frameworks.FRAMEWORKS.items():
        words = framework.command(tmp_path / name, asked)
        text = " ".join(words)
        if name != "plain":
            text = (tmp_path / "job.yaml").read_text()
            assert "0.125" in text, name
            assert '"bf16"' in text or '"bfloat16"' in text, name
        for number in ("77", "11", "0.125"):
            assert number in text, (name, number)


def test_the_page_keeps_its_words(scripts: Any) -> None:
    page = scripts("page")
    text = "a\n<!-- bench -->\nold\n<!-- /bench -->\nb\n<!-- growth -->\n<!-- /growth -->\n"
    assert page.replaced(text, "bench", "new") == text.replace("old", "new")
    assert page.replaced(page.replaced(text, "bench", "new"), "bench", "new") == text.replace("old", "new")
    with pytest.raises(SystemExit, match="no section"):
        page.replaced(text, "peers", "new")


def test_the_real_page_has_every_section(scripts: Any) -> None:
    page = scripts("page")
    text = page.PAGE.read_text(encoding="utf-8")
    for name in page.SECTIONS:
        page.replaced(text, name, "")


def test_growth_is_drawn_and_tabled_with_gaps(scripts: Any, tmp_path: Path) -> None:
    growth = scripts("growth")
    case = {"length": 512, "vocabulary": 4096}
    results = [
        {**case, "framework": growth.OURS, "tokens_per_cpu_second": 3000.0, "peak_bytes": 2**30},
        {**case, "framework": growth.PLAIN, "note": "ended at 20 GiB"},
    ]
    assert "| 4,096 | 512 | 3,000 | ended at 20 GiB | – | 1.00 | – |" in growth.table(results)
    growth.plot(results, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 5000
