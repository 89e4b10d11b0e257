"""Videos of rows: frames are counted without decoding, and those that a model takes are decoded on demand.

PyAV reads MP4, MOV, WebM, Matroska and AVI; Pillow reads GIF.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image

from halftune.core.optional import need
from halftune.data.media.colours import to_rgb

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"  # no playlists, which name other files
MOST_FRAMES, MOST_SECONDS = 1 << 19, 4 * 3600
MOST_PIXELS = 1 << 25  # of a frame: 8K
_SLACK, _SHARE = 2.0, 1.1  # seconds, and times, that a header may claim more than the file has
_CLOSE = 0.01  # share that the header's rate may be off what was measured
_LOST = 8  # of so many frames one may be missing: VP8 has packets that show nothing
_DELAY = 10  # hundredths of a second of a GIF's frame without a time, as in browsers and FFmpeg


class NotVideo(Exception):
    """The bytes are no video that can be read; ``args[0]`` says why."""


@dataclass(frozen=True)
class Film:
    """What a file says of its video.

    Attributes:
        width, height: of a frame in pixels, rotated as the file asks.
        frames: that are shown; of a GIF one for each unit of time that divides the times of all.
        fps: shown per second, on average.
    """

    width: int
    height: int
    frames: int
    fps: float


def examine(encoded: bytes) -> Film:
    """Counts the frames of a video and decodes the first.

    Raises:
        NotVideo: not a video, without frames, cut off, or with too many frames, pixels or seconds.
    """
    found = _gif(encoded) if _is_gif(encoded) else _film(encoded)
    if found.frames < 1 or not found.fps > 0:
        raise NotVideo("no frames")
    if found.frames > MOST_FRAMES or found.frames / found.fps > MOST_SECONDS:
        seconds = found.frames / found.fps
        what = f"{found.frames:,} frames in {seconds:,.0f} s; at most {MOST_FRAMES:,} in {MOST_SECONDS:,} s"
        raise NotVideo(what)
    return found


def decoded(encoded: bytes, wanted: Sequence[int]) -> Iterator[np.ndarray]:
    """Frames of a video, uint8 ``[H, W, 3]``: one after the other, so that whoever takes them can scale each down.

    Args:
        encoded: the file.
        wanted: numbers of frames, each once, in order.

    Raises:
        NotVideo: the file is damaged behind its header.
    """
    yield from _gif_frames(encoded, wanted) if _is_gif(encoded) else _film_frames(encoded, wanted)


@contextmanager
def _opened(encoded: bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its video, which is decoded by one thread.

    Raises:
        NotVideo: not a video, or, inside, damaged.
        MissingPackageError: without PyAV.
    """
    av = need("av", why="video other than GIF")
    try:
        options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
        with av.open(io.BytesIO(encoded), options=options, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise NotVideo("no pictures")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise NotVideo("FFmpeg has no decoder for it")
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
            stream.codec_context.thread_count = 1
            if stream.width * stream.height > MOST_PIXELS:
                raise NotVideo(f"{stream.width:,} × {stream.height:,} pixels; at most {MOST_PIXELS:,}")
            yield container, stream
    except (av.error.FFmpegError, ArithmeticError, ValueError, TypeError, LookupError, MemoryError) as error:
        raise NotVideo("not a video that can be decoded, or damaged") from error


def _film(encoded: bytes) -> Film:
    with _opened(encoded) as (container, stream):
        unit, rate, claimed = stream.time_base, stream.average_rate, stream.frames
        length = (container.duration or 0) / 1_000_000
        counted, first, last, end = 0, None, None, 0.0
        for packet in container.demux():
            if packet.size == 0 or (packet.pts is None and packet.dts is None):
                continue
            shown = packet.pts if packet.pts is not None else packet.dts
            end = max(end, float((shown + (packet.duration or 0)) * packet.time_base))
            if packet.stream.index != stream.index or packet.is_discard:
                continue
            counted += 1
            first = shown if first is None else min(first, shown)
            last = max(last or 0, shown + (packet.duration or 0))
            if counted > MOST_FRAMES:
                break
        begun = (container.start_time or 0) / 1_000_000
    if length > _SHARE * (end - begun) + _SLACK or claimed > _SHARE * counted + 1:
        what = f"its header gives {claimed or 'some'} frames in {length:,.1f} s, the file has {counted:,} in {end:,.1f}"
        raise NotVideo(what)
    if first is None:
        raise NotVideo("no frames")
    shape = next(_film_frames(encoded, [0])).shape
    measured = counted / ((last - first) * unit) if last > first else Fraction(0)
    exact = rate if not measured or (rate and abs(rate - measured) <= _CLOSE * rate) else measured
    return Film(shape[1], shape[0], counted, float(exact or 0))


def _film_frames(encoded: bytes, wanted: Sequence[int]) -> Iterator[np.ndarray]:
    """Frames in the order that they are shown; groups of pictures without a wanted one are not decoded."""
    groups, waiting = _groups(encoded), list(wanted)
    with _opened(encoded) as (container, stream):
        packets = (one for one in container.demux(stream) if one.size)
        for start, end, many in groups:
            inside = [number - start for number in waiting if number < end]
            group = (next(packets, None) for _ in range(many))
            if not inside:
                for _ in group:
                    pass
                continue
            waiting = waiting[len(inside) :]
            yield from _shown(stream.codec_context, group, inside, end - start)
            if not waiting:
                return
    raise NotVideo("damaged: fewer frames than its header gives")


def _groups(encoded: bytes) -> list[tuple[int, int, int]]:
    """First frame, end and packets of each run of packets that can be decoded alone.

    A run begins with a key frame that is shown after all before and before all after: then its frames refer to no
    other run. In the order of showing, its frames have the numbers of its packets, whatever their order in the file.
    """
    with _opened(encoded) as (container, stream):
        found = [(one.is_keyframe, one.pts, one.is_discard) for one in container.demux(stream) if one.size]
    times = [time for _, time, _ in found]
    starts = [0]
    if None not in times:
        shown = np.array(times)
        before, after = np.maximum.accumulate(shown), np.minimum.accumulate(shown[::-1])[::-1]
        keys = np.array([key for key, _, _ in found])
        starts += [i for i in np.flatnonzero(keys).tolist() if i and before[i - 1] < shown[i] == after[i]]
    kept = np.concatenate([[0], np.cumsum([not discarded for _, _, discarded in found])]).tolist()
    return [
        (kept[start], kept[end], end - start)
        for start, end in zip(starts, [*starts[1:], len(found)], strict=True)
    ]  # fmt: skip


def _shown(codec: Any, packets: Iterator[Any], wanted: Sequence[int], expected: int) -> Iterator[np.ndarray]:
    """The wanted frames of a run of packets; the last one also for one that a codec does not show.

    Raises:
        NotVideo: frames are missing.
    """
    number, latest, waiting = 0, None, list(wanted)
    for packet in (*packets, None):  # None: all that the decoder still holds
        for frame in codec.decode(packet):
            latest = frame
            while waiting and waiting[0] == number:
                yield _pixels(frame)
                del waiting[0]
            number += 1
        if not waiting:
            break
    codec.flush_buffers()
    if waiting and (latest is None or (expected - number) * _LOST > expected):
        raise NotVideo(f"damaged: {number} frames instead of {expected}")
    for _ in waiting:
        yield _pixels(latest)


def _pixels(frame: Any) -> np.ndarray:
    if frame.width * frame.height > MOST_PIXELS:
        raise NotVideo("more pixels than its header gives")
    made = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(made, frame.rotation // 90)) if frame.rotation % 360 else made


def _is_gif(encoded: bytes) -> bool:
    return encoded[:4] == b"GIF8"


def _gif(encoded: bytes) -> Film:
    try:
        delays = list(_delays(encoded))
    except IndexError as error:
        raise NotVideo("damaged: the file ends early") from error
    width, height = (int.from_bytes(encoded[place : place + 2], "little") for place in (6, 8))
    if not 0 < width * height <= MOST_PIXELS:
        raise NotVideo(f"{width:,} × {height:,} pixels; at least 1, at most {MOST_PIXELS:,}")
    unit = math.gcd(*delays) or 1
    return Film(width, height, sum(delays) // unit, 100 / unit)


def _delays(encoded: bytes) -> Iterator[int]:
    """Hundredths of a second of each frame (GIF89a, sections 20 and 23); blocks of pixels are skipped.

    Raises:
        IndexError: the file ends early.
        NotVideo: another block than GIF has.
    """
    place, delay = 13 + _table(encoded[10]), 0
    while (block := encoded[place]) != 0x3B:
        if block == 0x21:
            if encoded[place + 1] == 0xF9:
                delay = int.from_bytes(encoded[place + 4 : place + 6], "little")
            place += 2
        elif block == 0x2C:
            yield delay if delay > 1 else _DELAY
            place, delay = place + 11 + _table(encoded[place + 9]), 0
        else:
            raise NotVideo("damaged")
        while size := encoded[place]:
            place += 1 + size
        place += 1


def _table(flags: int) -> int:
    """Bytes of a table of colours."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _gif_frames(encoded: bytes, wanted: Sequence[int]) -> Iterator[np.ndarray]:
    try:
        delays = list(_delays(encoded))
        ends = np.cumsum(delays) // math.gcd(*delays)
        with Image.open(io.BytesIO(encoded), formats=["GIF"]) as image:
            for number in wanted:
                image.seek(int(np.searchsorted(ends, number, side="right")))
                yield np.array(to_rgb(image))
    except NotVideo:
        raise
    except Exception as error:  # a decoder raises whatever a damaged file leads it to
        raise NotVideo("damaged") from error
