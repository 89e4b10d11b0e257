"""YAML's syntax errors in plain words: what is wrong in that line and how it should look."""

from __future__ import annotations

import re

from yaml.error import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from halftune.core.errors import HalftuneError

# pattern in the parser's words → (what, remedy, whether the start of the construct is the telling line)
SENTENCES: tuple[tuple[str, str, str, bool], ...] = (
    (r"expected a single document", "a second document starts here (---)", "one recipe per file", False),
    (
        r"expected '<document start>'",
        "text follows a value that is whole",
        "is this the right file? A recipe is YAML",
        False,
    ),
    (
        r"could not find expected ':'",
        "this line is no 'key: value'",
        "write a colon and a space after the key",
        True,
    ),
    (r"found unexpected end of stream|found unexpected document sep", "a quote is never closed", "close it", True),
    (r"found '<scalar>'", "text follows a closed quote", "put the whole value in one pair of quotes", False),
    (
        r"while parsing a flow (sequence|mapping|node)",
        "a bracket or brace is never closed, or a comma is missing",
        "close it with ] or }",
        True,
    ),
    (
        r"while parsing a block mapping",
        "the indentation does not fit the lines above",
        "keys of one section start in the same column",
        False,
    ),
    (
        r"while parsing a block collection",
        "the indentation does not fit the list above",
        "entries of one list start in the same column",
        False,
    ),
    (r"found undefined alias", "an alias (*name) without its anchor (&name)", "define it above, or quote it", False),
    (r"found duplicate anchor", "an anchor (&name) is defined twice", "give one of them another name", False),
    (r"found unknown escape", "an unknown escape in double quotes", "use single quotes for text with \\", False),
    (r"undefined tag handle|unknown tag|could not determine", "a YAML tag (!…) is not allowed here", "quote it", False),
    (
        r"cannot start any token",
        "a value cannot start with this character",
        "put the value in quotes",
        False,
    ),
    (r"expected alphabetic or numeric", "a name must follow & or *", "put the value in quotes", False),
)


def syntax_error(error: YAMLError | RecursionError, text: str, label: str) -> HalftuneError:
    """Says a parser's error in our words, with its line."""
    if isinstance(error, RecursionError):
        return HalftuneError("is nested too deeply for a configuration", where=label, remedy="is this the right file?")
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        what = f"holds the character U+{int(error.character):04X}, which YAML does not allow"
        return HalftuneError(what, where=f"{label}:{line}", remedy="remove it")
    if not isinstance(error, MarkedYAMLError):
        return HalftuneError(f"is not valid YAML: {error}", where=label)
    said = f"{error.context or ''} {error.problem or ''}"
    mark, start = error.problem_mark, error.context_mark
    what, remedy, from_start = _sentence(said)
    chosen = start if from_start and start is not None else mark
    # lines as editors count them: YAML 1.1 breaks lines at U+0085 and U+2028 too
    line, end = (text.count("\n", 0, at.index) + 1 if at is not None else 1 for at in (chosen, mark))
    if (tab := _tab_near(text, line, end)) is not None:
        what, remedy, line = "a tab is used for indentation", "YAML indents with spaces only", tab
    elif "mapping values are not allowed" in said:
        what, remedy, line = _stray_colon(text, line)
    return HalftuneError(what, where=f"{label}:{line}", remedy=remedy)


def _sentence(said: str) -> tuple[str, str, bool]:
    for pattern, what, remedy, from_start in SENTENCES:
        if re.search(pattern, said):
            return what, remedy, from_start
    return f"is not valid YAML ({said.strip()})", "", False


def _stray_colon(text: str, line: int) -> tuple[str, str, int]:
    """Why a colon cannot stand in this line: a value with a colon, an indentation too deep, or a key with no space."""
    rows = text.split("\n")
    row = rows[line - 1]
    above = next((number for number in range(line - 1, 0, -1) if rows[number - 1].strip()), line)
    if len(re.findall(r":(?=\s|$)", row)) > 1 or above == line:
        return "a second colon in one line", "put text that holds ': ' in quotes", line
    if not re.search(r":(\s|$)", rows[above - 1]):
        return "this line is no 'key: value'", "write a colon and a space after the key", above
    remedy = f"line {above} has a value already: start both keys in the same column, or leave that value out"
    return "this key is indented deeper than the one above", remedy, line


def _tab_near(text: str, *lines: int) -> int | None:
    """The first of these lines whose indentation holds a tab."""
    rows = text.split("\n")
    for line in sorted(set(lines)):
        row = rows[line - 1] if line <= len(rows) else ""
        if "\t" in row[: len(row) - len(row.lstrip())]:
            return line
    return None
