"""What several processes of a machine say: what all find in the same files is said once."""

from __future__ import annotations

import io
import logging

import pytest

from halftune.core.log import _ALIKE, configure
from halftune.core.processes.process import Process
from halftune.data import pipeline
from halftune.train import setup
from halftune.train.checkpoint import resume


@pytest.mark.parametrize(("rank", "local", "said"), [(0, 0, 3), (1, 1, 1), (8, 0, 3)])
def test_one_process_of_a_machine_warns_of_what_all_find(
    monkeypatch: pytest.MonkeyPatch, rank: int, local: int, said: int
) -> None:
    root, shown = logging.getLogger("halftune"), io.StringIO()
    before = (list(root.handlers), root.level, root.propagate)
    root.handlers.clear()
    monkeypatch.setattr("sys.stderr", shown)
    try:
        configure(Process(rank, local, world_size=9))
        for one in (pipeline, resume, setup):
            one.log.warning("mind")
    finally:
        root.handlers[:], _, root.propagate = before
        root.setLevel(before[1])
        for name in _ALIKE:
            root.getChild(name).setLevel(logging.NOTSET)
    assert shown.getvalue().count("W mind") == said
