"""Detects the format of a source's rows, suggests a ``columns:`` mapping, and finds rows of another format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from halftune.config.sections.data import SourceSection
from halftune.config.sections.method import Method, RecordName
from halftune.core.errors import DataError
from halftune.core.table import did_you_mean
from halftune.data.formats import FORMATS, load_format
from halftune.data.formats.conversation import BadRow, Format
from halftune.data.formats.fields import MEDIA_COLUMNS, is_missing, rating

# Names of our columns in other data sets; the first match is suggested.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "problem", "instruction", "user", "input", "text_input", "request", "source"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "assistant", "generation", "chosen"),
    "messages": ("conversation", "conversations", "dialog", "dialogue", "chat", "turns", "chosen"),
    "text": ("content", "body", "document", "article", "passage", "code", "story", "raw_content"),
}
# Unambiguous if a data set has one of each. A question's context is not among them.
QUESTIONS = {"prompt", "question", "query", "problem", "instruction", "input"}
ANSWERS = {"completion", "answer", "response", "output", "solution"}
GROUNDS = {"input", "context"}  # context of an instruction: alpaca's name, and databricks-dolly's
CONTEXTS = {"context", "passage", "document", "background", "choices", "options", "history", "system_prompt"}
PREFERENCE = ("chosen", "rejected")
RATINGS = ("label", "kto_tag")  # flags that mark an answer as good or rejected


@dataclass(frozen=True)
class Reading:
    """How the rows of one source are parsed.

    Attributes:
        format: the format.
        columns: the format's column → the file's column, for present columns.
        absent: optional columns that the data set lacks.
        unused: columns of the file that are ignored.
        gaps: optional columns → number of rows where they are missing, null or NaN.
    """

    format: Format
    columns: dict[str, str]
    absent: tuple[str, ...]
    unused: tuple[str, ...]
    gaps: dict[str, int]

    def rename(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with the format's column names; absent columns are omitted."""
        renamed = {ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row}
        return renamed | {name: row[name] for name in MEDIA_COLUMNS if name in row}


def detect(
    rows: Collection[Mapping[str, Any]],
    section: SourceSection,
    where: str,
    records: Sequence[RecordName] = ("conversation", "document"),
) -> Reading:
    """Detect the format of a source: the requested one, or the first whose required columns are present.

    Args:
        rows: the source's rows.
        section: the source's config.
        where: the source's name in errors.
        records: the accepted kinds of records.

    Raises:
        DataError: no format fits (the remedy is a ``columns:`` mapping where one can be guessed), or the mapping names
            a column that does not exist.
    """
    filled = _filled(rows)
    _check_mapping(section.columns, filled, where)
    if section.prompt is not None:
        return _prompted(section, filled, len(rows), where, records)
    candidates = _consuming(section, where, records)
    fit = _by_columns(candidates, section.columns, filled)
    may_guess = section.format == "auto" and not section.columns and "conversation" in records
    if may_guess and not _has_pairs(filled):
        if fit is None:
            fit = _guess(rows, filled)
        elif fit[0] == "alpaca" and "input" not in fit[1] and (guessed := _guess(rows, filled)):
            fit = "alpaca", {**fit[1], **guessed[1]}  # its context has another name
    if fit is None:
        raise _unknown(rows, filled, section, candidates, where)
    row_format, columns = load_format(fit[0]), fit[1]
    if _has_pairs(filled) and "chosen" not in columns.values():
        raise _preference_error(where)
    if row_format.name != "text":
        _check_rating(rows, columns, filled, where)
    return _reading(row_format, columns, filled, len(rows))


def _prompted(
    section: SourceSection, filled: Mapping[str, int], total: int, where: str, records: Sequence[RecordName]
) -> Reading:
    """The reading of a source with a prompt in place of the chat template."""
    from halftune.data.formats.prompted import prompted  # seldom used

    if section.format not in ("auto", "alpaca") or "conversation" not in records:
        what = "prompt requires rows of format alpaca, and a method that trains answers"
        raise DataError(what, where=where, remedy="remove prompt, or set format: alpaca", code="data.unknown_prompt")
    row_format = prompted(section.prompt or "")
    pairs = {ours: section.columns.get(ours, ours) for ours in row_format.columns}
    columns = {ours: theirs for ours, theirs in pairs.items() if theirs in filled}
    if missing := set(row_format.required) - columns.keys():
        what = f"prompt needs the columns {' and '.join(row_format.required)}; the data has {', '.join(filled)}"
        remedy = f"map {' and '.join(sorted(missing))} with columns: {{...}}"
        raise DataError(what, where=where, remedy=remedy, code="data.unknown_format")
    return _reading(row_format, columns, filled, total)


def _filled(rows: Collection[Mapping[str, Any]]) -> Counter[str]:
    """How many rows have a value, per column."""
    filled: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            filled[name] += not is_missing(value)
    return filled


