"""A recipe in the making: what has become of each of the old config's keys, and the values of the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, get_args

from halftune.core.errors import ConfigError
from halftune.core.packaged import read_yaml

Kind = Literal["translated", "default", "none", "changed", "refused"]
HEADINGS: dict[Kind, str] = {
    "refused": "refused: the model would learn something else",
    "changed": "approximate: done in another way",
    "translated": "translated",
    "default": "not written there; its default, written out here",
    "none": "not needed: no effect on what is learned",
}
_NEAR = 0.85  # how alike two keys are of which one is taken for a misspelling of the other
_CONDITIONS = {"is", "if", "unless"}  # without them, a rule says nothing of the keys of a section
OFF = ("no", "none", "false", "off", "null", "")


class Refusal(ConfigError):
    """A config that cannot be converted even with --accept: halftune lacks its method or data.

    Attributes:
        key: what asks for it.
    """

    def __init__(self, key: str, what: str, why: str) -> None:
        super().__init__(what, code="convert.refused")
        self.key, self.why = key, why


def is_off(value: Any) -> bool:
    """Whether a value of a key says that its feature is not used."""
    return not value or (isinstance(value, str) and value.lower() in OFF)


def number(value: Any) -> Any:
    """``"1e-4"`` as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def listed(value: Any) -> list[str]:
    """``"a, b"`` or a list, as a list."""
    items = value.split(",") if isinstance(value, str) else list(value)
    return [str(item).strip() for item in items if str(item).strip()]


def modules(names: Any) -> str | list[str]:
    """Names of layers; all of them are ``all-linear`` here."""
    return "all-linear" if listed(names) == ["all"] else listed(names)


VALUES: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in (bool, float, int, str)},
    **{"list": listed, "modules": modules, "not": lambda value: not value, "number": number},
    **{"or one": lambda value: float(value or 1), "same": lambda value: value},
    "named": lambda name: {"name_or_path": str(name)},
    "eos": lambda token: {"eos": str(token)},
    "pattern": lambda value: value if isinstance(value, str) else listed(value),  # text is one regular expression
    "true": lambda value: value is True,
}


def not_taken(values: Mapping[str, Any], known: Iterable[str]) -> str:
    """A clause that names the keys of an entry that are not read, or ""; those that are off say nothing."""
    unread = [str(key) for key, value in values.items() if key not in known and value not in (None, False)]
    return f"{', '.join(unread)}: not taken over" if unread else ""


def misspelt(key: str, known: Iterable[str]) -> str:
    """The known key that an unknown one is nearly alike, or ""."""
    return next(iter(get_close_matches(key, sorted(known), n=1, cutoff=_NEAR)), "")


@dataclass(frozen=True)
class Note:
    """The result for one key: ``ours`` is its equivalent in the recipe, ``why`` an explanation."""

    kind: Kind
    key: str
    ours: str = ""
    why: str = ""


