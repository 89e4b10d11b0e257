"""References to images, videos and sounds: a file or its bytes, and its size. The feed decodes them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from halftune.core.files import read_limited
from halftune.data.media.colours import to_rgb, unread
from halftune.data.media.frames import NotVideo, examine
from halftune.data.media.sound import NotSound, header
from halftune.data.store import TokenStore

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # what PIL may try: fewer decoders that read foreign files
_WIDTH, _HEIGHT = 0x0100, 0x0101  # tags of a TIFF
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: these exchange width and height
_FILE_URL = re.compile("^file://(localhost(?=/))?")
_BASE64 = re.compile(r"[A-Za-z0-9+/\r\n]{64,}={0,2}\s*")  # of the smallest files, or a long path without a dot
_LARGEST = 1 << 28  # bytes of a file


class BadMedia(Exception):
    """An image, a video or a sound that cannot be used; ``args[0]`` says why."""


@dataclass(frozen=True)
class MediaRef:
    """An image, a video or a sound of a segment.

    Attributes:
        width, height: of an image or a frame in pixels, after the rotation that the file asks for; else 0.
        digest: of the encoded image, video or sound.
        path: absolute path of the file, with the links of the row; empty for an image in the row itself.
        content: the encoded image of a row that holds it; else empty.
        changed: time of the file's last change, in ns.
        frames: of a sound samples of each channel, of a video pictures; else 0.
        rate: of a sound samples per second, from the header; else 0.
        size: of the file in bytes.
        fps: of a video pictures per second; else 0.
        target: where links in ``path`` led; empty without links.
    """

    width: int
    height: int
    digest: str
    path: str = ""
    content: bytes = b""
    changed: int = 0
    frames: int = 0
    rate: int = 0
    size: int = 0
    fps: float = 0.0
    target: str = ""

    @property
    def kind(self) -> str:
        """``image``, ``video`` or ``audio``."""
        return "video" if self.fps else "audio" if self.rate else "image"

    @property
    def is_audio(self) -> bool:
        """Whether it is a sound."""
        return self.kind == "audio"

    @property
    def seconds(self) -> float:
        """Length of a sound or a video; 0 for an image."""
        return self.frames / (self.fps or self.rate or 1)

    def is_unchanged(self) -> bool:
        """Whether links lead where they did, and the file still has its time and size, or else its content.

        True for an image in the row.
        """
        if not self.path:
            return True
        if self.target and os.path.realpath(self.path) != self.target:
            return False
        try:
            found = os.stat(self.path)
            if (found.st_mtime_ns, found.st_size) == (self.changed, self.size):
                return True
            return _digest(_read(Path(self.path))) == self.digest
        except (OSError, BadMedia):
            return False


def pack(refs: Sequence[MediaRef]) -> bytes:
    """The references of one segment as JSON."""
    values = [{**vars(ref), "content": base64.b64encode(ref.content).decode()} for ref in refs]
    return json.dumps(values).encode()


def unpack(stored: bytes) -> tuple[MediaRef, ...]:
    """The references that ``pack`` wrote."""
    return tuple(MediaRef(**{**one, "content": base64.b64decode(one["content"])}) for one in json.loads(stored))


def media_same(store: TokenStore) -> bool:
    """Whether all images that a store refers to are as they were."""
    refs = {ref for start, end in store.media_at[:, 1:].tolist() for ref in unpack(store.media[start:end].tobytes())}
    return all(ref.is_unchanged() for ref in refs)


def places(paths: Iterable[str]) -> dict[str, list[Any]]:
    """Where paths lead, and the time in ns and the size of what is there, or zeros; empty paths are left out."""
    return {path: _place(path) for path in paths if path}


def _place(path: str) -> list[Any]:
    target = os.path.realpath(path)
    try:
        found = os.stat(target)
    except OSError:
        return [target, 0, 0]
    return [target, found.st_mtime_ns, found.st_size]


def path_of(value: Any, folder: Path | None) -> str:
    """The absolute path that a row names; empty for what is in the row itself, and for an address."""
    with suppress(BadMedia):
        given = _given(value, folder)
        return str(folder.absolute() / given) if folder is not None and isinstance(given, str) else ""
    return ""


def refer(value: Any, folder: Path | None, kind: str = "image") -> MediaRef:
    """The reference of a row's image, video or sound; reads its header, and counts a video's frames.

    Args:
        value: a path, a data URL, base64, bytes, or a mapping with one of ``bytes``, ``base64``, ``path``, ``url``.
        folder: paths are relative to it and may not leave it; None: paths are refused.
        kind: ``image``, ``video`` or ``audio``.

    Raises:
        BadMedia: not found, outside the folder, not of this kind, empty or too large.
    """
    given, _reference = _given(value, folder), {"audio": _sound, "video": _video}.get(kind, _image)
    if isinstance(given, bytes):
        return _reference(given, content=given)
    path, file = _inside(given, folder)
    made = _reference(_read(file), path=str(path), changed=file.stat().st_mtime_ns)
    return made if path == file else replace(made, target=str(file))


def _given(value: Any, folder: Path | None) -> bytes | str:
    """Bytes, or a path."""
    if isinstance(value, Mapping):
        for name in ("data", "base64"):  # the first is of an input_audio part
            if isinstance(value.get(name), str):
                return _of_url(f"data:;base64,{value[name]}")
        keys = ("bytes", "path", "url", "image", "image_url", "video", "video_url", "audio", "audio_url")
        value = next((value[key] for key in keys if value.get(key) is not None), None)
        return _given(value, folder)
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, str) and value and "\0" not in value:
        return _of_url(value) if value[:5].lower() == "data:" else _path_or_base64(value, folder)
    raise BadMedia("expected a path, a data URL or bytes")


def _path_or_base64(given: str, folder: Path | None) -> bytes | str:
    """A path, or the bytes of base64 that names no file: as transformers' ``load_image``."""
    path = _FILE_URL.sub("", given)
    if "://" in path:
        raise BadMedia(f"{given.partition(':')[0]} addresses are not read; download the files")
    if _BASE64.fullmatch(path) and not (folder is not None and os.path.exists(folder / path)):
        with suppress(BadMedia):
            return _of_url(f"data:;base64,{path}")
    return path


