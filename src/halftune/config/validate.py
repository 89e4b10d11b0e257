"""Validates a tree against the section models, with our own error messages."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from halftune.config.reading.suggest import suggest_key, suggest_word
from halftune.config.run import RunConfig
from halftune.config.sections import Section
from halftune.config.shape import ROOT, Shape, accepts, choices, describe, field_shape, shape_at
from halftune.config.tree import KeyPath, KeyProblem, Tree, child, related
from halftune.core.errors import HalftuneError

YES_NO = {"yes": True, "no": False, "on": True, "off": False, "y": True, "n": False, "true": True, "false": False}


def validate(tree: Tree) -> tuple[RunConfig | None, list[HalftuneError], set[KeyPath]]:
    """Convert the tree into a configuration.

    Returns:
        The configuration, the problems, and their paths. With problems, the configuration has defaults and placeholders
        at these paths, so that rules about other keys can still be checked; None if that is impossible.
    """
    values, problems, broken = deepcopy(tree.values), [], set()
    for _ in range(6):  # a placeholder may reveal missing keys below it
        try:
            return RunConfig.model_validate(values), problems, broken
        except ValidationError as error:
            found = _by_path(error, values)
        new = {path: details for path, details in found.items() if not any(related(path, old) for old in broken)}
        said = {path: _problem(tree, path, details, values) for path, details in new.items()}
        meant = {problem.meant for problem in said.values() if problem.meant}
        # a misspelt key is not also reported as missing, nor do rules check the key that was meant
        twice = {path for path in meant & new.keys() if new[path]["type"] == "missing"}
        problems += [problem for path, problem in said.items() if path not in twice]
        broken |= meant | _repair(values, found)
    return None, problems, broken


def _repair(values: Any, found: dict[KeyPath, ErrorDetails]) -> set[KeyPath]:
    """Remove what is invalid, or insert a placeholder; the keys that have no valid value of the user's."""
    broken: set[KeyPath] = set()
    for path, details in found.items():
        kind, shape, value = details["type"], shape_at(path, values), child(values, *path)
        if kind == "union_tag_invalid" and shape and (tag := suggest_word(value["type"], shape.sections)[1]):
            value["type"] = tag  # other problems in the section follow in the next round
            broken.add((*path, "type"))
            continue
        whole = path
        while whole and isinstance(whole[-1], int):  # an invalid entry removes its whole list
            whole = whole[:-1]
        holder = child(values, *whole[:-1])
        if kind == "missing" and whole == path and shape is not None:
            holder[path[-1]] = _placeholder(shape)
        elif isinstance(holder, dict) and whole:
            holder.pop(whole[-1], None)
        if kind != "extra_forbidden":
            broken.add(path)
    return broken


def _by_path(error: ValidationError, values: Any) -> dict[KeyPath, ErrorDetails]:
    """pydantic's errors by the user's path; all branches of a union count as one."""
    found: dict[KeyPath, ErrorDetails] = {}
    for details in error.errors(include_url=False):
        found.setdefault(_user_path(details["loc"], values), details)
    return found


def _user_path(location: tuple[str | int, ...], values: Any) -> KeyPath:
    """Remove union branches from pydantic's location."""
    path: list[str | int] = []
    shape: Shape | None = ROOT
    value, tag_seen = values, False
    for part in location:
        if shape is None:
            break
        if len(shape.sections) > 1 and not shape.many and not tag_seen:
            tag_seen = True  # pydantic names the branch of a tagged union before the key in it
            continue
        is_entry = isinstance(part, int) or get_origin(shape.annotation) is dict
        if not is_entry and (shape.many or not shape.sections):
            break  # the branch of a union of plain types
        path.append(part)
        shape, value, tag_seen = shape.below(part, value), child(value, part), False
    return tuple(path)