class _Left(dict[str, Any]):
    """Keys not yet dealt with; ``known`` collects every key that a converter has asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.known: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.known.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.known.add(key)
        return super().get(key, default)

    def pop(self, key: str, default: Any = None) -> Any:
        self.known.add(key)
        return super().pop(key, default)


@dataclass
class Draft:
    """Collects the new values and one note per old key.

    Attributes:
        source: the old config; keys are taken out of ``left`` as they are dealt with.
        framework: its name.
        accepted: keys whose loss the user accepts: where they would be refused, the recipe is approximate.
        values: the recipe, nested.
        notes: in the order in which keys were dealt with.
    """

    source: dict[str, Any]
    framework: str
    accepted: frozenset[str] = frozenset()
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    left: _Left = field(init=False)

    def __post_init__(self) -> None:
        self.left = _Left(self.source)

    def has(self, key: str) -> bool:
        """Whether a key is written with a value and not yet dealt with."""
        return self.left.get(key) is not None

    def assume(self, key: str, value: Any) -> None:
        """Deal with a key as if it had this value, unless it has another."""
        if not self.has(key):
            self.left[key] = value

    def take(self, key: str) -> Any:
        """The value of a key, which the caller now deals with; None where it is not written."""
        return self.left.pop(key, None)

    def put(self, ours: str, value: Any) -> None:
        """Sets a dotted key of the recipe."""
        *sections, name = ours.split(".")
        holder = self.values
        for section in sections:
            holder = holder.setdefault(section, {})
        holder[name] = value

    def get(self, ours: str) -> Any:
        """What the recipe has under a dotted key; None where nothing."""
        holder: Any = self.values
        for part in ours.split("."):
            holder = holder.get(part) if isinstance(holder, dict) else None
        return holder

    def note(self, kind: Kind, key: str, why: str, ours: str = "", value: Any = None) -> None:
        """What has become of a key, and its value in the recipe if it has an equivalent."""
        self.left.pop(key, None)
        if ours:
            self.put(ours, value)
        accepted = kind == "refused" and key in self.accepted
        self.notes.append(Note("changed" if accepted else kind, key, ours, why))

    def translated(self, key: str, ours: str, value: Any, why: str = "", *, changed: str = "") -> None:
        """A key with the same meaning; where ``changed`` is a reason, about the same."""
        self.note("changed" if changed else "translated", key, changed or why, ours, value)

    def changed(self, key: str, ours: str, value: Any, why: str) -> None:
        """A key that is done in another way here, or not at all; what is learned is about the same."""
        self.note("changed", key, why, ours, value)

    def none(self, key: str, why: str) -> None:
        """A key without an effect on what is learned."""
        self.note("none", key, why)

    def refused(self, key: str, why: str) -> None:
        """A key without which something else would be learned."""
        self.note("refused", key, why)

    def move(self, key: str, ours: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Translate a key whose value is written in another way; null is left to the defaults."""
        if self.has(key):
            self.translated(key, ours, convert(self.take(key)))

    def words(self, key: str, ours: str, table: Mapping[Any, Any], otherwise: Any, why: str) -> None:
        """A key whose words are other ones here; a word not in the table becomes ``otherwise``."""
        if not self.has(key):
            return
        value = self.take(key)
        known = value if isinstance(value, str | bool | int) else repr(value)
        changed = "" if known in table else f"{value} is not known here: {why}"
        self.translated(key, ours, table.get(known, otherwise), changed=changed)

    def default(self, ours: str, value: Any, name: str) -> None:
        """What holds there where nothing is written, where it is not what holds here."""
        if self.get(ours) is None:
            self.put(ours, value)
            self.notes.append(Note("default", name, ours))

    def drop(self, keys: str, why: str, how: str = "none") -> None:
        """Keys without an equivalent, separated by spaces; those that are off have no effect."""
        for key in keys.split():
            if key in self.left:
                self._apply(key, {how: why})

    def look(self, name: str) -> Any:
        """What the recipe has under a dotted key, or the old config under one of its own."""
        return self.get(name) if "." in name else self.left.get(name, self.source.get(name))

    def follow(self, *places: str) -> None:
        """Apply blocks of rules, each named ``FILE.BLOCK`` of ``keys/FILE.yaml``, in their order.

        A rule is a key, or several, and what becomes of it where it is written: its name here, ``section.name`` or
        ``section.name as`` one of `VALUES`; or the first of several cases that holds. A case has conditions and a
        result. Conditions: ``is``, a value of the key or a list of them; ``same``, a key of the recipe with the same
        value; ``if`` and ``unless``, values of other keys, those with a dot being keys of the recipe. There, true and
        false alone mean on and off. Results: ``to`` with ``as``, ``value``, ``words`` and ``put``, which sets other
        keys too; ``none``, ``changed``, ``refused`` and ``stop`` with a reason, of which all but ``changed`` have no
        ``to``. A dotted key has a default, and the name of what is not written there.

        Raises:
            Refusal: a key that says ``stop`` is on.
        """
        for key, cases in (rule for place in places for rule in block_of_rules(*place.split("."))):
            case = next((case for case in cases if self._holds(key, case)), None)
            if case is not None and "." in key:
                self.default(key, case["default"], case["for"])
            elif case is not None and key in self.left:
                self._apply(key, case)

    def _holds(self, key: str, case: Mapping[str, Any]) -> bool:
        wanted = {key: case["is"]} if "is" in case else {}
        unwanted, same = case.get("unless", {}), case.get("same")
        if same and number(self.look(key)) != self.get(same):
            return False
        return self._are(wanted | case.get("if", {})) and not (unwanted and self._are(unwanted))

    def _are(self, wanted: Mapping[str, Any]) -> bool:
        return all(_matches(self.look(name), value) for name, value in wanted.items())

    def _apply(self, key: str, case: Mapping[str, Any]) -> None:
        """Deal with a key that is written."""
        value, kinds = self.left[key], get_args(Kind)
        if "stop" in case and not is_off(value):
            raise self.refuse(key, case["stop"])
        kind: Kind = next((kind for kind in kinds if kind in case), "translated")
        why = case.get(kind, case.get("why", ""))
        if "to" in case:
            self._rename(key, value, case, kind, why)
        elif is_off(value) and "is" not in case:
            self.none(key, "is off" if "stop" in case else "is off: no effect on what is learned")
        elif isinstance(value, dict) and kind == "none" and not _CONDITIONS & case.keys():
            self.note("changed", key, f"{', '.join(map(str, value))}: see whether they matter")
        else:
            self.note(kind, key, why)

    def _rename(self, key: str, value: Any, case: Mapping[str, Any], kind: Any, why: str) -> None:
        """Give a key its name here; null is left to the defaults, unless the case names it."""
        if value is None and "is" not in case:
            if "as" not in case:
                self.none(key, "is null: the default holds")
        elif "words" in case:
            self.words(key, case["to"], case["words"], case["otherwise"], why)
        else:
            for name, more in case.get("put", {}).items():
                self.put(name, more)
            new = case["value"] if "value" in case else VALUES[case.get("as", "same")](value)
            self.note(kind, key, why, case["to"], new)

    def drop_listed(self, file: str) -> None:
        """Keys without an equivalent, and settings of a feature whose own key decides."""
        blocks = tables(file)
        self.follow(*(f"{file}.{kind}" for kind in ("values", "none", "changed", "refused") if kind in blocks))
        for feature, prefixes in blocks.get("parts", {}).items():
            for key in [key for prefix in prefixes for key in self.left if key.startswith(prefix)]:
                self.none(key, f"belongs to {feature}")

    def refuse(self, key: str, why: str) -> Refusal:
        """The error for something that cannot be translated at all."""
        value = self.source.get(key)
        shown = f"{key}: {value}" if isinstance(value, str | int | float) else key
        return Refusal(key, f"{shown} cannot be converted: {why}", why)

    def forget(self, key: str) -> None:
        """Take back what was said of a key."""
        self.notes[:] = [note for note in self.notes if note.key != key]

    def finish(self) -> None:
        """Accounts for the keys that nobody knew: one that is nearly a known key is misspelt, others may matter."""
        for key, value in list(self.left.items()):
            near = misspelt(key, self.left.known - self.source.keys())
            if value is None:
                self.none(key, "is null")
            elif near:
                self.refused(key, f"not a key of {self.framework}: did you mean {near}?")
            else:
                why = f"not a key of {self.framework} that this converter knows: see whether it matters"
                self.changed(key, "", None, why)


