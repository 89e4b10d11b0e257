"""Truncates a conversation to ``max_length``; every cut of a header, end-of-turn token or answer is reported.

``truncate`` takes these steps until the rest fits: turns after the last trained answer are dropped; user and tool
messages are shortened (longest first, from the end); later exchanges are dropped; if one exchange alone is too long,
its answer is cut and loses its end-of-turn token. System messages and tool definitions are never changed.

``in_proportion`` is LLaMA-Factory's rule (``infer_seqlen``): exchanges are kept in order while there is room; where
only the last turn is trained, the last ones first. In the one that does not fit, the question or the answer is cut at
its end if the other one needs less than half of the room; otherwise both are cut, in proportion to their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from halftune.data.formats.conversation import TOO_LONG, RowDropped
from halftune.data.store import Segment, TokenTurn, WholeSample

TAIL = "turns after the last answer dropped"
SHORTENED = "question or tool result shortened"
LATER = "later exchanges dropped"
EARLIER = "earlier exchanges dropped"
CUT = "answer truncated, without its end-of-turn token"
END = "end of the row cut off"
IN_PROPORTION = "question and answer truncated in proportion"
LEFT_OUT = "exchanges left out"
SPLIT = f"{TOO_LONG}, and the cut would split an image or a sound"
MIN_ANSWER = 8  # minimum tokens of a truncated answer

Range = tuple[int, int]


def cut(how: str, sample: WholeSample, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Select the tokens to keep by ``data.overlong``; arguments, result and errors are those of ``truncate``."""
    return {"keep_start": keep_start, "proportional": in_proportion}.get(how, truncate)(sample, limit)


