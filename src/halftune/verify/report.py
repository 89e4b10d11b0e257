"""The verdict: tokens first, then stops, then weights, then rounding; each finding has a code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import takewhile
from math import exp, isfinite, log
from pathlib import Path
from typing import Any

import yaml

from halftune.verify.probes import Probe, Probes
from halftune.verify.targets import Finding, Seen, Target

_SHOWN = 12  # tokens around a difference
_NAMED = 3  # of a list
_NO_TRACE = 2.0  # the adapter is seen where trained and base are apart by this many times the rounding
_AGREED = 0.6  # share of an honest server's own answers, or their tokens, that are the probes': rounding changes some
_TRAINED, _BASE = 0.15, 0.15  # how far from 1 and from 0 the place between base and trained may be


@dataclass(frozen=True)
class Report:
    """What was compared, and what differs.

    Attributes:
        reference, target: their names.
        probes: how many were compared.
        lines: what was seen, one line a step.
        findings: what differs, in the order of the steps; empty: the same.
        numbers: ``to_trained``, ``to_base`` (mean |difference| in nats a token), ``place`` (0 base, 1 trained), ``kl``
            (nats a token), ``agreement`` (of the likeliest token), ``expected`` (by rounding), ``covered`` (share of
            the answers' tokens that were compared); None: not known.
    """

    reference: str
    target: str
    probes: int
    lines: list[tuple[str, str]]
    findings: list[Finding]
    numbers: dict[str, float | None] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Whether nothing differs but rounding."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """In words."""
        if self.findings:
            return ", ".join(dict.fromkeys(one.code for one in self.findings))
        to_trained = self.numbers.get("to_trained")
        return "same, bit for bit" if to_trained == 0 and self.numbers.get("covered") == 1 else "same, precision only"

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        numbers = {name: one if one is None or isfinite(one) else None for name, one in self.numbers.items()}
        return {**asdict(self), "numbers": numbers, "same": self.same, "verdict": self.verdict}


def compare(
    probes: Probes,
    target: Target,
    tokenizer: Any,
    reference: str,
    weights: Sequence[Finding] = (),
    not_compared: str = "",
    *,
    media: bool = False,
) -> Report:
    """Compare a target with a result.

    Args:
        probes: of the result, with ``base`` where it is known.
        target: what is compared.
        tokenizer: of the result.
        reference: the result's name.
        weights: what comparing files of weights has found.
        not_compared: why the files were not compared.
        media: whether the result takes images, videos or sounds.
    """
    lines: list[tuple[str, str]] = []
    findings = [*_tokens(probes, target, tokenizer, lines), *_stops(probes, target, tokenizer, lines)]
    numbers: dict[str, float | None] = {}
    findings += _weights(probes, target, tokenizer, lines, numbers, weights)
    if not_compared:
        lines.append(("files", f"weights are not compared one by one: {not_compared}"))
    if media:
        lines.append(("media", "probes are texts: answers to images, videos and sounds are not compared"))
    named = [_explained(one, target.kind) for one in findings]
    return Report(reference, target.name, len(probes.probes), lines, named, numbers)


def _tokens(probes: Probes, target: Target, tokenizer: Any, lines: list[tuple[str, str]]) -> list[Finding]:
    counted, known, differing = 0, 0, list[tuple[Probe, list[int]]]()
    for probe in probes.probes:
        found = target.tokens(probe, probes, tokenizer)
        if isinstance(found, list):
            known += 1
            if found != probe.prompt:
                differing.append((probe, found))
        elif isinstance(found, int):
            known += 1
            counted += found != len(probe.prompt)
    total = len(probes.probes)
    if counted:
        lines.append(("tokens", f"another number in {counted} of {total} probes"))
        return [Finding("tokens.count", f"the server counts other tokens in {counted} of {total} prompts")]
    if not differing:
        lines.append(("tokens", f"the same in {known} of {total} probes" if known else "not known"))
        return []
    lines.append(("tokens", f"differ in {len(differing)} of {total} probes"))
    return [_differing(*differing[0], probes.bos, tokenizer)]


def _differing(probe: Probe, found: list[int], bos: int | None, tokenizer: Any) -> Finding:
    """What another rendering of a prompt differs in: BOS, or its first difference."""
    if bos is not None and found == [bos, *probe.prompt]:
        begins = probe.prompt[:1] == [bos]
        code, what = ("tokens.bos_twice", "twice") if begins else ("tokens.bos_added", "where training had none")
        return Finding(code, f"{tokenizer.decode([bos])!r} stands before each prompt {what}")
    if [bos, *found] == probe.prompt:
        return Finding("tokens.bos_missing", f"{tokenizer.decode([bos])!r} does not stand before the prompts")
    if not found:
        return Finding("tokens.differ", "it has no chat template, or its chat template refuses the conversation")
    return Finding("tokens.differ", _first_difference(probe.prompt, found, tokenizer))


def _first_difference(ours: list[int], theirs: list[int], tokenizer: Any) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    start = max(same - _SHOWN // 2, 0)
    before, here, there = (
        tokenizer.decode(part) for part in (ours[start:same], ours[same : same + _SHOWN], theirs[same : same + _SHOWN])
    )
    return f"from token {same + 1}, after {before!r}: {there!r} instead of {here!r}"


def _stops(probes: Probes, target: Target, tokenizer: Any, lines: list[tuple[str, str]]) -> list[Finding]:
    used = {one.answer[-1] for one in probes.probes if one.ended}
    found = target.stops(probes, tokenizer)
    if found is None or not used:
        lines.append(("stops", "not known" if used else "no answer ended in the probes"))
        return []
    if target.kind == "folder" and (more := sorted(found - set(probes.stops))):
        names = ", ".join(repr(tokenizer.decode([one])) for one in more[:_NAMED])
        lines.append(("stops", f"{len(more)} more: {names}"))
        return [Finding("stops.more", f"answers also end at {len(more)} other tokens: {names}")]
    if not (missing := sorted(used - found)):
        lines.append(("stops", f"the same: {', '.join(tokenizer.decode([one]) for one in sorted(used))}"))
        return []
    names = ", ".join(f"{tokenizer.decode([one])!r} ({one})" for one in missing)
    lines.append(("stops", f"missing: {names}"))
    return [Finding("stops.missing", f"answers do not end at {names}")]


def _weights(
    probes: Probes,
    target: Target,
    tokenizer: Any,
    lines: list[tuple[str, str]],
    numbers: dict[str, float | None],
    weights: Sequence[Finding],
) -> list[Finding]:
    seen = target.see(probes.probes, tokenizer)
    formats = (target.format, probes.compute, probes.weights or probes.compute)
    expected = max(map(_rounding, formats))
    numbers |= _distances(probes, seen) | {"expected": expected}
    if numbers["to_trained"] is None:
        return list(weights) or _texts(probes, seen, tokenizer, lines)
    shown = [f"distance to trained {numbers['to_trained']:.2g} nats a token"]
    shown += [f"to base {numbers['to_base']:.2g}"] if numbers["to_base"] is not None else []
    shown += [f"KL {numbers['kl']:.2g}"] if numbers["kl"] is not None else []
    shown += [f"the same likeliest token in {numbers['agreement']:.1%}"] if numbers["agreement"] is not None else []
    lines.append(("weights", " · ".join(shown)))
    lines.append(("rounding", f"up to {expected:.2g} nats a token are expected"))
    covered = numbers["covered"] or 0.0
    if covered < 1:
        lines.append(("answers", f"its own answers are the trained model's in {covered:.0%} of the tokens"))
    found = list(weights) or _judged(numbers, expected)
    if not found and covered < _AGREED:
        return [
            Finding("weights.differ", f"it gives other answers: {covered:.0%} of the tokens are the trained model's")
        ]
    return found


def _judged(numbers: dict[str, float | None], expected: float) -> list[Finding]:
    """What the distances say."""
    to_trained, apart, place = numbers["to_trained"] or 0.0, numbers["apart"], numbers["place"]
    told = apart is not None and apart >= _NO_TRACE * expected  # trained and base can be told apart
    if to_trained <= expected and (not told or to_trained < (apart or 0.0) / 4 or abs((place or 0.0) - 1) <= _TRAINED):
        if apart is not None and not told and to_trained > (numbers["to_base"] or 0.0):
            what = f"trained and base are {apart:.2g} nats apart, which rounding hides"
            return [Finding("weights.unknown", f"{what}; it is nearer to the base")]
        return []
    if apart is None or place is None or not told:
        return [Finding("weights.differ", f"{to_trained:.2g} nats a token from the trained model")]
    if abs(place) <= _BASE and (numbers["to_base"] or 0.0) < apart / 4 + expected:
        return [Finding("weights.base", "it computes the base model")]
    if place > 1 + _TRAINED:
        return [Finding("weights.beyond", f"the update of training has {place:.2f} times its size")]
    if place < 1 - _TRAINED and (numbers["off_line"] or 0.0) < 1:
        return [Finding("weights.between", f"it stands at {place:.0%} of the way from base to trained")]
    return [Finding("weights.differ", f"{to_trained:.2g} nats a token from the trained model, for another reason")]


def _texts(probes: Probes, seen: Seen, tokenizer: Any, lines: list[tuple[str, str]]) -> list[Finding]:
    """Answers alone: a server without log-probabilities."""
    expected = [str(tokenizer.decode(one.answer, skip_special_tokens=True)).strip() for one in probes.probes]
    same = sum(text.strip() == one for text, one in zip(seen.texts, expected, strict=False))
    lines.append(("weights", f"no log-probabilities; the same greedy answer to {same} of {len(expected)} probes"))
    if same >= _AGREED * len(expected):
        return []
    return [Finding("weights.differ", f"it answers {len(expected) - same} of {len(expected)} probes otherwise")]


def _distances(probes: Probes, seen: Seen) -> dict[str, float | None]:
    """See ``Report.numbers``; ``apart`` is the distance of trained and base, ``off_line`` of the target from the line
    between them, as a share of that."""
    found: dict[str, float | None] = dict.fromkeys(
        ("to_trained", "to_base", "place", "kl", "agreement", "apart", "off_line", "covered")
    )
    rows = []
    for probe, values in zip(probes.probes, seen.logprobs, strict=False):
        base = probe.base or [None] * len(values)
        rows += list(zip(values, probe.logprobs, base, strict=False))
    if not rows:
        return found
    found["covered"] = len(rows) / sum(len(probe.answer) for probe in probes.probes)
    found["to_trained"] = _mean(abs(own - trained) for own, trained, _ in rows)
    if all(base is not None for _, _, base in rows):
        moved = [(own - base, trained - base) for own, trained, base in rows if base is not None]
        whole = sum(trained**2 for _, trained in moved)
        found["to_base"] = _mean(abs(own) for own, _ in moved)
        found["apart"] = _mean(abs(trained) for _, trained in moved)
        if whole:
            place = found["place"] = sum(own * trained for own, trained in moved) / whole
            found["off_line"] = (sum((own - place * trained) ** 2 for own, trained in moved) / whole) ** 0.5
    pairs = [
        (own, place[0][0])
        for probe, likeliest in zip(probes.probes, seen.likeliest, strict=False)
        for own, place in zip(likeliest, probe.top, strict=False)
    ]
    if pairs:
        found["agreement"] = _mean(own == ours for own, ours in pairs)
    if seen.of_top:
        found["kl"] = _mean(
            _kl([value for _, value in place], own)
            for probe, rows_of in zip(probes.probes, seen.of_top, strict=True)
            for place, own in zip(probe.top, rows_of, strict=True)
        )
    return found


def _kl(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """KL divergence of the likeliest tokens' probabilities, and of all others together; at most the whole one's."""
    p, q = [exp(one) for one in ours], [exp(one) for one in theirs]
    p, q = [*p, max(1 - sum(p), 1e-9)], [*q, max(1 - sum(q), 1e-9)]
    return max(sum(one * log(one / max(other, 1e-30)) for one, other in zip(p, q, strict=True)), 0.0)


def _mean(values: Any) -> float:
    found = [float(one) for one in values]
    return sum(found) / len(found)


def _rounding(format: str) -> float:
    known = _causes()
    return known["formats"].get(format, known["unknown"])


def _explained(found: Finding, kind: str) -> Finding:
    """With the first cause that is known for it."""
    for one in _causes()["causes"]:
        if one["code"] == found.code and one.get("kind", kind) == kind and not found.cause:
            return Finding(found.code, found.what, one["text"], one["remedy"], one.get("source", ""))
    return found


@cache
def _causes() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "causes.yaml").read_text(encoding="utf-8"))
