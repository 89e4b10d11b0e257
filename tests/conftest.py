"""Settings and fixtures that every test shares."""

from __future__ import annotations

import fnmatch
import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import random
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

# Before torch or transformers are imported: tests are offline and single-threaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTHONSAFEPATH", "")  # off: a verb called here would switch it on for children of later tests

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent


def _own_caches() -> None:
    """Neither what the user's caches hold nor whether they can be written changes a result."""
    folder = REPOSITORY / ".pytest_cache"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp())
    for name in ("HALFTUNE_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR"):
        os.environ.setdefault(name, str(folder / name.lower()))


def _torchvision_of(folder: str) -> None:
    """Import torchvision from a folder, also where its extension was built for another torch.

    No test calls an operator of it.
    """
    sys.path.append(folder)
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        from torch.library import Library

        library = Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        vars(importlib.import_module("torchvision"))["_of_tests"] = library  # it lives as long


if folder := os.environ.get("HALFTUNE_TORCHVISION"):
    _torchvision_of(folder)  # before transformers is imported, which looks for it once
_own_caches()  # before packages are imported that read these; processes of -n inherit them

# Each test draws its random numbers from this seed and its own name, alone or among others. "fresh" takes a new one.
if os.environ.setdefault("HALFTUNE_TEST_SEED", "0") == "fresh":
    os.environ["HALFTUNE_TEST_SEED"] = str(random.SystemRandom().randrange(2**32))  # processes of -n inherit it
SEED = os.environ["HALFTUNE_TEST_SEED"]

os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a process that a test starts and that is aborted says where


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real data sets beside the repository; tests that need it skip where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real data sets (../shared/data) are not here")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _shorter_runs() -> Iterator[None]:
    """A run waits some forty times for the disk, and reads as many files of packages' metadata.

    Files of tests need not outlive a power cut, and no package comes or goes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(importlib.metadata, "version", functools.cache(importlib.metadata.version))
        yield


@pytest.fixture
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies remote code into the test's folder, not into the user's cache."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names bytes by their argument: archives hold the time, and processes of xdist must collect the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(autouse=True)
def _logger_as_imported() -> Iterator[None]:
    """A verb that runs inside a test sets the package's logger up; the next test gets it as imported."""
    yield
    logger = logging.getLogger("halftune")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def pytest_configure(config: pytest.Config) -> None:
    """With ``-n``, processes take whole files in order (see below) instead of single tests.

    What a file's tests share is then made once. Not by xdist's groups: with pytest 9.2, xdist 3.8 does not see them.
    """
    if vars(config.option).get("dist") == "load":  # what -n alone makes of it
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def pytest_collection_finish() -> None:
    """The garbage collector no longer walks through what was imported: a tenth of the time of short runs."""
    gc.freeze()


def pytest_report_header() -> str:
    return f"HALFTUNE_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what draws before the fixtures do. A package that nothing has imported is not imported for it."""
    seed = zlib.crc32(f"{SEED} {item.nodeid}".encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


LONG = {"webui", "launch", "test_additions", "test_quickstart", "test_sweep"}  # folders and files that take a minute
SETS = yaml.safe_load((Path(__file__).parent / "sets.yaml").read_text(encoding="utf-8"))


def mark_sets(items: list[pytest.Item]) -> set[str]:
    """Marks tests as ``tests/sets.yaml`` says, the first pattern that matches; returns the patterns without tests."""
    patterns = [(one, re.compile(fnmatch.translate(one)), entry["set"]) for entry in SETS for one in entry["tests"]]
    unused = {one for one, _, _ in patterns}
    for item in items:
        # a parameter's brackets would be a set of characters to fnmatch
        name = item.nodeid.replace("[", "::").replace("]", "")
        found = [(one, chosen) for one, pattern, chosen in patterns if pattern.match(name)]
        unused -= {one for one, _ in found}
        if found and found[0][1] != "keep":
            item.add_marker(found[0][1])
    collected = {item.nodeid.partition("::")[0] for item in items}
    skipped = {one for one in unused if (file := one.partition("::")[0]) not in collected and Path(file).is_file()}
    return unused - skipped  # where a package is not installed, whole files skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests come first, and the longest before them, so that at the end no process works alone for long.

    Tests marked ``gpu`` skip without a CUDA device; nothing else asks torch for one.
    """
    unused = mark_sets(items)
    if unused and config.args in ([str(REPOSITORY)], ["tests"]):  # the whole suite
        raise pytest.UsageError(f"tests/sets.yaml: no test matches {', '.join(sorted(unused))}")

    def late(item: pytest.Item) -> tuple[bool, bool]:
        return item.get_closest_marker("slow") is None, LONG.isdisjoint((item.path.parent.name, item.path.stem))

    if order := os.environ.get("HALFTUNE_TEST_ORDER"):  # a seed: files in random order, and tests within each
        drawn = random.Random(order)
        places = {item.path: drawn.random() for item in items}
        items.sort(key=lambda item: (places[item.path], drawn.random()))
    else:
        items.sort(key=late)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
