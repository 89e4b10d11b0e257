"""Which format a source's rows have, or which ``columns:`` would give them one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.core.table import did_you_mean
from halftune.data.conversation import Format
from halftune.data.formats import FORMATS, load_format
from halftune.data.formats.fields import MEDIA_COLUMNS
from halftune.data.missing import is_missing

# What other sets call our columns; the first that is there is suggested.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "problem", "instruction", "user", "input", "text_input", "request", "source"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "assistant", "generation", "chosen"),
    "messages": ("conversation", "conversations", "dialog", "dialogue", "chat", "turns", "chosen"),
    "text": ("content", "body", "document", "article", "passage", "code", "story", "raw_content"),
}
# Names that can mean nothing else where a set has one of each; what a question may stand on is no part of them.
QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input")
ANSWERS = ("completion", "answer", "response", "output", "solution")
GROUNDS = ("input", "context")  # of an instruction: alpaca's name, and that of databricks-dolly
CONTEXTS = ("context", "passage", "document", "background", "choices", "options", "history", "system_prompt")
PREFERENCE = ("chosen", "rejected")
RATINGS = ("label", "kto_tag")  # a flag that tells wanted answers from rejected ones


@dataclass(frozen=True)
class Reading:
    """How the rows of one source are read.

    Attributes:
        format: the format.
        columns: the format's column → the file's column, only those that are there.
        absent: optional columns that the set has not: nothing stands for them.
        unused: columns of the file that nothing reads.
        gaps: optional columns that some rows have and others not (or null, or NaN) → number of rows without.
    """

    format: Format
    columns: dict[str, str]
    absent: tuple[str, ...]
    unused: tuple[str, ...]
    gaps: dict[str, int]

    def rename(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row under the format's own column names; a column that the row has not is left out."""
        renamed = {ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row}
        return renamed | {name: row[name] for name in MEDIA_COLUMNS if name in row}


def detect(rows: Sequence[Mapping[str, Any]], section: SourceSection, where: str) -> Reading:
    """Finds the format of a source: the one asked for, or the first whose required columns are there.

    Raises:
        DataError: no format fits (the remedy is a ``columns:`` mapping where one can be guessed), or the mapping names
            a column that does not exist.
    """
    found: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            found[name] = found.get(name, 0) + (not is_missing(value))
    _check_mapping(section.columns, found, where)
    candidates = _consuming(section, where)
    for name in candidates:
        made = load_format(name)
        columns = _columns(made, section.columns, found)
        if all(column in columns for column in made.required):
            if all(name in found for name in PREFERENCE) and "chosen" not in columns.values():
                raise _preference_error(where)
            if name != "text":
                _check_rating(rows, columns, where)
            return _reading(made, columns, found, len(rows))
    guess = _guess(rows, found) if section.format == "auto" and not section.columns else None
    if guess is not None:
        name, columns = guess
        _check_rating(rows, columns, where)
        return _reading(load_format(name), columns, found, len(rows))
    raise _unknown(rows, found, section, candidates, where)


def _guess(rows: Sequence[Mapping[str, Any]], found: Mapping[str, int]) -> tuple[str, dict[str, str]] | None:
    """The format, and its columns, of a set whose columns have other names that allow one reading only."""
    names = {name.lower(): name for name in found}
    texts = {lower: name for lower, name in names.items() if all(_is_text(row.get(name)) for row in rows)}
    answers = [name for name in ANSWERS if name in names]
    questions = [name for name in QUESTIONS if name in names]
    if len(answers) != 1 or not {*answers, *questions} <= texts.keys() or all(name in found for name in PREFERENCE):
        return None
    grounds = [name for name in GROUNDS if name in texts]
    others = [name for name in CONTEXTS if name in names and name not in grounds]
    if "instruction" in questions and {*questions} <= {"instruction", "input"} and len(grounds) < 2 and not others:
        columns = {"instruction": texts["instruction"], "output": texts[answers[0]]}
        if grounds:
            columns["input"] = texts[grounds[0]]
        return "alpaca", columns
    if len(questions) == 1 and not others and "context" not in names:
        return "prompt_completion", {"prompt": texts[questions[0]], "completion": texts[answers[0]]}
    return None


def _is_text(value: Any) -> bool:
    return is_missing(value) or (isinstance(value, str | int | float) and not isinstance(value, bool))


def detect_for(method: str, rows: Sequence[Mapping[str, Any]], section: SourceSection) -> Reading:
    """The format of a source that is to be trained on by ``method``.

    Raises:
        DataError: as ``detect``; or the source is plain text, and the method learns answers.
    """
    reading = detect(rows, section, section.path)
    if reading.format.name == "text" and method != "pretrain":
        raise DataError(
            "plain text has no answers to train on",
            where=section.path,
            remedy="set method: {type: pretrain} to train on every token",
        )
    return reading


def _consuming(section: SourceSection, where: str) -> list[str]:
    """The formats that read every column of the mapping: what the user names is never left aside for what is there."""
    asked = list(FORMATS) if section.format == "auto" else [section.format]
    lacking: dict[str, list[str]] = {}
    for name in asked:
        made = load_format(name)
        lacking[name] = [ours for ours in section.columns if ours not in (*made.required, *made.optional)]
    fitting = [name for name in asked if not lacking[name]]
    if fitting:
        return fitting
    if section.format == "auto":
        what = f"columns: no format reads {' and '.join(section.columns)} together"
    else:
        what = f"columns: format {section.format} reads no {' and no '.join(lacking[section.format])}"
    raise DataError(what, where=where, remedy=f"formats have {_overview()}")


