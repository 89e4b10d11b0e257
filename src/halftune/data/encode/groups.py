"""Groups of rated answers as examples: each prompt also gets the answer of another row of its group.

The pairs of a prompt and another row's answer estimate the KL divergence in KTO (Ethayarajh et al. 2024,
arXiv:2402.01306, section 4.1). Groups are rows that follow each other in the data, as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halftune.data.store import Example, Segment

LABEL = "label_{}"


class Grouper:
    """Collects examples of one segment and makes groups of them.

    Args:
        size: examples of a group.
        max_length: tokens of a segment.
    """

    def __init__(self, size: int, max_length: int) -> None:
        self._size, self._max_length = size, max_length
        self._waiting: list[tuple[Example, tuple[int, int]]] = []

    def complete(
        self, examples: Sequence[Example], origins: Sequence[tuple[int, int]]
    ) -> tuple[list[Example], list[tuple[int, int]]]:
        """The groups that are complete with these examples, and the origin of the first row of each."""
        self._waiting += zip(examples, origins, strict=True)
        groups, places = [], []
        while len(self._waiting) >= self._size:
            members, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            groups.append(self._group([one for one, _ in members]))
            places.append(members[0][1])
        return groups, places

    @property
    def left(self) -> int:
        """Examples that belong to no complete group."""
        return len(self._waiting)

    def _group(self, members: Sequence[Example]) -> Example:
        answers = [one.segments[0] for one in members]
        columns = {LABEL.format(index): one.columns["label"] for index, one in enumerate(members)}
        if self._size == 1:
            return Example(tuple(answers), columns)
        others = [answers[-1], *answers[:-1]]  # TRL's order: the answer of the row before
        mismatched = [self._mismatched(*pair) for pair in zip(answers, others, strict=True)]
        return Example((*answers, *mismatched), columns)

    def _mismatched(self, own: Segment, other: Segment) -> Segment:
        """The prompt of one segment with the answer of another, cut at the end to the maximum length."""
        start, begin = int(own.loss_mask.argmax()), int(other.loss_mask.argmax())
        ids = np.concatenate([own.input_ids[:start], other.input_ids[begin:]])[: self._max_length]
        mask = np.concatenate([own.loss_mask[:start], other.loss_mask[begin:]])[: self._max_length]
        return Segment(ids, mask, own.media)  # which the prompt holds