def _matches(value: Any, wanted: Any) -> bool:
    """Whether a value is the wanted one, or one of a list; true and false alone mean on and off."""
    if isinstance(wanted, bool):
        return is_off(value) is not wanted
    wanted = wanted if isinstance(wanted, list) else [wanted]
    return any(value is one if isinstance(one, bool) else value == one for one in wanted)


@cache
def tables(name: str) -> dict[str, Any]:
    """The tables of ``keys/NAME.yaml``."""
    return read_yaml("halftune.convert", f"keys/{name}.yaml")


def table(file: str, name: str) -> Any:
    """A table of ``keys/FILE.yaml``."""
    return tables(file)[name]


@cache
def block_of_rules(file: str, block: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Keys and what becomes of them: a new name, or the first of several cases that holds."""
    rows, kinds = table(file, block), ("none", "changed", "refused")
    by_reason = {block: rows} if block in kinds else {kind: rows[kind] for kind in kinds if kind in rows}
    named = {} if block in kinds else {keys: rule for keys, rule in rows.items() if keys not in kinds}
    return [
        *((key, _cases(key, rule)) for keys, rule in named.items() for key in keys.split(", ")),
        *((key, [{kind: why}]) for kind, rows in by_reason.items() for why, keys in rows.items() for key in keys),
    ]


def _cases(key: str, rule: Any) -> list[dict[str, Any]]:
    if "." in key and isinstance(rule, list) and not isinstance(rule[0], dict):
        return [dict(zip(("default", "for"), rule, strict=True))]
    return [case if isinstance(case, dict) else _named(case) for case in (rule if isinstance(rule, list) else [rule])]


def _named(case: str) -> dict[str, Any]:
    """``section.name``, or ``section.name as kind of value``."""
    ours, _, kind = case.partition(" as ")
    return {"to": ours, "as": kind} if kind else {"to": ours}