def _by_columns(
    candidates: Sequence[str], mapping: Mapping[str, str], filled: Mapping[str, int]
) -> tuple[str, dict[str, str]] | None:
    """The first format whose required columns are present, and its column mapping."""
    for name in candidates:
        row_format = load_format(name)
        pairs = {ours: mapping.get(ours, ours) for ours in row_format.columns}  # unmapped columns keep their names
        columns = {ours: theirs for ours, theirs in pairs.items() if theirs in filled}
        if columns.keys() >= set(row_format.required):
            return name, columns
    return None


def _has_pairs(found: Mapping[str, int]) -> bool:
    return found.keys() >= set(PREFERENCE)


def _guess(rows: Collection[Mapping[str, Any]], found: Mapping[str, int]) -> tuple[str, dict[str, str]] | None:
    """The format and column mapping of a data set with other column names, if there is one possibility only."""
    texts, names = _text_columns(rows, found), {name.lower() for name in found}
    answers, questions, grounds = names & ANSWERS, names & QUESTIONS, texts.keys() & GROUNDS
    if len(answers) != 1 or not answers | questions <= texts.keys() or (names & CONTEXTS) - grounds:
        return None
    answer = texts[answers.pop()]
    if questions in ({"instruction"}, {"instruction", "input"}) and len(grounds) < 2:
        columns = {"instruction": texts["instruction"], "output": answer}
        if grounds:
            columns["input"] = texts[grounds.pop()]
        return "alpaca", columns
    if len(questions) == 1 and "context" not in grounds:
        return "prompt_completion", {"prompt": texts[questions.pop()], "completion": answer}
    return None


def _text_columns(rows: Collection[Mapping[str, Any]], found: Mapping[str, int]) -> dict[str, str]:
    """Columns that hold texts or numbers only, by their lower-case names."""
    texts = list(found)
    for row in rows:
        texts = [name for name in texts if _is_text(row.get(name))]
    return {name.lower(): name for name in texts}


def _is_text(value: Any) -> bool:
    return is_missing(value) or (isinstance(value, str | int | float) and not isinstance(value, bool))


def detect_for(method: Method, rows: Collection[Mapping[str, Any]], section: SourceSection) -> Reading:
    """Detect the format of a source for a training method.

    Raises:
        DataError: as ``detect``; or the source is plain text and the method needs answers.
    """
    named = {name for row in rows for name in row} if method.records[0] == "rated" else set()
    if "kto_tag" in named and "label" not in named | section.columns.keys():  # LLaMA-Factory's name
        section = section.model_copy(update={"columns": {**section.columns, "label": "kto_tag"}})
    if method.records[0] in ("preference", "rated") or method.generates:
        return detect(rows, section, section.path, method.records)
    reading = detect(rows, section, section.path)
    if reading.format.record not in method.records:
        what, remedy = "plain text has no answers to train on", "set method: {type: pretrain} to train on every token"
        raise DataError(what, where=section.path, remedy=remedy, code="data.text_without_answers")
    return reading


def _consuming(section: SourceSection, where: str, records: Sequence[RecordName]) -> list[str]:
    """The formats that read every column of the mapping, so that no mapped column is ignored."""
    if section.format == "auto":
        asked = section.columns.keys()
        known = _formats().items()
        fitting = [name for name, made in known if made.record in records and asked <= set(made.columns)]
        what = f"columns: no format reads {' and '.join(section.columns)} together"
    else:
        unread = [ours for ours in section.columns if ours not in load_format(section.format).columns]
        fitting = [] if unread else [section.format]
        what = f"columns: format {section.format} reads no {' and no '.join(unread)}"
    if not fitting:
        known = "; ".join(f"{name}: {', '.join(made.columns)}" for name, made in _formats().items())
        raise DataError(what, where=where, remedy=f"formats have {known}", code="data.bad_columns")
    return fitting


def _formats() -> dict[str, Format]:
    return {name: load_format(name) for name in FORMATS}


def _check_rating(
    rows: Collection[Mapping[str, Any]], columns: Mapping[str, str], found: Mapping[str, int], where: str
) -> None:
    """Refuse rated answers (KTO): only a flag tells rejected answers from good ones."""
    for name in RATINGS:
        if name not in found or name in columns.values():
            continue
        flags = {rating(row[name]) for row in rows if not is_missing(row.get(name)) and row[name] != ""}
        if False in flags and None not in flags:
            what = f"column {name} rates answers: this requires method: kto, bad answers would be trained too"
            remedy = f"set method: kto, or keep only the rows with {name}: true, or remove a column that rates nothing"
            raise DataError(what, where=where, remedy=remedy, code="data.rated_answers")


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
    known = {name for made in _formats().values() for name in made.columns}
    for ours, theirs in mapping.items():
        if ours not in known:
            what = f"columns: no format has a column {ours!r}"
            raise DataError(what, where=where, remedy=did_you_mean(ours, known), code="data.bad_columns")
        if theirs not in found:
            what = f"columns: the data has no column {theirs!r}"
            raise DataError(what, where=where, remedy=did_you_mean(theirs, found), code="data.bad_columns")


