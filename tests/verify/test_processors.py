"""Settings of processors in folders that other tools have saved."""

from __future__ import annotations

import json
from pathlib import Path

from halftune.verify.processors import compare_processors, takes_media

MEAN = {"image_mean": [0.5, 0.5, 0.5], "size": {"longest_edge": 1000, "shortest_edge": 10}}


def folder(path: Path, **files: object) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_the_same_settings_in_other_files(tmp_path: Path) -> None:
    ours = folder(tmp_path / "a", preprocessor_config={**MEAN, "image_processor_type": "Old"})
    theirs = folder(tmp_path / "b", processor_config={"image_processor": {**MEAN, "image_processor_type": "New"}})
    assert compare_processors(ours, theirs) == []
    assert takes_media(theirs)
    assert not takes_media(tmp_path)


def test_a_setting_that_differs(tmp_path: Path) -> None:
    ours = folder(tmp_path / "a", preprocessor_config=MEAN)
    size = {"longest_edge": 900, "shortest_edge": 10}
    theirs = folder(tmp_path / "b", processor_config={"image_processor": {**MEAN, "size": size}})
    (found,) = compare_processors(ours, theirs)
    assert found.code == "processor.differ"
    assert "size.longest_edge" in found.what
    assert "image_mean" not in found.what


def test_a_name_with_several_values_is_not_compared(tmp_path: Path) -> None:
    both = {"image_processor": {"patch_size": 14}, "video_processor": {"patch_size": 16}}
    ours, theirs = (
        folder(tmp_path / "a", processor_config=both),
        folder(tmp_path / "b", processor_config={"patch_size": 1}),
    )
    assert compare_processors(ours, theirs) == []