def _problem(tree: Tree, path: KeyPath, details: ErrorDetails, values: Any) -> KeyProblem:
    """The error for pydantic's; ``values`` is the tree after previous repairs."""
    shape, kind = shape_at(path, tree.values), details["type"]
    value = child(tree.values, *path)
    if kind == "extra_forbidden":
        remedy, meant = suggest_key(path, _section_at(path[:-1], values))
        return tree.problem(path, "unknown key", remedy, code="config.unknown_key", meant=meant)
    if kind == "missing":
        return _missing(tree, path, shape)
    if kind in ("union_tag_not_found", "union_tag_invalid") and shape is not None and isinstance(value, dict):
        remedy, _ = suggest_word(value.get("type"), shape.sections)
        what = f"expected one of {', '.join(shape.sections)}, got {show(value.get('type'))}"
        return tree.problem((*path, "type"), what, remedy, code="config.invalid_value")
    if kind == "too_short":
        return tree.problem(path, "is empty", "add at least one entry", code="config.empty_list")
    if shape is None:
        return tree.problem(path, details["msg"], code="config.invalid_value")
    what, remedy = _mismatch(value, shape)
    return tree.problem(path, what, remedy, code="config.invalid_value")


def _section_at(path: KeyPath, values: Any) -> type[Section] | None:
    shape = shape_at(path, values)
    return shape.section(child(values, *path)) if shape is not None else None


def _missing(tree: Tree, path: KeyPath, shape: Shape | None) -> KeyProblem:
    if shape is not None and shape.sections and not shape.many:
        required = [name for option in shape.sections.values() for name in _required(option)]
        remedy = f"write {path[-1]}: with {', '.join(required)} below it"
        return tree.problem(path, "this section is missing", remedy, code="config.missing_key")
    section = _section_at(path[:-1], tree.values)
    field = section.model_fields.get(str(path[-1])) if section is not None else None
    remedy = (field.description or "").split("\n")[0] if field is not None else ""
    return tree.problem(path, "this key is missing", remedy, code="config.missing_key")


def _required(section: type[Section]) -> list[str]:
    return [name for name, field in section.model_fields.items() if field.is_required()]


def _mismatch(value: Any, shape: Shape) -> tuple[str, str]:
    """(what, remedy) for a value of the wrong type or out of bounds."""
    if value is None:
        return "has no value", f"write {describe(shape)}, or remove the line"
    return f"expected {describe(shape)}, got {show(value)}", _remedy(value, shape)


def _remedy(value: Any, shape: Shape) -> str:
    match value:
        case str():
            return _remedy_of_text(value, shape)
        case bool():
            words = choices(shape)
            return f"did you mean {words[0]}?" if len(words) == 1 else ""
        case float() if accepts(shape, int) and value.is_integer() and abs(value) < 1e15:
            return f"write {int(value)}"
        case int() | float() if accepts(shape, str):
            return "put it in quotes"
        case dict() if not shape.sections:
            return "check the indentation: this key does not accept a section"
    return ""


def _remedy_of_text(value: str, shape: Shape) -> str:
    words = choices(shape)
    if len(shape.sections) == 1 and not shape.many and not words:
        required = _required(next(iter(shape.sections.values())))
        return f"write {{{required[0]}: {value}}}" if len(required) == 1 else ""
    if accepts(shape, bool) and value.lower() in YES_NO:
        unquoted = " without quotes" if value in ("true", "false") else ""
        return f"write {str(YES_NO[value.lower()]).lower()}{unquoted}"
    if accepts(shape, int) and _number(value) is not None and len(value) < 20:
        return "write the number without quotes and without leading zeros"
    return suggest_word(value, words)[0]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def show(value: Any) -> str:
    """Return a value as in YAML, shortened to one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section of keys"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _placeholder(shape: Shape) -> Any:
    """A valid value for a missing required one; rules do not see it."""
    if not shape.sections:
        return "placeholder"
    first = next(iter(shape.sections.values()))
    section = {name: _placeholder(field_shape(first.model_fields[name])) for name in _required(first)}
    return [section] if shape.many else section
