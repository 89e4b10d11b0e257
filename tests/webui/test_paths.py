"""Paths from the browser stay under the web UI's folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from halftune_webui.paths import OutsideError, inside


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = (tmp_path / "root").resolve()
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.jsonl").write_text("{}\n")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "rooted").mkdir()
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("..")
    (folder / "in").symlink_to(folder / "data")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "text", ["data/a.jsonl", "data", ".", "not/there/yet", "in/a.jsonl", "data/../data", "data//a.jsonl"]
)
def test_inside(root: Path, text: str) -> None:
    assert inside((root,), text).is_relative_to(root)


@pytest.mark.parametrize(
    "text",
    [
        *("..", "../secret", "/etc/passwd", "out", "up/secret", "data/../../secret", "~/x", "../rooted"),
        *("", " ", "a\0b", "~nobody/x", "/usr/../etc"),
    ],
)
def test_outside(root: Path, text: str) -> None:
    with pytest.raises(OutsideError) as refused:
        inside((root,), text)
    assert refused.value.remedy
    assert "secret" not in refused.value.what


def test_several_roots(root: Path) -> None:
    other = root.parent / "rooted"
    assert inside((root, other.resolve()), str(other / "x")) == other.resolve() / "x"
