"""Files that somebody else may have written: links are not followed, sizes are limited, modes follow the umask."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import LIMIT

from halftune.cli import main
from halftune.config.facts.safetensors_headers import read_headers
from halftune.config.reading.yaml_source import read_text as read_recipe
from halftune.core.atomic import whole_folder, write_text
from halftune.core.errors import ConfigError, DataError, ModelError, TrainingError
from halftune.core.files import open_file, open_input, read_limited
from halftune.core.log import log_to
from halftune.core.processes.time_limit import Limits, OutOfTime, within
from halftune.core.status import StatusFile
from halftune.data.readers.files import read_file
from halftune.model.tokenizer.tokenizer import excess
from halftune.train.callbacks import samples
from halftune.train.callbacks.environment import git_state
from halftune.train.report.series import read as read_record
from halftune.train.run_folder.lock import locked
from halftune.train.run_folder.same_run import recorded


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file outside of the run folder, which nothing may change."""
    file = tmp_path / "precious"
    file.write_text("keep me")
    (tmp_path / "run").mkdir()
    return file


@pytest.mark.parametrize("mode", ["rb", "r+b", "wb", "ab", "a+b"])
def test_links_are_refused_at_every_depth(target: Path, mode: str) -> None:
    run = target.parent / "run"
    (run / "file").symlink_to(target)
    (run / "folder").symlink_to(target.parent)
    for path in (run / "file", run / "folder" / "precious"):
        with pytest.raises(OSError, match="symbolic link"):
            open_file(path, mode, root=run)
    with pytest.raises(OSError, match="leaves"):
        open_file(run / ".." / "precious", mode, root=run)
    assert target.read_text() == "keep me"


def test_a_folder_may_be_reached_by_a_link(target: Path) -> None:
    elsewhere = target.parent / "link"
    elsewhere.symlink_to(target.parent / "run")
    with open_file(elsewhere / "new", "wb", root=elsewhere) as file:
        file.write(b"1")
    assert (target.parent / "run" / "new").read_text() == "1"


def test_a_run_never_writes_through_a_link(target: Path) -> None:
    run = target.parent / "run"
    for name in (".lock", "train.log", ".status.json.writing", ".plan.json.writing"):
        (run / name).symlink_to(target)
    with pytest.raises(TrainingError, match="symbolic link"), locked(run):
        pass
    with log_to(run / "train.log"):
        logging.getLogger("halftune").warning("a line")
    status = StatusFile(run / "status.json", pause=0)
    status.tell(phase="a")
    status.tell(phase="b")
    write_text(run / "plan.json", "{}")
    assert target.read_text() == "keep me"
    assert json.loads((run / "status.json").read_text())["phase"] == "b"
    assert (run / "plan.json").read_text() == "{}"


def test_the_lock_names_its_owner_and_is_empty_afterwards(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / ".lock").read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=str(os.getpid())), locked(tmp_path / "run"):
            pass
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_folder(tmp_path / "final") as folder:
            os.close(os.open(folder / "model.safetensors", os.O_CREAT | os.O_WRONLY, 0o600))
            (folder / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "final").iterdir()} == {0o640}


def test_git_runs_no_program_that_a_repository_names(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / ".gitattributes").write_text("*.txt filter=evil\n")
    git("add", ".")
    git("commit", "-m", "one")
    assert git_state(tmp_path) is not None
    script = tmp_path / ".git" / "evil"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    script.chmod(0o755)
    for key in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process"):
        git("config", key, str(script))
    (tmp_path / ".git" / "hooks").mkdir(exist_ok=True)
    (tmp_path / ".git" / "hooks" / "post-index-change").symlink_to(script)
    (tmp_path / "ran").unlink(missing_ok=True)
    unchanged = git_state(tmp_path)
    assert unchanged is not None
    assert unchanged["changed"] is False
    (tmp_path / "a.txt").write_text("2")
    changed = git_state(tmp_path)
    assert changed == {"commit": unchanged["commit"], "changed": True}
    assert not (tmp_path / "ran").exists()


def test_git_answers_in_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "a.txt").write_text("1")
    for words in ("init", "add .", "-c user.name=a -c user.email=a@b.c commit -m one"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True, capture_output=True)
    state = git_state(folder)
    assert state is not None
    assert state["changed"] is False


def test_child_processes_run_no_code_of_the_working_directory(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "halftune.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    child = [sys.executable, "-m", "halftune", "--version"]
    assert b"a stranger" in subprocess.run(child, capture_output=True, check=False).stderr, "the trap works"
    with pytest.raises(SystemExit):
        main(["explain", "train.run_changed"])
    assert subprocess.run(child, capture_output=True, check=False).returncode == 0


def test_small_files_that_grow_are_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "rows.jsonl.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(70):
            file.write(b" " * (1 << 20))
    with pytest.raises(DataError, match="decompresses to") as caught:
        read_file(bomb)
    assert caught.value.where == str(bomb)
    with gzip.open(bomb, "wb") as file:
        file.write(b'{"text": "a"}\n' * 10_000)
    assert len(read_file(bomb).rows) == 10_000


def sparse(path: Path, size: int, begin: bytes = b"") -> Path:
    """A file of ``size`` bytes that takes no place on the disk."""
    path.write_bytes(begin)
    os.truncate(path, size)
    return path


def test_sizes_are_checked_before_reading(tmp_path: Path) -> None:
    huge = 1 << 40  # which no machine could read
    with pytest.raises(ConfigError, match="check the file name"):
        read_recipe(sparse(tmp_path / "recipe.yaml", huge))
    with pytest.raises(OSError, match="more than") as caught:
        read_limited(tmp_path / "recipe.yaml", 10)
    assert caught.value.errno == errno.EFBIG
    sparse(tmp_path / "model.safetensors", huge, struct.pack("<Q", huge // 2))
    with pytest.raises(ModelError, match="the maximum is 100,000,000"):
        read_headers(tmp_path)
    sparse(tmp_path / "model.safetensors.index.json", huge)
    with pytest.raises(ModelError, match="index"):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "a/../../b.safetensors"])
def test_an_index_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match="outside the model's folder"):
        read_headers(tmp_path)


