"""Follows a server's own greedy answer along a probe's, up to the first place that rounding may decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any, Literal

from halftune.verify.probes import Probe
from halftune.verify.targets import Said

_BROKEN = "\ufffd"  # the text of a part of a character


@dataclass(frozen=True)
class Followed:
    """An answer beside a probe's.

    Attributes:
        logprobs: of the probe's tokens, up to the first one that is not its own; at most that where it is unlikely.
        parted: whether it differs before the first place that rounding may decide.
        end: ``ended`` as trained; ``missing``: it goes on behind the stop token; ``cut``: it ends too early; empty: it
            does not show.
    """

    logprobs: list[float]
    parted: bool
    end: Literal["", "ended", "missing", "cut"]


def lead(probe: Probe, at: int) -> float:
    """How far the answer's token stands before the best other one, in nats."""
    others = [value for token, value in probe.top[at] if token != probe.answer[at]]
    return probe.logprobs[at] - max(others)


def follow(probe: Probe, said: Said, tie: float, tokenizer: Any) -> Followed:
    """Compare an answer with a probe's; see ``Followed``.

    Args:
        probe: the prompt, and the trained model's answer.
        said: the server's answer, of at least one token more.
        tie: lead in nats up to which rounding may choose another token.
        tokenizer: of the result.
    """
    expected = [(token, tokenizer.decode([token])) for token in probe.answer]
    pairs = list(takewhile(lambda pair: pair[0][0] in pair[1], zip(said.tokens, expected, strict=False)))
    logprobs = [value for (_, value), _ in pairs]
    at = len(pairs)
    if at < min(len(expected), len(said.tops)) and said.tops[at] and _BROKEN not in expected[at][1]:
        tops = said.tops[at]  # what it says of the probe's token, where its own is another
        logprobs.append(next((tops[one] for one in expected[at] if one in tops), min(tops.values())))
    places = range(len(probe.answer))
    certain = next((at for at in places if lead(probe, at) <= tie), len(places))
    ours = str(tokenizer.decode(probe.answer[:certain], skip_special_tokens=True)).rstrip(_BROKEN).strip()
    theirs = said.text.rstrip(_BROKEN).strip()
    if not theirs.startswith(ours):
        return Followed(logprobs, not ours.startswith(theirs), "cut" if ours.startswith(theirs) else "")
    if certain < len(places) or not probe.ended or not said.finish:
        return Followed(logprobs, parted=False, end="")
    return Followed(logprobs, parted=False, end="ended" if (theirs, said.finish) == (ours, "stop") else "missing")


def power(probes: Sequence[Probe], tie: float) -> float:
    """The change of two tokens' log-probabilities, in nats, below which half of the greedy answers stay as they are."""
    least = [min(lead(one, at) for at in range(len(one.answer))) for one in probes]
    return max(median(least), tie)
