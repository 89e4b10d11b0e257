"""Tokenised examples: one at a time, and many as flat arrays in memory or memory-mapped."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NO_LABEL = -100
"""Label of a token that carries no loss (the convention of torch's cross-entropy and Hugging Face)."""


@dataclass(frozen=True)
class Segment:
    """One token sequence.

    Attributes:
        input_ids: int32[T].
        loss_mask: bool[T], tokens with a label. The first token's label is ignored: nothing predicts it.
        media: references of its images as ``media.reference.pack`` writes them; empty for text.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    media: bytes = b""

    @property
    def labels(self) -> np.ndarray:
        """int32[T], not shifted; ``NO_LABEL`` for tokens without a label."""
        return np.where(self.loss_mask, self.input_ids, np.int32(NO_LABEL))

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the last answer: int32, empty without labels and where all tokens have one."""
        unlabelled, labelled = np.flatnonzero(~self.loss_mask), np.flatnonzero(self.loss_mask)
        before = unlabelled[unlabelled < labelled[-1]] if len(labelled) else unlabelled[:0]
        return self.input_ids[: before[-1] + 1 if len(before) else 0]


@dataclass(frozen=True)
class Example:
    """The unit of shuffling, weighting, packing, hold-out and truncation; never split across forward passes.

    Attributes:
        segments: one for a conversation or document; two for a preference pair (chosen, rejected).
        columns: numbers that the method reads.
        row: of a prompt, its row, which rewards of an answer read; None for what is no prompt.
    """

    segments: tuple[Segment, ...]
    columns: Mapping[str, float] = field(default_factory=dict)
    row: Mapping[str, Any] | None = None


class TokenTurn(NamedTuple):
    """An assistant turn as token positions; ``locate.Turn`` has characters."""

    start: int
    end: int
    full_end: int
    complete: bool
    trained: bool


class WholeSample(NamedTuple):
    """A tokenised conversation before truncation.

    Attributes:
        ids: int32[T].
        offsets: start and end of each token in characters.
        trained: bool[T], tokens with a label.
        turns: assistant turns.
        contents: token ranges of user and tool messages, which truncation may shorten.
        whole: token ranges of images and sounds, which no cut may split.
    """

    ids: np.ndarray
    offsets: Sequence[tuple[int, int]]
    trained: np.ndarray
    turns: tuple[TokenTurn, ...]
    contents: tuple[tuple[int, int], ...]
    whole: tuple[tuple[int, int], ...] = ()


_MAPPED = ("ids", "labelled", "offsets", "firsts", "trained", "origins", "rows_at")
_READ = ("columns", "media", "media_at", "rows")  # may be empty: empty arrays cannot be memory-mapped
_REST = "store.json"


@dataclass(frozen=True)
class TokenStore:
    """N examples of S segments of T tokens together.

    Attributes:
        ids: int32[T].
        labelled: bool[T], tokens with a label; false for the first token of a segment.
        offsets: int64[S + 1], first token of each segment.
        firsts: int64[N + 1], first segment of each example.
        trained: int32[N], labelled tokens per example.
        origins: int32[N, 2], index into ``files`` and row number of each example.
        columns: fp64[N, C], numeric columns of the examples.
        media: uint8[M], references of images, those of one segment after the other.
        media_at: int64[I, 3], for each segment with images its number and its start and end in ``media``.
        rows: uint8[R], rows of prompts as JSON, one after the other.
        rows_at: int64[N + 1], start of each example's row in ``rows``; an example without a row has no bytes there.
        names: names of the columns.
        files: (path, unit), as in ``files.FileRows``.
        highest: highest token id in ``ids``.
        mapped: path, inode and size in bytes of each memory-mapped file.
    """

    ids: np.ndarray
    labelled: np.ndarray
    offsets: np.ndarray
    firsts: np.ndarray
    trained: np.ndarray
    origins: np.ndarray
    columns: np.ndarray
    names: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    highest: int
    media: np.ndarray
    media_at: np.ndarray
    rows: np.ndarray
    rows_at: np.ndarray
    mapped: tuple[tuple[Path, int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.trained)

    @property
    def lengths(self) -> np.ndarray:
        """int32[N], tokens per example."""
        return np.diff(self.offsets[self.firsts]).astype(np.int32)

    @property
    def longest(self) -> np.ndarray:
        """int32[N], tokens of the longest segment per example."""
        return np.maximum.reduceat(np.diff(self.offsets), self.firsts[:-1]).astype(np.int32)

    def origin(self, index: int) -> tuple[str, str, int]:
        """The source row of an example: ``("data.jsonl", "line", 17)``."""
        file, number = self.origins[index].tolist()
        return (*self.files[file], number)

    def example(self, index: int) -> Example:
        """The example at an index.

        Raises:
            ValueError: the arrays are corrupt: a token id or an offset out of range, or a truncated file.
        """
        self._check_length()
        first, last = self.firsts[index], self.firsts[index + 1]
        if not 0 <= first < last < len(self.offsets):
            raise ValueError(f"segments {first} to {last} are out of range (0 to {len(self.offsets) - 1})")
        segments = tuple(self._segment(number) for number in range(first, last))
        row = self._row(index)
        columns = dict(zip(self.names, self.columns[index].tolist(), strict=True))
        return Example(segments, columns, json.loads(row) if row else None)

    def _segment(self, number: int) -> Segment:
        start, end = self.offsets[number], self.offsets[number + 1]
        if not 0 <= start < end <= len(self.ids):
            raise ValueError(f"tokens {start} to {end} are out of range (0 to {len(self.ids)})")
        ids = np.array(self.ids[start:end])
        if ids.min() < 0 or ids.max() > self.highest:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} are out of range (0 to {self.highest})")
        return Segment(ids, np.array(self.labelled[start:end]), self.media_of(number))

    def media_of(self, number: int) -> bytes:
        """The references of a segment's images; empty for text."""
        place = int(np.searchsorted(self.media_at[:, 0], number))
        if place == len(self.media_at) or self.media_at[place, 0] != number:
            return b""
        return self.media[self.media_at[place, 1] : self.media_at[place, 2]].tobytes()

    def _row(self, index: int) -> bytes:
        return self.rows[self.rows_at[index] : self.rows_at[index + 1]].tobytes()

    def digests(self, index: int) -> bytes:
        """What tells an example from another one of the same tokens: digests of its images in order, and its row."""
        numbers = range(self.firsts[index], self.firsts[index + 1]) if len(self.media_at) else ()
        images = [ref["digest"] for number in numbers for ref in json.loads(self.media_of(number) or "[]")]
        return "".join(images).encode() + self._row(index)

    def _check_length(self) -> None:
        """Check that no mapped file was truncated: reading beyond its end kills the process with SIGBUS."""
        for path, inode, size in self.mapped:
            with suppress(FileNotFoundError):  # a deleted or replaced file stays mapped
                now = path.stat()
                if now.st_ino == inode and now.st_size < size:
                    raise ValueError(f"{path.name} was truncated from {size:,} to {now.st_size:,} bytes")


def build_store(
    examples: Sequence[Example],
    origins: Sequence[tuple[int, int]],
    files: Sequence[tuple[str, str]],
) -> TokenStore:
    """Concatenate examples into flat arrays.

    Args:
        examples: N examples with the same columns.
        origins: index into ``files`` and row number of each example.
        files: (path, unit).
    """
    segments = [segment for example in examples for segment in example.segments]
    offsets, firsts = _starts([len(one.input_ids) for one in segments]), _starts([len(e.segments) for e in examples])
    ids = np.concatenate([np.zeros(0, np.int32), *(one.input_ids for one in segments)]).astype(np.int32)
    labelled = np.concatenate([np.zeros(0, bool), *(one.loss_mask for one in segments)])
    labelled[offsets[:-1]] = False
    before = np.concatenate([[0], np.cumsum(labelled, dtype=np.int64)])
    trained = np.diff(before[offsets[firsts]]).astype(np.int32)
    places = np.array(origins, dtype=np.int32).reshape(-1, 2)
    names, columns = _columns(examples)
    highest = int(ids.max(initial=0))
    held = list(dict.fromkeys(one.media for one in segments if one.media))  # answers to one prompt share its media
    media, ends = np.frombuffer(b"".join(held), dtype=np.uint8), _starts([len(one) for one in held])
    ranges = {one: (ends[place], ends[place + 1]) for place, one in enumerate(held)}
    media_at = np.array([(i, *ranges[one.media]) for i, one in enumerate(segments) if one.media], np.int64)
    media_at = media_at.reshape(-1, 3)
    packed = [_as_json(one.row) for one in examples]
    rows, rows_at = np.frombuffer(b"".join(packed), dtype=np.uint8), _starts([len(one) for one in packed])
    return TokenStore(
        ids, labelled, offsets, firsts, trained, places, columns, names, tuple(files), highest, media, media_at, rows,
        rows_at,
    )  # fmt: skip


def _as_json(row: Mapping[str, Any] | None) -> bytes:
    return b"" if row is None else json.dumps(row, default=str, ensure_ascii=False).encode(errors="replace")


def _columns(examples: Sequence[Example]) -> tuple[tuple[str, ...], np.ndarray]:
    """Names and values, float64[examples, names], of the examples' columns."""
    names = tuple(examples[0].columns) if examples else ()
    values = np.array([[one.columns[name] for name in names] for one in examples], dtype=np.float64)
    return names, values.reshape(len(examples), len(names))


def _starts(sizes: Sequence[int]) -> np.ndarray:
    """int64[N + 1]: offsets of N items of these sizes."""
    return np.cumsum([0, *sizes], dtype=np.int64)


def ranges_of(stores: Sequence[TokenStore]) -> list[np.ndarray]:
    """Positions of each store's samples in the concatenation of all stores."""
    ends = np.cumsum([len(store) for store in stores])
    return [np.arange(end - len(store), end) for end, store in zip(ends, stores, strict=True)]


class StoreWriter:
    """Appends examples to the arrays of a ``TokenStore``, in the files of a folder or in memory.

    Args:
        folder: an empty folder; None for memory.
        files: (path, unit), as in ``TokenStore``.
    """

    def __init__(self, folder: Path | None, files: Sequence[tuple[str, str]]) -> None:
        self._folder, self._files = folder, tuple(files)
        self._arrays: dict[str, _GrowingArray] = {}
        self._names: tuple[str, ...] = ()
        self._highest = 0

    def append(self, examples: Sequence[Example], origins: Sequence[tuple[int, int]]) -> None:
        """Append examples with the columns of all earlier ones; arguments as for ``build_store``.

        Raises:
            OSError: a file cannot be written.
        """
        part = build_store(examples, origins, self._files)
        first = not self._arrays
        tokens, segments, media = self._count("ids"), self._count("offsets") - (not first), self._count("media")
        values = {name: vars(part)[name] for name in (*_MAPPED, *_READ)}
        values["media_at"] = values["media_at"] + [segments, media, media]
        for name, start in (("offsets", tokens), ("firsts", segments), ("rows_at", self._count("rows"))):
            values[name] = values[name][0 if first else 1 :] + start
        for name, array in values.items():
            if first:
                path = self._folder / f"{name}.npy" if self._folder else None
                self._arrays[name] = _GrowingArray(path, array)
            self._arrays[name].extend(array)
        self._names = part.names
        self._highest = max(self._highest, part.highest)

    def _count(self, name: str) -> int:
        return self._arrays[name].count if self._arrays else 0

    def finish(self) -> TokenStore:
        """The store, memory-mapped if it is in a folder.

        Raises:
            OSError: a file cannot be written.
        """
        if not self._arrays:
            self.append([], [])
        arrays = {name: array.finish() for name, array in self._arrays.items()}
        if self._folder is None:
            return TokenStore(names=self._names, files=self._files, highest=self._highest, mapped=(), **arrays)
        _save_rest(self._folder, self._files, self._highest, self._names)
        return load_store(self._folder)


class _GrowingArray:
    """An array that grows along its first axis, in a .npy file or in memory.

    Args:
        path: the file; None for memory.
        like: an array of the same dtype and width.
    """

    def __init__(self, path: Path | None, like: np.ndarray) -> None:
        self._dtype, self._width, self.count = like.dtype, like.shape[1:], 0
        self._in_memory = path is None
        self._file = path.open("w+b") if path else io.BytesIO()
        if path:
            self._write_header()

    def _write_header(self) -> None:
        """Write the header; its size does not depend on the length of the array."""
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.count, *self._width)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def extend(self, array: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(array).data if array.size else b"")
        self.count += len(array)

    def finish(self) -> np.ndarray:
        """The array in memory; empty for a file, which is complete and closed."""
        if not self._in_memory:
            with self._file:
                self._file.seek(0)
                self._write_header()
            return np.zeros(0, self._dtype)
        return np.frombuffer(self._file.getbuffer(), self._dtype).reshape(self.count, *self._width)  # type: ignore[union-attr]


