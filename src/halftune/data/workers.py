"""Tokenises rows in this process or in worker processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from transformers import PreTrainedTokenizerBase

from halftune.core.errors import DataError
from halftune.data.detect import Reading
from halftune.data.tokenize import BadRow, Outcome, RowTokenizer, Settings
from halftune.hardware.host import cpu_cores

CHUNK = 512  # rows tokenised at a time
LARGE = 20_000  # rows from which worker processes pay off

_row_tokenizer: RowTokenizer | None = None  # of a worker process


def tokenize_rows(
    rows: Sequence[Mapping[str, Any]],
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
    row_tokenizer = RowTokenizer(tokenizer, reading, settings)  # also with workers, to raise errors here
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    count = min(_count(num_workers, len(rows)), len(chunks))
    if count <= 1:
        for number, chunk in enumerate(chunks):
            yield from _placed(_tokenize(row_tokenizer, chunk), number)
        return
    # spawn: a forked child of a process with threads (tokenizers, torch) may hang
    context = multiprocessing.get_context("spawn")
    # not multiprocessing.Pool, which waits for ever when one of its processes is killed
    with ProcessPoolExecutor(count, context, initializer=_start, initargs=(tokenizer, reading, settings)) as pool:
        try:
            for number, result in enumerate(pool.map(_work, chunks)):
                yield from _placed(result, number)
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
    _row_tokenizer = RowTokenizer(tokenizer, reading, settings)


def _work(rows: Sequence[Mapping[str, Any]]) -> list[Outcome] | BadRow:
    assert _row_tokenizer is not None
    return _tokenize(_row_tokenizer, rows)