def _overview() -> str:
    return "; ".join(f"{name}: {', '.join((*made.required, *made.optional))}" for name, made in _formats().items())


def _formats() -> dict[str, Format]:
    return {name: load_format(name) for name in FORMATS}


def _check_rating(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], where: str) -> None:
    """Rated answers (KTO) hold rejected ones, told from the others by a flag alone."""
    for name in RATINGS:
        values = [row.get(name) for row in rows]
        flags = [value.lower() == "true" if value in ("true", "false", "True", "False") else value for value in values]
        if name not in columns.values() and False in [flag for flag in flags if isinstance(flag, bool)]:
            raise DataError(
                f"the column {name} says true or false: these are rated answers (KTO), and the rejected answers would "
                f"be trained like the others",
                where=where,
                remedy=f"keep only the rows whose {name} is true; or, where it rates no answer, rename the column",
            )


def _columns(made: Format, mapping: Mapping[str, str], found: Mapping[str, int]) -> dict[str, str]:
    """The format's columns that are there; what the mapping leaves out keeps its own name."""
    pairs = {ours: mapping.get(ours, ours) for ours in (*made.required, *made.optional)}
    return {ours: theirs for ours, theirs in pairs.items() if theirs in found}


def _reading(made: Format, columns: dict[str, str], found: Mapping[str, int], total: int) -> Reading:
    used = {*columns.values(), *MEDIA_COLUMNS}
    return Reading(
        format=made,
        columns=columns,
        absent=tuple(name for name in made.optional if name not in columns),
        unused=tuple(name for name in found if name not in used),
        gaps={
            ours: total - found[columns[ours]]
            for ours in made.optional
            if ours in columns and found[columns[ours]] < total
        },
    )


def _check_mapping(mapping: Mapping[str, str], found: Mapping[str, int], where: str) -> None:
    known = {name for made in _formats().values() for name in (*made.required, *made.optional)}
    for ours, theirs in mapping.items():
        if ours not in known:
            raise DataError(
                f"columns: {ours!r} is no column of any format", where=where, remedy=did_you_mean(ours, known)
            )
        if theirs not in found:
            raise DataError(
                f"columns: the data has no column {theirs!r}", where=where, remedy=did_you_mean(theirs, found)
            )


def _preference_error(where: str) -> DataError:
    return DataError(
        "row without an answer: these are preference pairs (columns chosen and rejected), "
        "and the conversation before them holds no answer to learn",
        where=where,
        remedy="append the chosen answer to each conversation to fine-tune on it",
    )


def _unknown(
    rows: Sequence[Mapping[str, Any]],
    found: Mapping[str, int],
    section: SourceSection,
    candidates: Sequence[str],
    where: str,
) -> DataError:
    names = ", ".join(found)
    if len(candidates) == 1:
        needed = load_format(candidates[0]).required
        missing = " and ".join(column for column in needed if section.columns.get(column, column) not in found)
        what = f"format {candidates[0]} needs the column {missing}; the data has {names}"
    else:
        what = f"the columns {names} fit no format"
    if all(name in found for name in PREFERENCE):
        remedy = "to learn the chosen ones: columns: {completion: chosen}"
        return DataError(f"{what}: preference pairs hold no single answer to learn", where=where, remedy=remedy)
    mapping = suggest(rows, found)
    if mapping:
        inner = ", ".join(f"{ours}: {theirs}" for ours, theirs in mapping.items())
        left = [name for name in found if name.lower() in CONTEXTS and name not in mapping.values()]
        loss = f" It does not read {' and '.join(left)}" if left else ""
        return DataError(what, where=where, remedy=f"did you mean columns: {{{inner}}}?{loss}")
    needs = "; ".join(f"{name}: {', '.join(made.required)}" for name, made in _formats().items())
    return DataError(what, where=where, remedy=f"map them with columns: {{...}}. Formats need {needs}")


def suggest(rows: Sequence[Mapping[str, Any]], found: Mapping[str, int]) -> dict[str, str]:
    """A ``columns:`` mapping that would give these columns a format; empty where none can be guessed."""
    lower = {name.lower(): name for name in found}
    first = rows[0]

    def pick(ours: str, kinds: type | tuple[type, ...]) -> str | None:
        names = [lower[name] for name in (ours, *SYNONYMS[ours]) if name in lower]
        return next((name for name in names if isinstance(first.get(name), kinds)), None)

    if listed := pick("messages", list):
        return {"messages": listed}
    prompt, completion = pick("prompt", (str, int, float)), pick("completion", (str, int, float))
    if (
        prompt
        and completion
        and prompt.lower() == "instruction"
        and isinstance(first.get(lower.get("context", "")), str)
    ):
        return {"instruction": prompt, "input": lower["context"], "output": completion}
    if prompt and completion:
        return {"prompt": prompt, "completion": completion}
    document = pick("text", str)
    return {"text": document} if document else {}
