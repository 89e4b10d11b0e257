"""What a launcher has set, half of it, and somebody else's variables of the same names."""

from __future__ import annotations

import os

import pytest

from halftune.core.errors import PlanError
from halftune.core.processes.process import ALONE, Process, hidden, ignored, this_process

WHOLE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMI_SIZE": "4", "PMI_RANK": "1"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*WHOLE, *MPI, "LOCAL_WORLD_SIZE"}:
        monkeypatch.delenv(name, raising=False)


def put(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "process", "named"),
    [
        ({}, ALONE, []),
        (WHOLE, Process(1, 1, 2, launched=True), []),
        (WHOLE | MPI, Process(1, 1, 2, launched=True), []),
        ({"RANK": "3"}, ALONE, ["RANK=3"]),
        ({"RANK": "x"}, ALONE, ["RANK=x"]),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": ""}, ALONE, ["LOCAL_RANK=0"]),
        ({"WORLD_SIZE": "1"}, ALONE, []),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Process(launched=True), []),
        (MPI, ALONE, ["OMPI_COMM_WORLD_SIZE=4", "PMI_SIZE=4"]),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, ALONE, []),
    ],
)
def test_who_is_launched(monkeypatch, variables: dict[str, str], process: Process, named: list[str]) -> None:
    put(monkeypatch, variables)
    assert this_process() == process
    assert ignored() == named
    with hidden():
        assert this_process().world_size == process.world_size
        left = [name for name in os.environ if name in {*WHOLE, *MPI} and not name.startswith("MASTER")]
        assert sorted(left) == (["LOCAL_RANK", "RANK", "WORLD_SIZE"] if process.world_size > 1 else [])
    assert {name: os.environ[name] for name in variables} == variables


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        ({name: value for name, value in WHOLE.items() if name != "LOCAL_RANK"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, "two"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "-2", "RANK": "0"}, "-2"),
        (WHOLE | {"RANK": "x"}, "'x'"),
        (WHOLE | {"RANK": "2"}, "rank 2 of 2"),
        (WHOLE | {"MASTER_PORT": "http"}, "MASTER_PORT"),
        (WHOLE | {"MASTER_PORT": "70000"}, "MASTER_PORT"),
        (WHOLE | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "1", "RANK": "16"}, "rank 16 of 1"),
    ],
)
def test_half_of_them_is_an_error(monkeypatch, variables: dict[str, str], named: str) -> None:
    put(monkeypatch, variables)
    with pytest.raises(PlanError, match=named) as caught:
        this_process()
    assert caught.value.exit_code == 2
    assert "torchrun" in str(caught.value)
