"""Pictures of every mode: the pixels of a run equal those of the model's processor, given the opened file itself."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps
from test_images import fed, recipe
from tiny_images import KINDS, asked, image_model
from transformers import AutoTokenizer

from halftune.core.errors import DataError
from halftune.data.media.preview import MediaPreview
from halftune.data.media.processor import MediaProcessor, MediaSettings
from halftune.data.media.reference import BadMedia, decode, refer

_SIDES = (40, 24)
_CHANCE = np.random.default_rng(0)
_EIGHT = _CHANCE.integers(0, 256, (_SIDES[1], _SIDES[0], 4), dtype=np.uint8)
RGBA, RGB = Image.fromarray(_EIGHT), Image.fromarray(_EIGHT[..., :3])
L, P = RGB.convert("L"), RGB.quantize(200)
GREY = np.asarray(L).astype(np.uint16) * 257  # 16 bits of the same content


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png(pixels: np.ndarray, depth: int, colour: int, key: bytes = b"") -> bytes:
    """A PNG of rows of bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *_SIDES, depth, colour, 0, 0, 0))
    keys = chunk(b"tRNS", key) if key else b""
    return b"\x89PNG\r\n\x1a\n" + head + keys + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def big_endian(content: np.ndarray) -> Image.Image:
    return Image.frombytes("I;16B", _SIDES, content.astype(">u2").tobytes())


