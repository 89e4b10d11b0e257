"""Data files that the page lists and takes: inside the web UI's folders only."""

from __future__ import annotations

from pathlib import Path

import pytest

from halftune.core.errors import ConfigError
from halftune_webui.files import MOST, listing, upload_target
from halftune_webui.hints import hints
from halftune_webui.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    root, other = tmp_path.resolve() / "work", tmp_path.resolve() / "other"
    for folder in (root / "sub", root / "data", other):
        folder.mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "s.jsonl").write_text("x")
    for name in ("a.jsonl", "b.csv.gz", "c.exe", ".hidden.jsonl", "sub/d.txt"):
        (root / name).write_text("12345")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "link.jsonl").symlink_to(tmp_path / "secret" / "s.jsonl")
    return Settings((root, other), root / "runs")


def test_a_folder_lists_what_can_be_trained_on(settings: Settings) -> None:
    found = listing(settings, "")
    assert [one["path"] for one in found["files"]] == ["a.jsonl", "b.csv.gz"]
    assert found["files"][0]["bytes"] == 5
    assert [one["path"] for one in found["folders"]] == ["data", "sub"]
    assert (found["folder"], found["up"]) == (".", None)
    inner = listing(settings, str(settings.roots[0] / "sub"))
    assert (inner["folder"], inner["up"]) == ("sub", ".")
    assert [one["path"] for one in inner["files"]] == ["sub/d.txt"]
    assert listing(settings, str(settings.roots[1]))["folder"] == str(settings.roots[1])


@pytest.mark.parametrize("folder", ["/etc", "..", "../secret", "link", "a\0b", "nowhere", "a.jsonl"])
def test_no_other_folder_is_listed(settings: Settings, folder: str) -> None:
    path = folder if folder.startswith("/") or "\0" in folder else str(settings.roots[0] / folder)
    with pytest.raises(ConfigError):
        listing(settings, path)


def test_a_full_folder_is_cut(settings: Settings) -> None:
    for number in range(MOST + 5):
        (settings.roots[1] / f"{number}.txt").touch()
    found = listing(settings, str(settings.roots[1]))
    assert len(found["files"]) == MOST
    assert found["more"]


def test_an_upload_replaces_nothing(settings: Settings) -> None:
    folder = settings.roots[0] / "data"
    assert upload_target(settings, "x.jsonl.gz") == folder / "x.jsonl.gz"
    (folder / "x.jsonl.gz").touch()
    (folder / "x-2.jsonl.gz").symlink_to("/nowhere")
    assert upload_target(settings, "x.jsonl.gz") == folder / "x-3.jsonl.gz"


@pytest.mark.parametrize(
    "name", ["", "x", "x.sh", "../x.jsonl", ".x.jsonl", "a/b.jsonl", "a\0.jsonl", "y" * 300 + ".csv"]
)
def test_no_other_name_is_taken(settings: Settings, name: str) -> None:
    with pytest.raises(ConfigError):
        upload_target(settings, name)


def test_an_upload_folder_that_leads_out_is_refused(settings: Settings, tmp_path: Path) -> None:
    (settings.roots[0] / "data").rmdir()
    (settings.roots[0] / "data").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError):
        upload_target(settings, "x.jsonl")


def test_suggestions_follow_the_disk_and_the_folder_of_runs(settings: Settings) -> None:
    assert "new.jsonl" not in hints(settings)["data.train.path"]
    (settings.roots[0] / "new.jsonl").touch()
    model = settings.runs / "one" / "final"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    found = hints(settings)
    assert "new.jsonl" in found["data.train.path"]
    assert "runs/one/final" in found["model.name_or_path"]
