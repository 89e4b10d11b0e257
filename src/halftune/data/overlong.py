"""Makes a conversation fit into ``max_length``; no header, end-of-turn token or whole answer is cut silently.

In this order: what follows the last trained answer goes; texts of user and tool messages are shortened (the longest
first, each keeping its beginning); later exchanges are left out; and where one exchange alone is too long, its answer
is cut and loses its end-of-turn token. System messages and tool definitions are never touched. Whatever was done is
named.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halftune.data.conversation import RowDropped
from halftune.data.sample import TokenTurn, WholeSample

TAIL = "turns after the last answer left out"
SHORTENED = "question or tool result shortened"
LATER = "later exchanges left out"
EARLIER = "earlier exchanges left out"
CUT = "answer cut, its end-of-turn token is not trained"
MIN_ANSWER = 8  # tokens of a cut answer that are worth training

Range = tuple[int, int]


def truncate(sample: WholeSample, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Chooses the tokens that stay.

    Args:
        sample: more than ``limit`` tokens.
        limit: tokens that fit.

    Returns:
        bool[T], true for tokens that stay (at most ``limit``), and what was done.

    Raises:
        RowDropped: not even one answer fits.
    """
    trained = [index for index, turn in enumerate(sample.turns) if turn.trained]
    if not trained:
        raise RowDropped("longer than max_length, and no answer in it to keep")
    floor = min(64, limit // 8)
    for ranges, done in _candidates(sample, trained):
        keep = _mask(sample, ranges)
        shortened = _shorten(sample, keep, limit, floor)
        if keep.sum() <= limit:
            return keep, (*done, SHORTENED) if shortened else done
    return _cut_answer(sample, trained[0], limit)


def _candidates(sample: WholeSample, trained: list[int]) -> Iterator[tuple[list[Range], tuple[str, ...]]]:
    """Token ranges to keep, from most to least; every one ends with a trained answer."""
    turns, first, last = sample.turns, trained[0], trained[-1]
    for index in reversed(trained):
        whole = turns[index].full_end
        done = (LATER,) if index < last else (TAIL,) if whole < len(sample.ids) else ()
        yield [(0, whole)], done
    for skipped in range(
        1, first
    ):  # untrained exchanges between the first one, with the system message, and the answer
        yield [(0, turns[0].full_end), (turns[skipped].full_end, turns[first].full_end)], (EARLIER,)


def _mask(sample: WholeSample, ranges: list[Range]) -> np.ndarray:
    keep = np.zeros(len(sample.ids), dtype=bool)
    for start, end in ranges:
        keep[start:end] = True
    return keep


def _shorten(sample: WholeSample, keep: np.ndarray, limit: int, floor: int) -> bool:
    """Shortens the longest texts, no text below ``floor`` tokens, until ``limit`` is met, or not at all."""
    excess = int(keep.sum()) - limit
    if excess <= 0:
        return False
    contents = [(start, end) for start, end in sample.contents if keep[start:end].all() and end > start]
    lengths = np.array([end - start for start, end in contents], dtype=np.int64)
    if np.maximum(lengths - floor, 0).sum() < excess:
        return False
    low, high = floor, int(lengths.max())
    while low < high:  # the largest length to which all may be shortened
        middle = (low + high + 1) // 2
        if np.maximum(lengths - middle, 0).sum() >= excess:
            low = middle
        else:
            high = middle - 1
    for start, end in contents:
        if end - start > low:
            keep[_whole_character(sample, start, start + low) : end] = False
    return True


def _whole_character(sample: WholeSample, lowest: int, cut: int) -> int:
    """Moves a cut back to where no character is split over tokens."""
    while cut > lowest and sample.starts[cut] < sample.ends[cut - 1]:
        cut -= 1
    return cut


def _cut_answer(sample: WholeSample, chosen: int, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """One exchange (behind the first one, where that holds the system message) with as much of its answer as fits."""
    turn: TokenTurn = sample.turns[chosen]
    ranges = [(0, turn.full_end)]
    done: tuple[str, ...] = (CUT,)
    if any(other.trained for other in sample.turns[chosen + 1 :]):
        done = (LATER, *done)
    if chosen > 1:
        ranges = [(0, sample.turns[0].full_end), (sample.turns[chosen - 1].full_end, turn.full_end)]
        done = (EARLIER, *done)
    keep = _mask(sample, ranges)
    answer = turn.full_end - turn.start
    prompt = int(keep.sum()) - answer
    half = limit // 2
    if prompt > half:  # the question may take half of the room, or as little as it needs, and the answer gets the rest
        room = _mask(sample, ranges)
        room[turn.start : turn.full_end] = False
        spare = sum(end - start - 1 for start, end in sample.contents if end > start and room[start:end].all())
        if _shorten(sample, room, max(half, prompt - spare), 1):
            keep[: turn.start] = room[: turn.start]
            prompt, done = int(room.sum()), (SHORTENED, *done)
    cut = _whole_character(sample, turn.start, turn.start + min(max(limit - prompt, 0), turn.end - turn.start - 1))
    if cut - turn.start < min(MIN_ANSWER, turn.end - turn.start - 1) or cut <= turn.start:
        raise RowDropped("longer than max_length: what comes before the answer leaves no room for it")
    keep[cut:] = False
    return keep, done
