"""The cache on disk: a corrupt entry is made anew, one that cannot be written is a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from halftune.core import disk_cache


def load(folder: Path) -> bytes:
    return (folder / "content").read_bytes()


class Maker:
    """Writes ``content``, and counts how often."""

    def __init__(self, content: bytes) -> None:
        self.content, self.calls = content, 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "content").write_bytes(self.content)


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    make = Maker(b"tokens")
    for _ in range(2):
        assert disk_cache.stored(tmp_path / "kind" / "key", make, load, "tokens") == b"tokens"
    assert make.calls == 1


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    make = Maker(b"\x00\xff")
    folder = tmp_path / "key"
    assert disk_cache.write(folder, make, "bytes")
    for bit in range(16):
        content = bytearray(make.content)
        content[bit // 8] ^= 1 << bit % 8
        (folder / "content").write_bytes(content)
        assert disk_cache.read(folder, load, "bytes") is None
    assert disk_cache.stored(folder, make, load, "bytes") == make.content


@pytest.mark.parametrize("wrong", [OSError, ValueError, EOFError, KeyError, MemoryError])
def test_an_entry_that_cannot_be_loaded_is_made_anew(tmp_path: Path, wrong: type[Exception]) -> None:
    make = Maker(b"new")
    assert disk_cache.write(tmp_path / "key", Maker(b"old"), "bytes")

    def picky(folder: Path) -> bytes:
        if (found := load(folder)) == b"old":
            raise wrong
        return found

    assert disk_cache.stored(tmp_path / "key", make, picky, "bytes") == b"new"
    assert make.calls == 1


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    make = Maker(b"")
    assert disk_cache.stored(tmp_path / "file" / "kind" / "key", make, load, "bytes") is None
    assert not disk_cache.write(tmp_path / "file" / "key", make, "bytes")
    assert not make.calls


def test_a_folder_that_cannot_be_looked_at_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert disk_cache.read(tmp_path / "key", load, "bytes") is None
