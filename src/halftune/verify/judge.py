"""Judges a target's log-probabilities and answers: the trained model's, the base model's, or which others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halftune.verify.answers import Followed, power
from halftune.verify.distances import distances
from halftune.verify.exact import Exact
from halftune.verify.measure import score
from halftune.verify.probes import Probe, Probes
from halftune.verify.rounding import Rounding
from halftune.verify.targets import Finding, Said, Seen, Target

_FAR = 4.0  # times the rounding: so far apart, trained and base are told apart by each number
_AGREED = 0.6  # share of answers that are the probes' where it is not known what rounding changes
_TRAINED, _BASE = 0.15, 0.15  # how far from 1 and from 0 the place between base and trained may be
_SIZES = {
    2.0: ("weights.beyond", "merged twice, or lora_alpha is doubled"),
    0.5: ("weights.between", "half of lora_alpha"),
}

Heard = Sequence[tuple[Probe, Said, Followed]]  # a server's own answers


def judge_weights(
    rounding: Rounding,
    seen: Seen,
    heard: Heard,
    exact: Exact | str,
    *,
    compared: bool,
    lines: list[tuple[str, str]],
    numbers: dict[str, float | None],
) -> list[Finding]:
    """Whose log-probabilities they are; of texts alone, whether they can be the trained model's.

    Args:
        rounding: of the result.
        seen: what the target says of the probes' answers.
        heard: its own answers, if it is a server.
        exact: the result in fp32, or why there is none.
        compared: whether each weight was compared, and is the same.
        lines, numbers: of the report; are added to.
    """
    expected = rounding.bound(seen)
    numbers |= distances(rounding.probes, seen) | {"expected": expected}
    if numbers["to_trained"] is None:
        return _texts(rounding, heard, lines)
    shown = [f"distance to trained {numbers['to_trained']:.2g} nats a token"]
    shown += [f"to base {numbers['to_base']:.2g}"] if numbers["to_base"] is not None else []
    shown += [f"KL {numbers['kl']:.2g}"] if numbers["kl"] is not None else []
    shown += [f"the same likeliest token in {numbers['agreement']:.1%}"] if numbers["agreement"] is not None else []
    lines.append(("weights", " · ".join(shown)))
    lines.append(("rounding", f"up to {expected:.2g} nats a token are expected: {rounding.words}"))
    covered = numbers["covered"] or 0.0
    if covered < 1:
        lines.append(("answers", f"its own answers are the trained model's in {covered:.0%} of the tokens"))
    if rounding.kept is not None:
        what = f"the result's files are {rounding.kept:.2g} nats a token from what training kept of them"
        return [Finding("weights.reference", what)]
    found = _judged(numbers, expected)
    if found and found[0].code == "weights.unknown" and compared:
        return []  # each weight is the same
    if found and found[0].code != "weights.unknown":
        found = _of_size(rounding.probes, seen, exact, numbers["to_trained"]) or found
    return found or _parted(rounding, heard)


def _parted(rounding: Rounding, heard: Heard) -> list[Finding]:
    """Answers that differ where rounding decides nothing."""
    parted = sum(one.parted for _, _, one in heard)
    if parted <= (0 if rounding.measured else (1 - _AGREED) * len(heard)):
        return []
    return [Finding("weights.differ", f"it answers {parted} of {len(heard)} probes otherwise")]


def _texts(rounding: Rounding, heard: Heard, lines: list[tuple[str, str]]) -> list[Finding]:
    """Answers alone: a server without log-probabilities."""
    if not heard:
        return [Finding("weights.unknown", "no number and no answer could be compared")]
    least = power([probe for probe, _, _ in heard], rounding.tie)
    lines.append(("weights", f"no log-probabilities: {len(heard)} greedy answers are compared as texts"))
    what = f"texts would show a change of more than {least:.2g} nats between two tokens, no smaller one"
    return _parted(rounding, heard) or [Finding("weights.unknown", what)]


def _of_size(probes: Probes, seen: Seen, exact: Exact | str, to_trained: float) -> list[Finding]:
    """Whether it computes the trained model with an update of another size."""
    if isinstance(exact, str) or not exact.before:
        return []
    pairs = [(one.prompt, one.answer) for one in probes.probes]
    for size, (code, words) in _SIZES.items():
        with exact.at(size) as model:
            made = score(model, pairs, 0, torch.device("cpu"))
        rows = zip(seen.logprobs, made, strict=False)
        apart = [abs(a - b) for own, one in rows for a, b in zip(own, one.logprobs, strict=False)]
        if sum(apart) / len(apart) < to_trained / _FAR:
            return [Finding(code, f"the update of training has {size:g} times its size: {words}")]
    return []


def _judged(numbers: dict[str, float | None], expected: float) -> list[Finding]:
    """What the distances say."""
    to_trained, apart, place = numbers["to_trained"] or 0.0, numbers["apart"], numbers["place"]
    if to_trained <= expected:
        if not apart or place is None or apart >= _FAR * expected or abs(place - 1) <= _TRAINED:
            return []
        if (numbers["blur"] or 0.0) > _TRAINED:
            what = f"trained and base are {apart:.2g} nats apart, which rounding hides"
            return [Finding("weights.unknown", what)]
    if not apart or place is None or (apart < expected and to_trained > expected):
        return [Finding("weights.differ", f"{to_trained:.2g} nats a token from the trained model")]
    if abs(place) <= _BASE and (numbers["to_base"] or 0.0) < apart / 4 + expected:
        return [Finding("weights.base", "it computes the base model")]
    if place > 1 + _TRAINED:
        return [Finding("weights.beyond", f"the update of training has {place:.2f} times its size")]
    if place < 1 - _TRAINED and (numbers["off_line"] or 0.0) < 1:
        return [Finding("weights.between", f"it stands at {place:.0%} of the way from base to trained")]
    return [Finding("weights.differ", f"{to_trained:.2g} nats a token from the trained model, for another reason")]


def judge_chat(
    rounding: Rounding, heard: Heard, target: Target, lines: list[tuple[str, str]], *, prompts: bool
) -> list[Finding]:
    """What a client of the chat endpoint meets.

    Args:
        rounding: of the result.
        heard: the endpoint's own answers.
        target: the server.
        lines: of the report; are added to.
        prompts: whether the prompts are the same, apart from what the endpoint itself adds.
    """
    if not heard and target.lacks_chat:
        lines.append(("chat", "it has no chat endpoint"))
        return []
    if not heard or not prompts or rounding.probes.day:
        whose = "of other prompts" if heard else "missing, or taken apart into reasoning and calls"
        return [Finding("chat.unknown", f"its answers are {whose}")]
    if other := [(one, told) for one, told, _ in heard if told.prompt not in (None, one.prompt, len(one.prompt))]:
        probe, told = other[0]
        count = told.prompt if isinstance(told.prompt, int) else len(told.prompt or ())
        what = f"in {len(other)} of {len(heard)} conversations: {count} tokens instead of {len(probe.prompt)}"
        return [Finding("chat.prompt", f"the chat endpoint makes another prompt {what}")]
    known = {id(probe): one.logprobs for probe, _, one in heard}
    rows = [known.get(id(one), []) for one in rounding.probes.probes]
    seen = Seen(rows, steps=[step for _, told, _ in heard for step in told.steps])
    numbers = distances(rounding.probes, seen)
    if numbers["to_trained"] is None:
        least = power([one for one, _, _ in heard], rounding.tie)
        what = f"its answers have no log-probabilities; texts would show a change of more than {least:.2g} nats"
        unknown = [Finding("chat.unknown", what)]
    else:
        lines.append(("chat", f"distance to trained {numbers['to_trained']:.2g} nats a token"))
        unknown = []
    judged = _judged(numbers, rounding.bound(seen)) if not unknown else []
    found = [one for one in judged if one.code != "weights.unknown"] or _parted(rounding, heard)
    return [Finding("chat.differ", f"the chat endpoint: {one.what}") for one in found] or unknown