def test_templates_have_limits() -> None:
    assert not excess("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not excess("{{ raise_exception('no') }}")
    assert "memory" in excess("{{ 'a' * 3000000000 }}")
    # computed while it compiles, though never rendered
    assert "memory" in excess("{% if false %}{{ 'a' * 3000000000 }}{% endif %}")
    assert "memory" in excess("{% if false %}{{ 'a' | center(3000000000) }}{% endif %}")
    assert "characters" in excess(" " * 2_000_000)


@pytest.mark.parametrize(("code", "said"), [(-signal.SIGKILL, "was not checked"), (1, "was not checked: E: broken")])
def test_a_template_is_not_blamed_for_a_process_that_died(
    code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess((), code, "", "Traceback\nE: broken\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: done)
    assert excess(f"a template that nobody else renders {code}").startswith(said)


@pytest.mark.slow  # five seconds of CPU time
def test_a_template_that_does_not_end() -> None:
    loop = "{% for a in range(9999) %}"
    assert "CPU time" in excess(f"{loop * 3}{'{% endfor %}' * 3}")


def endless() -> None:
    while True:
        pass


def test_python_that_does_not_end_is_interrupted() -> None:
    with pytest.raises(OutOfTime), Limits(0.2, 1 << 30):
        endless()
    with pytest.raises(OutOfTime), Limits(0.2, 1 << 30), Limits(LIMIT, 1 << 30):  # the outer one holds
        endless()
    with Limits(LIMIT, 1 << 30):
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "no limit is left behind"


LIMITED = f"""
from halftune.core.processes.time_limit import Limits

try:
    with Limits({LIMIT}, 1 << 28):
        bytearray(1 << 29)
except MemoryError:
    pass
else:
    raise SystemExit("there is no limit")
with Limits({LIMIT}, 1 << 28) as limits:
    kept = []
    for _ in range(4):
        kept.append(bytearray(200 << 20))
        limits.renew(200 << 20)
bytearray(1 << 29)  # no limit is left behind
"""


def test_memory_of_a_block_is_limited() -> None:
    """In a process of its own: one that has trained keeps what it freed, and takes from that without a limit."""
    subprocess.run([sys.executable, "-c", LIMITED], check=True)


def filled(path: Path) -> None:
    """A file that takes no room on the disk, and more memory than there is."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def test_files_of_a_run_that_would_fill_the_memory_are_not_read(tmp_path: Path, caplog) -> None:
    for name in ("samples.json", "metrics.jsonl", "environment.json", "resolved.yaml", "status.json"):
        filled(tmp_path / name)
    found = read_record(tmp_path)
    assert not found.samples
    assert not found.training
    assert {"samples.json", "environment.json", "resolved.yaml"} <= set(found.unreadable)
    assert samples._before(tmp_path) == []
    assert "samples.json is not readable" in caplog.text
    with locked(tmp_path):
        filled(tmp_path / ".lock")
        with pytest.raises(ConfigError) as caught, locked(tmp_path):
            pass
    assert caught.value.code == "train.folder_locked"


def test_files_of_a_run_that_are_nested_too_deeply_are_unreadable(tmp_path: Path) -> None:
    for name in ("samples.json", "metrics.jsonl", "resolved.yaml"):
        (tmp_path / name).write_text("[" * 1_000_000)
    assert {"samples.json", "resolved.yaml"} <= set(read_record(tmp_path).unreadable)
    assert samples._before(tmp_path) == []
    with pytest.raises(ConfigError) as caught:
        recorded(tmp_path / "resolved.yaml")
    assert caught.value.code == "train.run_folder_damaged"


@pytest.mark.parametrize("words", [["plan", "--config"], ["data", "--config"], ["convert"], ["train", "--sweep"]])
def test_a_pipe_that_is_named_as_a_recipe_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    os.mkfifo(pipe := tmp_path / "r.yaml")
    with pytest.raises(SystemExit, match="2"):
        main([*words, str(pipe)])
    assert "[core.unreadable]" in capsys.readouterr().err


def test_only_files_and_streams_that_were_handed_over_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match=r"Errno (21|22)"):
            open_input(Path(name))
    code = "import pathlib, halftune.core.files as f; print(f.read_limited(pathlib.Path('/dev/stdin')).decode())"
    found = subprocess.run([sys.executable, "-c", code], input="given", capture_output=True, text=True, check=True)
    assert found.stdout == "given\n"
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "wb") as file:
        file.write(b"given")
        file.close()
        assert read_limited(Path(f"/dev/fd/{reader}")) == b"given"


def test_a_wait_has_a_limit() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.1, lambda: released.wait(LIMIT))
    released.set()
    assert within(LIMIT, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(LIMIT, lambda: {}["x"])