def truncate(sample: WholeSample, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Select the tokens to keep.

    Args:
        sample: more than ``limit`` tokens.
        limit: maximum number of tokens.

    Returns:
        bool[T], true for kept tokens (at most ``limit``), and descriptions of the cuts.

    Raises:
        RowDropped: no answer fits.
    """
    trained = [index for index, turn in enumerate(sample.turns) if turn.trained]
    if not trained:
        raise RowDropped(f"{TOO_LONG}, without a trained answer")
    floor = min(64, limit // 8)
    for ranges, done in _candidates(sample, trained):
        keep = _mask(sample, ranges)
        shortened = _shorten(sample, keep, limit, floor)
        if keep.sum() <= limit:
            return keep, (*done, SHORTENED) if shortened else done
    return _cut_answer(sample, trained[0], limit)


def keep_start(sample: WholeSample, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Keep the first ``limit`` tokens; arguments, result and errors are those of ``truncate``."""
    keep = np.arange(len(sample.ids)) < limit
    if not sample.trained[1:limit].any():
        raise RowDropped(f"{TOO_LONG}, and no trained token is left")
    return keep, (END,)


def _candidates(sample: WholeSample, trained: list[int]) -> Iterator[tuple[list[Range], tuple[str, ...]]]:
    """Candidate token ranges to keep, largest first; each ends with a trained answer."""
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


def _kept_contents(sample: WholeSample, keep: np.ndarray) -> list[Range]:
    """Ranges of user and tool messages that are kept whole."""
    return [(start, end) for start, end in sample.contents if end > start and keep[start:end].all()]


def _shorten(sample: WholeSample, keep: np.ndarray, limit: int, floor: int) -> bool:
    """Shorten the longest texts, each to at least ``floor`` tokens, if that reaches ``limit``; else change nothing."""
    excess = int(keep.sum()) - limit
    if excess <= 0:
        return False
    contents = _kept_contents(sample, keep)
    lengths = np.array([end - start for start, end in contents], dtype=np.int64)
    if np.maximum(lengths - floor, 0).sum() < excess:
        return False
    low, high = floor, int(lengths.max())
    while low < high:  # binary search for the largest length that suffices
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
    """Move a cut back to a token boundary that splits no character."""
    while cut > lowest and sample.offsets[cut][0] < sample.offsets[cut - 1][1]:
        cut -= 1
    return cut


def _cut_answer(sample: WholeSample, chosen: int, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Keep one exchange, and the first if it has the system message, with as much of the answer as fits."""
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
    if prompt > half:  # the question gets half of the limit, or less if it needs less; the answer gets the rest
        room = _mask(sample, ranges)
        room[turn.start : turn.full_end] = False
        spare = sum(end - start - 1 for start, end in _kept_contents(sample, room))
        if _shorten(sample, room, max(half, prompt - spare), 1):
            keep[: turn.start] = room[: turn.start]
            prompt, done = int(room.sum()), (SHORTENED, *done)
    cut = _whole_character(sample, turn.start, turn.start + min(max(limit - prompt, 0), turn.end - turn.start - 1))
    if cut - turn.start < min(MIN_ANSWER, turn.end - turn.start - 1) or cut <= turn.start:
        raise RowDropped(f"{TOO_LONG}: the prompt leaves no room for the answer")
    keep[cut:] = False
    return keep, done


def same_prompt(segments: list[Segment]) -> list[Segment]:
    """Give all segments the shortest of their truncated prompts."""
    starts = [int(one.loss_mask.argmax()) for one in segments]
    shortest = min(range(len(segments)), key=starts.__getitem__)
    ids, mask = segments[shortest].input_ids[: starts[shortest]], segments[shortest].loss_mask[: starts[shortest]]
    return [
        Segment(np.concatenate([ids, one.input_ids[start:]]), np.concatenate([mask, one.loss_mask[start:]]), one.media)
        for one, start in zip(segments, starts, strict=True)
    ]


def in_proportion(sample: WholeSample, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Select the tokens to keep by LLaMA-Factory's rule.

    Args:
        sample: more than ``limit`` tokens.
        limit: maximum number of tokens.

    Returns:
        bool[T], true for kept tokens (at most ``limit``), and descriptions of the cuts.

    Raises:
        RowDropped: no trained token is left.
    """
    starts = [0, *(turn.full_end for turn in sample.turns)]
    exchanges = [(a, turn.start, b) for (a, b), turn in zip(pairwise(starts), sample.turns, strict=True)]
    if [turn.trained for turn in sample.turns[-2:]] == [False, True]:
        exchanges.reverse()
    keep = np.zeros(len(sample.ids), dtype=bool)
    left = limit
    done: dict[str, None] = {}
    for first, middle, last in exchanges:
        if left <= 0:
            done[LEFT_OUT] = None
            break
        question, answer = _lengths(middle - first, last - middle, left)
        keep[first : first + question] = True
        keep[middle : middle + answer] = True
        left -= question + answer
        if question + answer < last - first:
            done[IN_PROPORTION] = None
    if not (keep & sample.trained).any():
        raise RowDropped(f"{TOO_LONG}, and no trained answer is left")
    return keep, tuple(done)


def answers_in_proportion(samples: Sequence[WholeSample], limit: int) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Select the tokens to keep of several answers to one prompt, all by the lengths of the longest one.

    Args:
        samples: each ends with its answer.
        limit: maximum number of tokens of each.

    Returns:
        bool[T] for each sample, true for kept tokens, and a description of the cut.

    Raises:
        RowDropped: no token of the answers is left.
    """
    places = [(sample.turns[-1].start, sample.turns[-1].full_end) for sample in samples]
    prompt = places[0][0]
    question, answer = _lengths(prompt, max(end - start for start, end in places), limit)
    keep = []
    for sample, (start, end) in zip(samples, places, strict=True):
        at = np.arange(len(sample.ids))
        keep.append((at < min(question, start)) | ((at >= start) & (at < min(end, start + answer))))
        if not (keep[-1] & sample.trained).any():
            raise RowDropped(f"{TOO_LONG}, and no trained answer is left")
    return keep, (IN_PROPORTION,)


def _lengths(question: int, answer: int, room: int) -> tuple[int, int]:
    if 2 * answer < room:
        most = room
    elif 2 * question < room:
        most = room - question
    else:
        most = int(room * (answer / (question + answer)))
    answer = min(most, answer)
    return min(max(room - answer, 0), question), answer