def _preference_error(where: str) -> DataError:
    return DataError(
        "row without an answer: columns chosen and rejected are preference pairs, "
        "and the conversation contains no answer to train",
        where=where,
        remedy="set method: dpo to train on pairs; or append the chosen answer to each conversation",
        code="data.preference_pairs",
    )


def _unknown(
    rows: Collection[Mapping[str, Any]],
    found: Mapping[str, int],
    section: SourceSection,
    candidates: Sequence[str],
    where: str,
) -> DataError:
    what = f"cannot infer the data format from columns {', '.join(found)}"
    if len(candidates) == 1:
        needed = load_format(candidates[0]).required
        missing = " and ".join(column for column in needed if section.columns.get(column, column) not in found)
        what = f"format {candidates[0]} needs the column {missing}; the data has {', '.join(found)}"
    if candidates == ["preference"]:
        what += "; method: dpo requires pairs of answers"
        remedy = "map the two answers with columns: {chosen: …, rejected: …}; or set method: sft"
        return DataError(what, where=where, remedy=remedy, code="data.preference_pairs")
    if _has_pairs(found):
        what += ": preference pairs have no single answer"
        remedy = "set method: dpo to train on pairs, or columns: {completion: chosen} to train on chosen answers only"
        return DataError(what, where=where, remedy=remedy, code="data.preference_pairs")
    if mapping := suggest(next(iter(rows))):
        remedy = _mapping_remedy(mapping, found)
    else:
        needs = "; ".join(f"{name}: {', '.join(made.required)}" for name, made in _formats().items())
        remedy = f"map them with columns: {{...}}. Required: {needs}"
    return DataError(what, where=where, remedy=remedy, code="data.unknown_format")


def _mapping_remedy(mapping: Mapping[str, str], found: Mapping[str, int]) -> str:
    inner = ", ".join(f"{ours}: {theirs}" for ours, theirs in mapping.items())
    left = [name for name in found if name.lower() in CONTEXTS and name not in mapping.values()]
    return f"did you mean columns: {{{inner}}}?" + (f" It ignores {' and '.join(left)}" if left else "")


def suggest(row: Mapping[str, Any]) -> dict[str, str]:
    """Suggest a ``columns:`` mapping for data whose first row is ``row``; empty if there is no plausible one."""
    if listed := _pick(row, "messages", list):
        return {"messages": listed}
    prompt, completion = (_pick(row, ours, str, int, float) for ours in ("prompt", "completion"))
    if not prompt or not completion:
        document = _pick(row, "text", str)
        return {"text": document} if document else {}
    context = _pick(row, "context", str)
    if prompt.lower() == "instruction" and context:
        return {"instruction": prompt, "input": context, "output": completion}
    return {"prompt": prompt, "completion": completion}


def _pick(row: Mapping[str, Any], ours: str, *kinds: type) -> str:
    """The first column with our name or a synonym whose value is of one of the types; "" if there is none."""
    columns = {name.lower(): name for name, value in row.items() if isinstance(value, kinds)}
    return next((columns[name] for name in (ours, *SYNONYMS.get(ours, ())) if name in columns), "")


def bad_row(
    error: BadRow,
    rows: Iterable[Mapping[str, Any]],
    place: Callable[[int], str],
    reading: Reading,
    section: SourceSection,
    method: Method,
) -> DataError:
    """The error for the row whose index among ``rows`` is ``error.args[0]``.

    Args:
        error: what is wrong with it.
        rows: the source's rows.
        place: the place of a row in errors, by its index.
        reading: how the rows are read.
        section, method: of the source and the run.
    """
    index, what, remedy, _ = error.args
    needed = {reading.columns[name] for name in reading.format.required}
    row = next(islice(rows, index, None))
    own = _format_of(row, section, method) if needed.isdisjoint(row) else ""
    other = next((at for at, one in enumerate(rows) if needed & one.keys()), None) if own else None
    if own not in ("", reading.format.name) and other is not None:  # the later one differs from the rows before it
        formats = {index: own, other: reading.format.name}
        first, index = sorted(formats)
        what = f"format {formats[index]}, but {place(first)} has format {formats[first]}"
        remedy = "list files of each format as sources of their own under data.train"
        return DataError(what, where=place(index), remedy=remedy, code="data.ambiguous_folder")
    return DataError(what, where=place(index), remedy=remedy, code=error.code)


def _format_of(row: Mapping[str, Any], section: SourceSection, method: Method) -> str:
    """The format of a row by itself; "" if it fits none."""
    try:
        return detect_for(method, [row], section).format.name
    except DataError:
        return ""