def _of_url(given: str) -> bytes:
    head, _, body = given.partition(",")
    if not head.lower().endswith(";base64"):
        raise BadMedia("the data URL is not base64")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error as error:
        raise BadMedia("the data URL is not base64") from error


def _inside(given: str, folder: Path | None) -> tuple[Path, Path]:
    """The absolute path, and where its links lead."""
    if folder is None:
        raise BadMedia(f"{given}: the data has no folder; set data.media_folder")
    path = folder.absolute() / given
    try:
        base, file = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise BadMedia(f"{given}: not found") from error
    if not any(file.is_relative_to(one) for one in (base, *_hub_blobs(base))):
        remedy = "copy it there, or set data.media_folder to a folder that holds both and begin the rows' paths there"
        raise BadMedia(f"{given}: outside {base}; {remedy}")
    return path, file


def _hub_blobs(folder: Path) -> list[Path]:
    """Where links of a snapshot in the Hugging Face cache lead: files of the same data set."""
    snapshots = (one for one in (folder, *folder.parents) if one.name == "snapshots")
    return [one.with_name("blobs") for one in snapshots if one.parent.name.startswith("datasets--")]


def _read(file: Path) -> bytes:
    try:
        return read_limited(file, _LARGEST)
    except OSError as error:
        raise BadMedia(f"{file}: {(error.strerror or 'cannot be read').lower()}") from error


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _sound(encoded: bytes, *, path: str = "", content: bytes = b"", changed: int = 0) -> MediaRef:
    try:
        frames, rate = header(encoded)
    except NotSound as error:
        raise BadMedia(f"{path or 'the sound in the row'}: {error}") from error
    return MediaRef(0, 0, _digest(encoded), path, content, changed, frames, rate, len(encoded))


def _video(encoded: bytes, *, path: str = "", content: bytes = b"", changed: int = 0) -> MediaRef:
    try:
        found = examine(encoded)
    except NotVideo as error:
        raise BadMedia(f"{path or 'the video in the row'}: {error}") from error
    size = (found.width, found.height, _digest(encoded), path, content, changed, found.frames)
    return MediaRef(*size, size=len(encoded), fps=found.fps)


def _image(encoded: bytes, *, path: str = "", content: bytes = b"", changed: int = 0) -> MediaRef:
    with _opened(encoded, path) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _TURNED:
            # Pillow 12 has turned the size of a TIFF already, Pillow 10 not
            stored = image.tag_v2 if isinstance(image, TiffImageFile) else {_WIDTH: width, _HEIGHT: height}
            width, height = stored[_HEIGHT], stored[_WIDTH]
    return MediaRef(width, height, _digest(encoded), path, content, changed, size=len(encoded))


@contextmanager
def _opened(encoded: bytes, path: str) -> Iterator[Image.Image]:
    """The image, not yet decoded.

    Raises:
        BadMedia: not an image, without pixels, with too many, of a mode without RGB, or, inside, damaged.
    """
    name = path or "the image in the row"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        with image:
            pixels = image.width * image.height
            if pixels == 0:
                raise BadMedia(f"{name}: no pixels")
            if Image.MAX_IMAGE_PIXELS is not None and pixels > Image.MAX_IMAGE_PIXELS:
                raise BadMedia(f"{name}: {pixels:,} pixels, more than {Image.MAX_IMAGE_PIXELS:,}")
            if reason := unread(image):
                raise BadMedia(f"{name}: {reason}")
            yield image
    except Image.DecompressionBombError as error:
        raise BadMedia(f"{name}: more than {Image.MAX_IMAGE_PIXELS:,} pixels") from error
    except BadMedia:
        raise
    except Exception as error:  # a decoder raises whatever a damaged file leads it to
        raise BadMedia(f"{name}: not an image, or damaged") from error


def read_content(ref: MediaRef) -> bytes:
    """The encoded image, video or sound.

    Raises:
        BadMedia: it cannot be read, or changed since it was tokenised.
    """
    encoded = ref.content or _read(Path(ref.path))
    if _digest(encoded) != ref.digest:
        raise BadMedia(f"{ref.path}: changed since it was tokenised")
    return encoded


def decode(ref: MediaRef) -> Image.Image:
    """The image in RGB, on white, rotated as EXIF says.

    Raises:
        BadMedia: it cannot be read, is damaged, or changed since it was tokenised.
    """
    encoded = read_content(ref)
    with _opened(encoded, ref.path) as image:
        made = to_rgb(ImageOps.exif_transpose(image))
    if made.size != (ref.width, ref.height):
        raise BadMedia(f"{ref.path or 'the image in the row'}: its header gives another size than its pixels")
    return made
