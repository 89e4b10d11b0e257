"""With ``-n``, a file's tests run in one process: what they share is made once."""

from __future__ import annotations

import os

import pytest


@pytest.mark.parametrize("test", range(4))
def test_a_file_runs_in_one_process(test: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        pytest.skip("there is one process")
    seen = tmp_path_factory.getbasetemp().parent / f"{run}.workers"
    with seen.open("a") as file:
        file.write(f"{os.getpid()}\n")
    assert set(seen.read_text().split()) == {str(os.getpid())}