def turned(image: Image.Image, form: str, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(image, form, exif=exif, **options)


def wide(*channels: int) -> np.ndarray:
    return (_EIGHT[..., channels].astype(">u2") << 8) + 77


# transformers ignores profiles: this one would change each pixel
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
FILES: dict[str, bytes] = {
    **{f"png {mode}": saved(RGBA.convert(mode), "PNG") for mode in ("1", "L", "LA", "RGB", "RGBA")},
    "png P": saved(P, "PNG"),
    "png P, one transparent": saved(P, "PNG", transparency=5),
    "png P, alpha of each": saved(P, "PNG", transparency=bytes(range(200))),
    "png P, 4 bits": saved(RGB.quantize(12), "PNG", transparency=bytes([0, 99]), bits=4),
    "png RGB, key": saved(RGB, "PNG", transparency=RGB.getpixel((3, 3))),
    "png L, key": saved(L, "PNG", transparency=L.getpixel((3, 3))),
    "png 1, key": saved(L.convert("1"), "PNG", transparency=0),
    "png L, 4 bits": png(_EIGHT[:, : _SIDES[0] // 2, 0], 4, 0),
    "png RGB, 16 bits": png(wide(0, 1, 2), 16, 2),
    "png RGBA, 16 bits": png(wide(0, 1, 2, 3), 16, 6),
    "png LA, 16 bits": png(wide(0, 3), 16, 4),
    "png of an animation": saved(RGBA, "PNG", save_all=True, append_images=[RGB.convert("RGBA")]),
    "png, profile": saved(RGB, "PNG", icc_profile=PROFILE),
    "png RGBA, turned": turned(RGBA, "PNG"),
    "png P, turned": turned(P, "PNG", transparency=5),
    **{f"tiff {mode}": saved(RGBA.convert(mode), "TIFF") for mode in ("1", "L", "LA", "PA", "RGB", "RGBA", "RGBX")},
    "tiff P": saved(P, "TIFF"),
    "tiff CMYK": saved(RGB.convert("CMYK"), "TIFF"),
    "tiff LAB": saved(Image.frombytes("LAB", _SIDES, RGB.tobytes()), "TIFF"),
    "tiff YCbCr": saved(RGB.convert("YCbCr"), "TIFF", compression="jpeg"),
    "tiff of pages": saved(RGBA, "TIFF", save_all=True, append_images=[RGB.copy()]),
    "tiff RGBA, turned": turned(RGBA, "TIFF"),
    "jpeg L": saved(L, "JPEG"),
    "jpeg CMYK": saved(RGB.convert("CMYK"), "JPEG"),
    "jpeg, turned": turned(RGB, "JPEG"),
    "webp RGBA": saved(RGBA, "WEBP", lossless=True, exact=True),
    "webp of an animation": saved(RGBA, "WEBP", save_all=True, append_images=[RGB], lossless=True),
    "gif": saved(P, "GIF"),
    "gif, transparent": saved(P, "GIF", transparency=5),
    "gif of an animation": saved(P, "GIF", save_all=True, append_images=[P.rotate(180)], transparency=5),
    "bmp": saved(RGB, "BMP"),
}  # fmt: skip
SIXTEEN = {
    "png": saved(Image.fromarray(GREY), "PNG"),
    "png, turned": turned(Image.fromarray(GREY), "PNG"),
    "tiff": saved(Image.fromarray(GREY), "TIFF"),
    "tiff, big-endian": saved(big_endian(GREY), "TIFF"),
    "tiff, compressed": saved(Image.fromarray(GREY), "TIFF", compression="tiff_lzw"),
}
REFUSED = {
    "32 bits": saved(Image.fromarray(GREY.astype(np.int32)), "TIFF"),
    "signed": saved(Image.fromarray(GREY.astype(np.int32)), "TIFF").replace(
        struct.pack("<HHIHH", 258, 3, 1, 32, 0), struct.pack("<HHIHH", 258, 3, 1, 16, 0)
    ),
    "floats": saved(Image.fromarray(GREY / np.float32(65535)), "TIFF"),
    "white is zero": saved(Image.fromarray(GREY), "TIFF").replace(
        struct.pack("<HHIHH", 262, 3, 1, 1, 0), struct.pack("<HHIHH", 262, 3, 1, 0, 0)
    ),
    "12 bits": saved(Image.fromarray(GREY), "TIFF").replace(
        struct.pack("<HHIHH", 258, 3, 1, 16, 0), struct.pack("<HHIHH", 258, 3, 1, 12, 0)
    ),
    "16 bits, key": saved(Image.fromarray(GREY), "PNG", transparency=int(GREY[3, 3])),
    "4 bits, key": png(_EIGHT[:, : _SIDES[0] // 2, 0], 4, 0, struct.pack(">H", 9)),
    "RGB of 16 bits, key": png(wide(0, 1, 2), 16, 2, wide(0, 1, 2)[0, 0].tobytes()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_the_processors(kind: str, tmp_path: Path) -> None:
    image_model(tmp_path, kind)
    images = MediaProcessor(MediaSettings(str(tmp_path), kind, ""), AutoTokenizer.from_pretrained(tmp_path))
    other = []
    for name, content in FILES.items():
        opened = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        # for LFM2-VL this is no default of its class
        expected = images._own(
            text=[images.token], images=[[opened]], do_convert_rgb=True, return_tensors="pt", add_special_tokens=False
        )
        made = images.inputs([[refer(content, None)]])
        if not all(torch.equal(made[key], expected[key].to(made[key].dtype)) for key in images.family.inputs):
            other.append(name)
    assert other == []


@pytest.mark.parametrize("name", SIXTEEN)
def test_16_bits_are_as_8(name: str) -> None:
    expected = L.transpose(Image.Transpose.ROTATE_270) if "turned" in name else L
    assert decode(refer(SIXTEEN[name], None)).tobytes() == expected.convert("RGB").tobytes()


@pytest.mark.parametrize("name", REFUSED)
def test_pixels_without_a_known_white_are_refused(name: str) -> None:
    assert Image.open(io.BytesIO(REFUSED[name])).size == _SIDES
    with pytest.raises(BadMedia):
        refer(REFUSED[name], None)


def test_a_run_names_what_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(REFUSED["floats"])
    (tmp_path / "rows.jsonl").write_text(json.dumps(asked("<image>What?", images=("a.tif",))) + "\n")
    with pytest.raises(DataError) as caught:
        fed(*recipe(tmp_path, "llava"))
    assert caught.value.code == "data.bad_media"
    assert "mode F" in caught.value.what


def test_a_preview_is_what_the_model_sees(tmp_path: Path) -> None:
    image_model(tmp_path, "llava")
    shown = MediaPreview(MediaSettings(str(tmp_path), "llava", ""), AutoTokenizer.from_pretrained(tmp_path))
    refs = [refer(one, None) for one in (FILES["webp RGBA"], SIXTEEN["tiff"])]
    for ref, medium in zip(refs, shown.as_data(refs), strict=True):
        copy = Image.open(io.BytesIO(base64.b64decode(medium["preview"].partition(",")[2])))
        assert copy.tobytes() == decode(ref).tobytes()
