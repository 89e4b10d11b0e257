"""Data sets with media that come as one ZIP file."""

from __future__ import annotations

import io
import os
import stat
import threading
import zipfile
from pathlib import Path

import pytest

from halftune.core.errors import HalftuneError
from halftune_webui import archive
from halftune_webui.files import is_data

ROWS = b'{"text": "x"}\n'


def unpacked(folder: Path, content: bytes, left: threading.Event | None = None) -> tuple[Path, int]:
    with (folder / "packed").open("w+b") as file:
        file.write(content)
        return archive.unpack(file, folder / "new", is_data, left or threading.Event())


def packed(*names: str | zipfile.ZipInfo, content: bytes = ROWS) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            file.writestr(name, content)
    return stream.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    one = zipfile.ZipInfo(name)
    one.external_attr = (stat.S_IFLNK | 0o777) << 16
    return one


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (("rows.jsonl", "wavs/1.WAV", "wavs/"), "new/rows.jsonl"),
        (("mine/rows.jsonl", "mine/README.md", "mine/films/a b.mp4"), "new/mine/rows.jsonl"),
        (("mine/a.jsonl", "mine/b.jsonl", "mine/1.png"), "new/mine"),
        (("a.txt", "b.txt"), "new"),
    ],
)
def test_rows_lie_beside_their_media(tmp_path: Path, names: tuple[str, ...], rows: str) -> None:
    assert unpacked(tmp_path, packed(*names)) == (tmp_path / rows, 0)
    assert all((tmp_path / "new" / name).exists() for name in names)
    assert sorted(os.listdir(tmp_path)) == ["new", "packed"]


def test_links_hidden_files_and_other_kinds_are_left_out(tmp_path: Path) -> None:
    others = ("__MACOSX/r.jsonl", ".git/x.txt", "run.sh", "model.bin", "config.pkl", link("rows2.jsonl"), link("1.wav"))
    assert unpacked(tmp_path, packed("rows.jsonl", *others)) == (tmp_path / "new" / "rows.jsonl", len(others))
    assert os.listdir(tmp_path / "new") == ["rows.jsonl"]


def damaged(content: bytes) -> bytes:
    """With another checksum."""
    at = content.index(b"PK\x01\x02") + 16
    return content[:at] + bytes(4) + content[at + 4 :]


def encrypted(content: bytes) -> bytes:
    """With the flag of an encrypted file in both headers."""
    changed = bytearray(content)
    for sign, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        changed[content.index(sign) + at] |= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (packed("rows.jsonl", "../x.jsonl"), "webui.path_outside"),
        (packed("/x.jsonl", "rows.jsonl"), "webui.path_outside"),
        (packed("1.wav"), "data.no_data_files"),
        (packed("rows.jsonl", content=bytes((1 << 26) + 1)), "data.compressed_too_well"),
        (packed("rows.jsonl")[:-40], "core.file_damaged"),
        (b"", "core.file_damaged"),
        (damaged(packed("rows.jsonl")), "core.file_damaged"),
        (encrypted(packed("rows.jsonl")), "core.file_damaged"),
    ],
)
def test_nothing_is_left_of_an_archive_that_is_refused(tmp_path: Path, content: bytes, code: str) -> None:
    with pytest.raises(HalftuneError) as caught:
        unpacked(tmp_path, content)
    assert caught.value.code == code
    assert os.listdir(tmp_path) == ["packed"]


def test_a_list_of_files_that_fills_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_INDEX", 100)
    assert unpacked(tmp_path, packed("a.txt"))[1] == 0
    (tmp_path / "new").rename(tmp_path / "first")
    with pytest.raises(HalftuneError) as caught:
        unpacked(tmp_path, packed("a.txt", "b.txt"))
    assert caught.value.code == "core.file_damaged"


def test_the_number_of_files_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_FILES", 2)
    with pytest.raises(HalftuneError) as caught:
        unpacked(tmp_path, packed("a.txt", "b.txt", "c.txt"))
    assert caught.value.code == "data.compressed_too_well"
    assert os.listdir(tmp_path) == ["packed"]
    assert unpacked(tmp_path, packed("a.txt", "b.txt", "not_data.exe"))[1] == 1


def test_unpacking_ends_when_nobody_waits_for_it(tmp_path: Path) -> None:
    left = threading.Event()
    left.set()
    with pytest.raises(HalftuneError) as caught:
        unpacked(tmp_path, packed("a.txt"), left)
    assert caught.value.code == "webui.stopped"
    assert os.listdir(tmp_path) == ["packed"]


def test_a_file_that_is_also_a_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a"):
        unpacked(tmp_path, packed("a.txt", "a.txt/b.txt"))
    assert os.listdir(tmp_path) == ["packed"]