def _save_rest(folder: Path, files: Sequence[tuple[str, str]], highest: int, names: Sequence[str]) -> None:
    rest = {"files": files, "highest": highest, "names": names}
    (folder / _REST).write_text(json.dumps(rest), encoding="utf-8")


def load_store(folder: Path) -> TokenStore:
    """Memory-map the arrays of a folder.

    Raises:
        OSError, ValueError, EOFError: a file is missing, truncated or has the wrong length.
    """
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _MAPPED}
    arrays |= {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in _READ}
    offsets, firsts, rows_at = arrays["offsets"], arrays["firsts"], arrays["rows_at"]
    whole = len(arrays["ids"]) == len(arrays["labelled"]) == offsets[-1] and firsts[-1] == len(offsets) - 1
    whole = whole and len(arrays["rows"]) == rows_at[-1]
    counts = {len(arrays[name]) for name in ("trained", "origins", "columns")} | {len(firsts) - 1, len(rows_at) - 1}
    if not whole or len(counts) > 1:
        raise ValueError("arrays of different lengths")
    rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
    files = tuple((path, unit) for path, unit in rest["files"])
    paths = [folder / f"{name}.npy" for name in _MAPPED]
    mapped = tuple((path, path.stat().st_ino, path.stat().st_size) for path in paths)
    return TokenStore(names=tuple(rest["names"]), files=files, highest=rest["highest"], mapped=mapped, **arrays)
