"""Readable messages for YAML syntax errors."""

from __future__ import annotations

import re
from typing import NamedTuple

from yaml.error import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from halftune.core.errors import HalftuneError


class Sentence(NamedTuple):
    """The message for parser errors that match ``pattern``; ``at_start``: report the construct's first line."""

    pattern: str
    what: str
    remedy: str
    at_start: bool = False


SENTENCES = (
    Sentence("expected a single document", "a second document starts here (---)", "use one recipe per file"),
    Sentence("expected '<document start>'", "text after a complete value", "check the file name"),
    Sentence("find expected ':'", "expected 'key: value'", "write a colon and a space after the key", True),
    Sentence("unexpected end of stream|unexpected document sep", "unclosed quote", "close it", True),
    Sentence("found '<scalar>'", "text after a closing quote", "put the whole value in one pair of quotes"),
    Sentence("parsing a flow", "unclosed bracket or brace, or missing comma", "close it with ] or }", True),
    Sentence("block mapping", "inconsistent indentation", "start the section's keys in one column"),
    Sentence("block collection", "inconsistent indentation of a list", "start its entries in one column"),
    Sentence("found undefined alias", "undefined alias (*name)", "define its anchor (&name) above, or quote it"),
    Sentence("found duplicate anchor", "duplicate anchor (&name)", "rename one of them"),
    Sentence("unknown escape", "unknown escape in double quotes", "use single quotes for strings with \\"),
    Sentence("undefined tag handle|unknown tag", "a YAML tag (!…) is not allowed here", "quote it"),
    Sentence("cannot start any token", "a value cannot start with this character", "put the value in quotes"),
    Sentence("expected alphabetic or numeric", "a name must follow & or *", "put the value in quotes"),
)


def syntax_error(error: YAMLError | RecursionError, text: str, label: str) -> HalftuneError:
    """Convert a parser's error to a readable one, with its line."""
    if isinstance(error, RecursionError):
        what = "nested too deeply for a configuration"
        return HalftuneError(what, where=label, remedy="check the file name", code="config.too_large")
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        what = f"character U+{int(error.character):04X} is not allowed in YAML"
        return HalftuneError(what, where=f"{label}:{line}", remedy="remove it", code="config.invalid_yaml")
    if not isinstance(error, MarkedYAMLError):
        return HalftuneError(f"invalid YAML: {error}", where=label, code="config.invalid_yaml")
    said = f"{error.context or ''} {error.problem or ''}"
    mark, start = error.problem_mark, error.context_mark
    unknown = Sentence("", f"invalid YAML ({said.strip()})", "")
    _, what, remedy, at_start = next((one for one in SENTENCES if re.search(one.pattern, said)), unknown)
    chosen = start if at_start and start is not None else mark
    # lines as editors count them: YAML 1.1 breaks lines at U+0085 and U+2028 too
    line, end = (text.count("\n", 0, at.index) + 1 if at is not None else 1 for at in (chosen, mark))
    if (tab := _tab_near(text, line, end)) is not None:
        what, remedy, line = "indentation with a tab", "use spaces", tab
    elif "mapping values are not allowed" in said:
        what, remedy, line = _stray_colon(text, line)
    return HalftuneError(what, where=f"{label}:{line}", remedy=remedy, code="config.invalid_yaml")


def _stray_colon(text: str, line: int) -> tuple[str, str, int]:
    """The reason for an unexpected colon: a value with a colon, a wrong indentation, or a key without a space."""
    rows = text.split("\n")
    row = rows[line - 1]
    above = next((number for number in range(line - 1, 0, -1) if rows[number - 1].strip()), line)
    if len(re.findall(r":(?=\s|$)", row)) > 1 or above == line:
        return "a second colon in one line", "put text that holds ': ' in quotes", line
    if not re.search(r":(\s|$)", rows[above - 1]):
        return "expected 'key: value'", "write a colon and a space after the key", above
    remedy = f"line {above} has a value already: start both keys in the same column, or leave that value out"
    return "this key is indented deeper than the one above", remedy, line


def _tab_near(text: str, *lines: int) -> int | None:
    """The first of these lines that is indented with a tab."""
    rows = text.split("\n")
    for line in sorted(set(lines)):
        row = rows[line - 1] if line <= len(rows) else ""
        if "\t" in row[: len(row) - len(row.lstrip())]:
            return line
    return None
