"""The verdict: tokens first, then stops, then weights, then the chat endpoint; each finding has a code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from math import isfinite
from typing import Any, Literal

from halftune.verify.answers import Followed, follow
from halftune.verify.conversations import conversations
from halftune.verify.exact import Exact
from halftune.verify.judge import Heard, judge_chat, judge_weights
from halftune.verify.probes import Probe, Probes
from halftune.verify.reference import Reference
from halftune.verify.rounding import Rounding, known_causes
from halftune.verify.targets import Finding, Target

_SHOWN = 12  # tokens around a difference
_NAMED = 3  # of a list
_UNKNOWN = ".unknown"
_OTHER_PROMPTS = ("tokens.differ", "tokens.count", "tokens.variables", "tokens.bos_twice", "tokens.bos_added")

Answer = Literal["same", "differs", "not known"]


@dataclass(frozen=True)
class Files:
    """What comparing files has found.

    Attributes:
        findings: what differs, or is not known (``….unknown``).
        skipped: why weights were not compared one by one; None: they were.
        media: whether the result takes images, videos or sounds.
    """

    findings: Sequence[Finding] = ()
    skipped: str | None = ""
    media: bool = False


@dataclass(frozen=True)
class Report:
    """What was compared, and what differs.

    Attributes:
        reference, target: their names.
        probes: how many were compared.
        lines: what was seen, one line a step.
        findings: what differs, in the order of the steps.
        numbers: ``to_trained``, ``to_base`` (mean |difference| in nats a token), ``place`` (0 base, 1 trained), ``kl``
            (nats a token), ``agreement`` (of the likeliest token), ``expected`` (by rounding), ``covered`` (share of
            the answers' tokens that were compared); None: not known.
        unknown: what could not be compared; their codes end in ``.unknown``.
        asked: the questions, which are the beginnings of codes: ``tokens``, ``stops``, ``weights`` …
    """

    reference: str
    target: str
    probes: int
    lines: list[tuple[str, str]]
    findings: list[Finding]
    numbers: dict[str, float | None] = field(default_factory=dict)
    unknown: list[Finding] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @property
    def answers(self) -> dict[str, Answer]:
        """The answer to each question."""
        differing, unknown = ({one.code.split(".")[0] for one in some} for some in (self.findings, self.unknown))
        return {one: "differs" if one in differing else "not known" if one in unknown else "same" for one in self.asked}

    @property
    def answer(self) -> Answer:
        """The answer to all."""
        return "differs" if self.findings else "not known" if self.unknown else "same"

    @property
    def verdict(self) -> str:
        """In words."""
        if self.findings:
            return ", ".join(dict.fromkeys(one.code for one in self.findings))
        if self.unknown:
            return f"not known: {', '.join(dict.fromkeys(one.code.split('.')[0] for one in self.unknown))}"
        to_trained = self.numbers.get("to_trained")
        return "same, bit for bit" if to_trained == 0 and self.numbers.get("covered") == 1 else "same, precision only"

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        numbers = {name: one if one is None or isfinite(one) else None for name, one in self.numbers.items()}
        verdict = {"same": self.answer == "same", "answer": self.answer, "answers": self.answers}
        return {**asdict(self), "numbers": numbers, **verdict, "verdict": self.verdict}


def compare(reference: Reference, exact: Exact | str, target: Target, files: Files, rounding: Rounding) -> Report:
    """Compare a target with a result.

    Args:
        reference: the result.
        exact: it in fp32, or why there is none.
        target: what is compared.
        files: what comparing files has found.
        rounding: what it does to this result.
    """
    probes, tokenizer = rounding.probes, reference.tokenizer
    lines: list[tuple[str, str]] = []
    numbers: dict[str, float | None] = {}
    seen = target.see(probes.probes, tokenizer)
    heard, chat = (_heard(probes.probes, target, tokenizer, rounding.tie, chat=chat) for chat in (False, True))
    found = _tokens(probes, target, tokenizer, lines)
    rendered = not any(one.code in _OTHER_PROMPTS for one in found)
    weights = [one for one in files.findings if one.code.startswith("weights.")]
    beside = [one for one in files.findings if one not in weights]
    judged = judge_weights(
        rounding, seen, heard or chat, exact, compared=files.skipped is None, lines=lines, numbers=numbers
    )
    weights = weights or judged
    client = target.kind == "server" and any(one.messages for one in probes.probes)
    asked = judge_chat(rounding, chat, target, lines, prompts=rendered) if client else []
    # another model's answers end elsewhere
    sides = [(heard, all(map(_is_unknown, weights))), (chat, rendered and all(map(_is_unknown, asked)))]
    ends = [one for side, own in sides if own for _, _, one in side]
    found += [*_stops(probes, target, tokenizer, lines, ends), *weights, *asked, *beside]
    if files.skipped:
        lines.append(("files", f"weights are not compared one by one: {files.skipped}"))
    if files.media and files.skipped is not None:
        found.append(Finding("processor.unknown", "probes are texts: answers to images, videos and sounds"))
    questions = ["tokens", "stops", "weights"] + ["base"] * (target.kind == "adapter")
    questions += ["processor"] * files.media + ["chat"] * client
    named = [_explained(one, target.kind) for one in dict.fromkeys(found)]
    unknown = [one for one in named if _is_unknown(one)]
    lines += [("not compared", f"{one.code.removesuffix(_UNKNOWN)}: {one.what}") for one in unknown]
    differing = [one for one in named if one not in unknown]
    name = str(reference.folder)
    return Report(name, target.name, len(probes.probes), lines, differing, numbers, unknown, questions)


def _is_unknown(found: Finding) -> bool:
    return found.code.endswith(_UNKNOWN)


def _heard(probes: Sequence[Probe], target: Target, tokenizer: Any, tie: float, *, chat: bool) -> Heard:
    """A server's own answers that can be followed."""
    pairs = [(one, target.said(one, chat=chat)) for one in probes]
    return [(one, said, follow(one, said, tie, tokenizer)) for one, said in pairs if said and said.whole]


def _tokens(probes: Probes, target: Target, tokenizer: Any, lines: list[tuple[str, str]]) -> list[Finding]:
    counted, known, differing, silent = 0, 0, list[tuple[Probe, list[int]]](), 0
    every = [*probes.probes, *conversations(probes, tokenizer)]
    for probe in every:
        found = target.tokens(probe, probes, tokenizer)
        known += found is not None
        if isinstance(found, list) and found != probe.prompt:
            differing.append((probe, found))
        elif isinstance(found, int):
            counted += found != len(probe.prompt)
        elif found is None and probe.messages is not None:
            silent += 1
    total = len(every)
    if counted:
        lines.append(("tokens", f"another number in {counted} of {total} prompts"))
        return [Finding("tokens.count", f"the server counts other tokens in {counted} of {total} prompts")]
    if differing:
        lines.append(("tokens", f"differ in {len(differing)} of {total} prompts"))
        return [_differing(*differing[0], probes.bos, tokenizer)]
    lines.append(("tokens", f"the same in {known} of {total} prompts" if known else "not known"))
    if silent:
        return [Finding("tokens.unknown", f"it does not tell the tokens of {silent} of {total} prompts")]
    return _variables(probes, target, tokenizer)


def _variables(probes: Probes, target: Target, tokenizer: Any) -> list[Finding]:
    """Whether a client that does not know the variables of the chat template gets the same prompts."""
    plain = probes.model_copy(update={"variables": {}})
    asked = [one for one in probes.probes if one.messages is not None] if probes.variables else []
    found = [target.tokens(one, plain, tokenizer) for one in asked]
    apart = sum(ids not in (None, one.prompt, len(one.prompt)) for ids, one in zip(found, asked, strict=True))
    names = ", ".join(probes.variables)
    what = f"{apart} of {len(asked)} prompts are others where a client does not send chat_template_kwargs: {names}"
    return [Finding("tokens.variables", what)] if apart else []


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


def _stops(
    probes: Probes, target: Target, tokenizer: Any, lines: list[tuple[str, str]], said: list[Followed]
) -> list[Finding]:
    used = {one.answer[-1] for one in probes.probes if one.ended}
    listed = target.stops(probes, tokenizer)
    ends = Counter(one.end for one in said)
    found = []
    if listed is not None:
        more, missing = sorted(listed - set(probes.stops)), sorted(used - listed)
        found += [Finding("stops.missing", f"answers do not end at {_names(missing, tokenizer)}")] if missing else []
        what = f"answers also end at {len(more)} other tokens: {_names(more, tokenizer)}"
        found += [Finding("stops.more", what)] if more else []
    if ends["missing"]:
        what = f"{ends['missing']} of {len(said)} answers go on where training's end"
        found.append(Finding("stops.missing", what))
    if ends["cut"]:
        found.append(Finding("stops.cut", f"{ends['cut']} of {len(said)} answers end too early"))
    same = listed is not None and (used or listed == set(probes.stops))
    if not found and not same and not ends["ended"]:
        what = "no answer's end could be compared" if used else "no answer ended in the probes"
        found.append(Finding("stops.unknown", what))
    lines.insert(1, ("stops", "; ".join(one.what for one in found) or f"the same: {_names(sorted(used), tokenizer)}"))
    return found


def _names(tokens: Sequence[int], tokenizer: Any) -> str:
    return ", ".join(f"{tokenizer.decode([one])!r} ({one})" for one in tokens[:_NAMED])


def _explained(found: Finding, kind: str) -> Finding:
    """With the first cause that is known for it."""
    for one in known_causes()["causes"]:
        if one["code"] == found.code and one.get("kind", kind) == kind and not found.cause:
            return Finding(found.code, found.what, one["text"], one["remedy"], one.get("source", ""))
    return found
