"""Truncates exchanges in proportion, for ``data.overlong: proportional``: LLaMA-Factory's rule (``infer_seqlen``).

Exchanges are kept in order while there is room; where only the last turn is trained, the last ones first. In the one
that does not fit, the question or the answer is cut at its end if the other one needs less than half of the room;
otherwise both are cut, in proportion to their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from halftune.data.formats.conversation import RowDropped
from halftune.data.store import WholeSample

CUT = "question and answer truncated in proportion"
LEFT_OUT = "exchanges left out"


def truncate(sample: WholeSample, limit: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Select the tokens to keep.

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
            done[CUT] = None
    if not (keep & sample.trained).any():
        raise RowDropped("longer than max_length, and no trained answer is left")
    return keep, tuple(done)


def truncate_answers(samples: Sequence[WholeSample], limit: int) -> tuple[list[np.ndarray], tuple[str, ...]]:
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
            raise RowDropped("longer than max_length, and no trained answer is left")
    return keep, (CUT,)


def _lengths(question: int, answer: int, room: int) -> tuple[int, int]:
    if 2 * answer < room:
        most = room
    elif 2 * question < room:
        most = room - question
    else:
        most = int(room * (answer / (question + answer)))
    answer = min(most, answer)
    return min(max(room - answer, 0), question), answer
