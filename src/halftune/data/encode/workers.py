"""Tokenises the rows of a source, in this process or in several worker processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.core.errors import DataError
from halftune.data.encode.prompts import PromptTokenizer
from halftune.data.encode.settings import Settings
from halftune.data.encode.tokenize import Outcome, RowTokenizer
from halftune.data.formats.conversation import BadRow
from halftune.data.formats.detect import Reading
from halftune.hardware.probe import cpu_cores

CHUNK = 512  # rows tokenised at a time
_AHEAD = 4  # chunks per worker that are waiting or done
LARGE = 20_000  # rows from which worker processes pay off

_row_tokenizer: RowTokenizer | None = None  # of a worker process


def tokenize_rows(
    rows: Collection[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    reading: Reading,
    settings: Settings,
    num_workers: int | str,
) -> Iterator[Outcome]:
    """Yield the outcome of every row, in order.

    Raises:
        BadRow: with the row's index.
        DataError: the tokenizer is not supported, or a worker was killed.
    """
    row_tokenizer = make_row_tokenizer(tokenizer, reading, settings)  # also with workers, to raise errors here
    remaining = iter(rows)
    chunks = iter(lambda: list(islice(remaining, CHUNK)), [])
    count = min(_count(num_workers, len(rows)), -(-len(rows) // CHUNK))
    if count <= 1:
        for number, chunk in enumerate(chunks):
            yield from _placed(_tokenize(row_tokenizer, chunk), number)
        return
    # spawn: a forked child of a process with threads (tokenizers, torch) may hang
    context = multiprocessing.get_context("spawn")
    # not multiprocessing.Pool, which waits for ever when one of its processes is killed
    with ProcessPoolExecutor(count, context, initializer=_start, initargs=(tokenizer, reading, settings)) as pool:
        try:
            waiting = deque(pool.submit(_work, chunk) for chunk in islice(chunks, _AHEAD * count))
            number = 0
            while waiting:  # not pool.map, which takes all rows at once
                yield from _placed(waiting.popleft().result(), number)
                waiting.extend(pool.submit(_work, chunk) for chunk in islice(chunks, 1))
                number += 1
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenisation worker died (killed or out of memory)",
                where="data.num_workers",
                remedy=f"set data.num_workers below {count}, or 1 to tokenise in this process",
                code="data.worker_died",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _count(num_workers: int | str, rows: int) -> int:
    if isinstance(num_workers, int):
        return num_workers
    return cpu_cores() if rows > LARGE else 1


def _placed(result: list[Outcome] | BadRow, chunk: int) -> list[Outcome]:
    if isinstance(result, BadRow):
        raise BadRow(result.args[0] + chunk * CHUNK, *result.args[1:])
    return result


def _tokenize(row_tokenizer: RowTokenizer, rows: Sequence[Mapping[str, Any]]) -> list[Outcome] | BadRow:
    try:
        return row_tokenizer.tokenize(rows)
    except BadRow as error:
        return error


def _start(tokenizer: PreTrainedTokenizerBase, reading: Reading, settings: Settings) -> None:
    global _row_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each process
    _row_tokenizer = make_row_tokenizer(tokenizer, reading, settings)


def _work(rows: Sequence[Mapping[str, Any]]) -> list[Outcome] | BadRow:
    assert _row_tokenizer is not None
    return _tokenize(_row_tokenizer, rows)


def make_row_tokenizer(tokenizer: PreTrainedTokenizerBase, reading: Reading, settings: Settings) -> RowTokenizer:
    """The tokenizer of one source's rows; arguments and errors as for :class:`RowTokenizer`."""
    return (PromptTokenizer if settings.prompts else RowTokenizer)(tokenizer, reading, settings)
