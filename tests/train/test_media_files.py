"""Files that rows name: links, and what the token cache notices of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from media_runs import fed, media_recipe
from PIL import Image
from tiny_images import asked, image_model

from halftune.data.media.reference import decode, unpack

WHEN = 1_700_000_000  # archives may give all files one time


def write(file: Path, colour: str, side: int = 32) -> Path:
    """A BMP, which has the same size in all colours."""
    file.parent.mkdir(exist_ok=True)
    Image.new("RGB", (side, side), colour).save(file, "BMP")
    os.utime(file, (WHEN, WHEN))
    return file


def samples(folder: Path, names: list[str], **data: Any) -> list[Any]:
    """The samples of a run whose rows have one image each."""
    if not (folder / "model").exists():
        image_model(folder / "model", "qwen2_5_vl")
    rows = [asked("<image>What?", images=(name,)) for name in names]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    feed, _ = fed(*media_recipe(folder, folder / "rows.jsonl", {"images": True}, data={"cache": True, **data}))
    return [feed.split.example(index).segments[0] for index in range(len(feed.split))]


def colours(folder: Path, names: list[str], **data: Any) -> list[Any]:
    """The colours of the images of these samples."""
    return [decode(unpack(one.media)[0]).getpixel((0, 0)) for one in samples(folder, names, **data)]


def length(folder: Path, name: str) -> int:
    """Tokens of a sample."""
    return len(samples(folder, [name])[0].input_ids)


def test_a_link_to_another_folder_is_other_data(tmp_path: Path) -> None:
    for version, colour in (("v1", "red"), ("v2", "blue")):
        write(tmp_path / version / "a.bmp", colour)
    link, found = tmp_path / "current", []
    for version in ("v1", "v2"):
        link.unlink(missing_ok=True)
        link.symlink_to(version)
        found += colours(tmp_path, ["current/a.bmp"])
    assert found == [(255, 0, 0), (0, 0, 255)]


def test_rows_are_kept_again_once_their_files_can_be_used(tmp_path: Path) -> None:
    small, red, blue = write(tmp_path / "small.bmp", "red", 8), (255, 0, 0), (0, 0, 255)
    write(tmp_path / "long.bmp", "blue")
    (tmp_path / "broken.bmp").write_text("no image")
    options = {"on_bad_media": "drop", "overlong": "drop", "max_length": length(tmp_path, small.name) + 4}
    names = [small.name, "missing.bmp", "long.bmp", "broken.bmp"]
    assert colours(tmp_path, names, **options) == [red]
    write(tmp_path / "missing.bmp", "blue", 8)
    assert colours(tmp_path, names, **options) == [red, blue]
    write(tmp_path / "long.bmp", "blue", 8)
    assert colours(tmp_path, names, **options) == [red, blue, blue]
    write(tmp_path / "broken.bmp", "red", 8)
    assert colours(tmp_path, names, **options) == [red, blue, blue, red]
