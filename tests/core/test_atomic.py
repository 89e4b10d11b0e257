"""Folders that are replaced as a whole: whenever a process is killed, an older or the new one is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from halftune.core.atomic import OLD, WRITING, clear_leftovers, whole_folder


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def left(path: Path) -> dict[str, str]:
    return {one.name: (one / "file").read_text() for one in path.iterdir()}


def test_a_folder_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder(tmp_path / "it", "older")
    with whole_folder(tmp_path / "it") as beside:
        (beside / "file").write_text("newer")
        assert (tmp_path / "it" / "file").read_text() == "older"
    assert left(tmp_path) == {"it": "newer"}


def test_an_error_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "it", "older")
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "it") as beside:
        (beside / "no such folder" / "file").write_text("newer")
    assert left(tmp_path) == {"it": "older"}

    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name.endswith(WRITING):
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="gone"), whole_folder(tmp_path / "it") as beside:
        (beside / "file").write_text("newer")
    assert left(tmp_path) == {"it": "older"}


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        ({"it": "older", f".it{WRITING}": "half"}, "older"),  # killed while it wrote
        ({f".it{OLD}": "older", f".it{WRITING}": "newer"}, "older"),  # between the two renames
        ({"it": "newer", f".it{OLD}": "older"}, "newer"),  # after them
    ],
)
def test_after_a_kill_there_is_one_of_both(tmp_path: Path, there: dict[str, str], kept: str) -> None:
    for name, text in there.items():
        folder(tmp_path / name, text)
    clear_leftovers(tmp_path)
    assert left(tmp_path) == {"it": kept}
