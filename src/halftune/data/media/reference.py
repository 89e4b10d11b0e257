"""References to images: a file or its bytes, and the size from the header. Pixels are decoded in the feed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from halftune.data.store import TokenStore

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # what PIL may try: fewer decoders that read foreign files
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: these exchange width and height
_LARGEST = 1 << 28  # bytes of a file
_SAMPLE = 1 << 16  # bytes at the start and at the end of a file that its digest reads


class BadImage(Exception):
    """An image that cannot be used; ``args[0]`` says why."""


@dataclass(frozen=True)
class MediaRef:
    """An image of a segment.

    Attributes:
        width, height: in pixels, from the header, after the rotation that EXIF asks for.
        digest: of its size in bytes and of the first and last 64 KiB.
        path: absolute path of the file; empty for an image in the row itself.
        content: the encoded image of a row that holds it; else empty.
        changed: time of the file's last change, in ns.
    """

    width: int
    height: int
    digest: str
    path: str = ""
    content: bytes = b""
    changed: int = 0

    def is_unchanged(self) -> bool:
        """Whether the file still has its size in bytes, time and content; true for an image in the row."""
        if not self.path:
            return True
        try:
            if os.stat(self.path).st_mtime_ns == self.changed:
                return True
            return _digest(_read(Path(self.path))) == self.digest
        except (OSError, BadImage):
            return False


def pack(refs: Sequence[MediaRef]) -> bytes:
    """The references of one segment as JSON."""
    values = [{**vars(ref), "content": base64.b64encode(ref.content).decode()} for ref in refs]
    return json.dumps(values).encode()


def unpack(stored: bytes) -> tuple[MediaRef, ...]:
    """The references that ``pack`` wrote."""
    return tuple(MediaRef(**{**one, "content": base64.b64decode(one["content"])}) for one in json.loads(stored))


def images_same(store: TokenStore) -> bool:
    """Whether all images that a store refers to are as they were."""
    refs = {ref for start, end in store.media_at[:, 1:].tolist() for ref in unpack(store.media[start:end].tobytes())}
    return all(ref.is_unchanged() for ref in refs)


def refer(value: Any, folder: Path | None) -> MediaRef:
    """The reference of a row's image; reads its header.

    Args:
        value: a path, a data URL, bytes, or a mapping with one of ``bytes``, ``path``, ``url``.
        folder: paths are relative to it and may not leave it; None: paths are refused.

    Raises:
        BadImage: not found, outside the folder, not an image, empty or too large.
    """
    given = _given(value)
    if isinstance(given, bytes):
        return _reference(given, content=given)
    if given.startswith("data:"):
        content = _of_url(given)
        return _reference(content, content=content)
    if "://" in given and not given.startswith("file://"):
        raise BadImage(f"{given.partition(':')[0]} addresses are not read; download the images")
    file = _inside(given.removeprefix("file://"), folder)
    return _reference(_read(file), path=str(file), changed=file.stat().st_mtime_ns)


def _given(value: Any) -> bytes | str:
    """Bytes, or a path or address."""
    if isinstance(value, Mapping):
        keys = ("bytes", "path", "url", "image", "image_url")
        value = next((value[key] for key in keys if value.get(key) is not None), None)
        return _given(value)
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, str) and value and "\0" not in value:
        return value
    raise BadImage("expected a path, a data URL or bytes")


def _of_url(given: str) -> bytes:
    head, _, body = given.partition(",")
    if not head.endswith(";base64"):
        raise BadImage("the data URL is not base64")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise BadImage("the data URL is not base64") from error


def _inside(given: str, folder: Path | None) -> Path:
    if folder is None:
        raise BadImage(f"{given}: the data has no folder; set data.media_folder")
    try:
        base, file = folder.resolve(), (folder / given).resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise BadImage(f"{given}: not found") from error
    if not file.is_relative_to(base):
        raise BadImage(f"{given}: outside {base}; set data.media_folder to a folder that holds it")
    return file


def _read(file: Path) -> bytes:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise BadImage(f"{file}: not a file")
        if found.st_size > _LARGEST:
            raise BadImage(f"{file}: {found.st_size:,} bytes, more than {_LARGEST:,}")
        return file.read_bytes()
    except OSError as error:
        raise BadImage(f"{file}: {(error.strerror or 'cannot be read').lower()}") from error


def _digest(content: bytes) -> str:
    parts = (str(len(content)).encode(), content[:_SAMPLE], content[-_SAMPLE:])
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _reference(encoded: bytes, *, path: str = "", content: bytes = b"", changed: int = 0) -> MediaRef:
    with _opened(encoded, path) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _TURNED:
            width, height = height, width
    return MediaRef(width, height, _digest(encoded), path, content, changed)


@contextmanager
def _opened(encoded: bytes, path: str) -> Iterator[Image.Image]:
    """The image, not yet decoded.

    Raises:
        BadImage: not an image, without pixels, with too many, or, inside, damaged.
    """
    name = path or "the image in the row"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        with image:
            pixels = image.width * image.height
            if pixels == 0:
                raise BadImage(f"{name}: no pixels")
            if Image.MAX_IMAGE_PIXELS is not None and pixels > Image.MAX_IMAGE_PIXELS:
                raise BadImage(f"{name}: {pixels:,} pixels, more than {Image.MAX_IMAGE_PIXELS:,}")
            yield image
    except Image.DecompressionBombError as error:
        raise BadImage(f"{name}: more than {Image.MAX_IMAGE_PIXELS:,} pixels") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise BadImage(f"{name}: not an image, or damaged") from error


def decode(ref: MediaRef) -> Image.Image:
    """The image in RGB, rotated as EXIF says.

    Raises:
        BadImage: it cannot be read, is damaged, or changed since it was tokenised.
    """
    encoded = ref.content or _read(Path(ref.path))
    if _digest(encoded) != ref.digest:
        raise BadImage(f"{ref.path}: changed since it was tokenised")
    with _opened(encoded, ref.path) as image:
        made = ImageOps.exif_transpose(image).convert("RGB")
    if made.size != (ref.width, ref.height):
        raise BadImage(f"{ref.path or 'the image in the row'}: its header gives another size than its pixels")
    return made
