"""``logging.profile``: a trace, a table that adds up, and nothing where it is off."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halftune.train.callbacks.profile.operator_groups import PYTHON, WAIT, group_of
from halftune.train.callbacks.profile.profile import NAME, TRACE
from halftune.train.callbacks.profile.tables import tables
from halftune.train.trainer import train


@pytest.mark.parametrize(
    ("name", "around", "group"),
    [
        ("aten::mm", [], "matmul"),
        ("aten::addmm", ["aten::linear", PYTHON], "matmul"),
        ("aten::addmm_", ["_LoraLinear"], "matmul"),
        ("aten::baddbmm_", ["_CausalSegmentsBackward"], "attention"),
        ("_CausalSegments", [], "attention"),
        ("_LoraMlp", [], "Python"),
        ("_RmsNormBackward", ["autograd::engine::evaluate_function: _RmsNormBackward"], "Python"),
        ("aten::bmm", ["aten::_scaled_dot_product_attention_math"], "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [], "attention"),
        ("aten::mul", [], "elementwise"),
        ("aten::silu_backward", ["SiluBackward0"], "elementwise"),
        ("aten::mul", ["Optimizer.step#AdamW.step"], "optimizer"),
        ("aten::_fused_adamw_", [], "optimizer"),
        ("aten::_log_softmax", [], "loss"),
        ("aten::exp", ["_CrossEntropyBackward"], "loss"),
        ("aten::fill_", [], "fills and copies"),
        ("aten::copy_", [WAIT, PYTHON], "data"),
        ("aten::_local_scalar_dense", ["aten::item"], "host syncs"),
        ("aten::transpose", [], "views"),
        ("aten::embedding_dense_backward", [], "indexing"),
        (PYTHON, [], "Python"),
        ("something new", [], "other"),
    ],
)
def test_groups(name: str, around: list[str], group: str) -> None:
    assert group_of(name, around) == group


def test_tables_count_what_lies_in_a_step_and_add_up() -> None:
    a, b = torch.randn(2, 200, 200)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.mm(a, b)  # outside of any step
        for _ in range(2):
            with torch.profiler.record_function(PYTHON):
                with torch.profiler.record_function(WAIT):
                    torch.sin(a)
                (a @ b).exp()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    found = tables(profiler.profiler.kineto_results.events(), 2)
    # the same as torch's own sums
    by_torch = {row.key: row.self_cpu_time_total for row in profiler.key_averages()}
    for row in found["operators"]:
        if row["name"] not in ("aten::mm", "aten::empty", "aten::resolve_conj"):  # also outside of the steps
            assert row["cpu_seconds"] * 2e6 == pytest.approx(by_torch[row["name"]], rel=1e-3, abs=0.02)
    calls = {row["name"]: row["calls"] for row in found["operators"]}
    assert calls["aten::mm"] == 1
    assert calls["aten::exp"] == 1
    of = {row["name"]: row["group"] for row in found["operators"]}
    assert of["aten::sin"] == of[WAIT] == "data"
    assert sum(row["cpu_share"] for row in found["groups"]) == pytest.approx(1)
    whole = sum(row["cpu_seconds"] for row in found["groups"])
    data = next(row["cpu_seconds"] for row in found["groups"] if row["name"] == "data")
    assert data == pytest.approx(found["data_wait_seconds"], rel=1e-6)
    assert 0 < data < whole


class Recorded:
    """A raw event as the profiler gives it on a machine with a GPU; times in nanoseconds."""

    def __init__(self, name: str, start: int, length: int, *, number: int, caller: int = 0, on: str = "CPU") -> None:
        self.values = {"name": name, "start_ns": start, "duration_ns": length, "correlation_id": number}
        thread = 7 if caller else 1  # calls of the driver have the system's number of the thread
        self.values |= {"linked_correlation_id": caller, "start_thread_id": thread, "end_thread_id": thread}
        self.values |= {"is_async": False, "device_type": SimpleNamespace(name=on)}

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self.values[name]


def test_kernels_count_for_the_operator_that_launched_them() -> None:
    events = [
        Recorded(PYTHON, 0, 1000, number=1),
        Recorded(PYTHON, 100, 2000, number=1, caller=1, on="CUDA"),  # the range as the device sees it
        Recorded("aten::matmul", 100, 500, number=2),
        Recorded("aten::mm", 200, 300, number=3),
        Recorded("cudaLaunchKernel", 250, 100, number=3, caller=3),
        Recorded("gemm_kernel", 900, 800, number=3, caller=3, on="CUDA"),
    ]
    rows = {row["name"]: row for row in tables(events, 1)["operators"]}
    cpu = {name: round(row["cpu_seconds"] * 1e9) for name, row in rows.items()}
    assert cpu == {PYTHON: 500, "aten::matmul": 200, "aten::mm": 200, "cudaLaunchKernel": 100}
    assert {name: row["device_share"] for name, row in rows.items() if row["device_share"]} == {"aten::mm": 1}


def test_a_profiled_run(recipe: Callable[..., tuple[Any, Any]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="halftune"):
        folder = train(*recipe("logging.profile=2", "training.max_steps=7")).folder
    found = json.loads((folder / NAME).read_text())
    assert (found["first_step"], found["last_step"]) == (4, 5)
    names = [row["name"] for row in found["groups"]]
    assert {"matmul", "attention", "elementwise", "loss", "optimizer", "data", "Python"} <= set(names)
    assert found["step_seconds_unprofiled"] > 0
    trace = json.loads(gzip.decompress((folder / TRACE).read_bytes()))
    assert sum(event.get("name") == PYTHON and event.get("ph") == "X" for event in trace["traceEvents"]) == 2
    page = (folder / "report.html").read_text()
    assert "Steps 4 to 5" in page
    assert f"<code>{found['operators'][0]['name']}</code>" in page
    assert "profile of steps 4–5" in caplog.text


def test_evaluation_between_profiled_steps_is_not_counted(
    recipe: Callable[..., tuple[Any, Any]], tmp_path: Path
) -> None:
    evaluated = ("data.eval_split=16", "training.eval_steps=1")
    plain, evaluating = (
        json.loads(
            (
                train(*recipe("logging.profile=2", "training.max_steps=5", "data.max_length=32", *more)).folder / NAME
            ).read_text()
        )
        for more in ((f"training.output_dir={tmp_path}/a",), (*evaluated, f"training.output_dir={tmp_path}/b"))
    )
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for found in (plain, evaluating):  # evaluation would add forward passes without backward ones
        calls = {row["name"]: row["calls"] for row in found["operators"]}
        assert calls[attention] == calls[f"{attention}_backward"] == 2


def test_too_short_a_run_says_so_and_without_it_nothing_is_written(
    recipe: Callable[..., tuple[Any, Any]], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = train(*recipe("logging.profile=2", "training.max_steps=2")).folder
    assert "no step was profiled" in caplog.text
    assert not (folder / NAME).exists()
    folder = train(*recipe("training.max_steps=1", f"training.output_dir={tmp_path}/other")).folder
    assert not (folder / NAME).exists()
    assert 'id="profile"' not in (folder / "report.html").read_text()
