"""Settings and fixtures that every test shares."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch or transformers are imported: tests are offline and single-threaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets beside the repository; tests that need it skip where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real data sets (../shared/data) are not here")
    return folder


@pytest.fixture(autouse=True)
def _logger_as_imported() -> Iterator[None]:
    """A verb that runs inside a test sets the package's logger up; the next test gets it as imported."""
    yield
    logger = logging.getLogger("halftune")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` skip without a CUDA device; nothing else asks torch for one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
