"""A recipe in the making: what has become of each of the old config's keys, and the values of the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

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

    def translated(self, key: str, ours: str, value: Any, why: str = "") -> None:
        """A key with the same meaning."""
        self.left.pop(key, None)
        self.put(ours, value)
        self.notes.append(Note("translated", key, ours, why))

    def changed(self, key: str, ours: str, value: Any, why: str) -> None:
        """A key that is done in another way here, or not at all; what is learned is about the same."""
        self.left.pop(key, None)
        if ours:
            self.put(ours, value)
        self.notes.append(Note("changed", key, ours, why))

    def none(self, key: str, why: str) -> None:
        """A key without an effect on what is learned."""
        self.left.pop(key, None)
        self.notes.append(Note("none", key, "", why))

    def refused(self, key: str, why: str) -> None:
        """A key without which something else would be learned."""
        self.left.pop(key, None)
        kind: Kind = "changed" if key in self.accepted else "refused"
        self.notes.append(Note(kind, key, "", why))

    def rename(self, table: Mapping[str, str]) -> None:
        """Keys that only have another name; null is left to the defaults."""
        for key, ours in table.items():
            if self.has(key):
                self.translated(key, ours, self.take(key))
            elif key in self.left:
                self.none(key, "is null: the default holds")

    def move(self, key: str, ours: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Translate a key whose value is written in another way; null is left to the defaults."""
        if self.has(key):
            self.translated(key, ours, convert(self.take(key)))

    def unsupported(self, keys: Iterable[str], why: str) -> None:
        """Keys of methods that do not exist here.

        Raises:
            Refusal: one of them is on.
        """
        for key in keys:
            if not is_off(self.left.get(key)):
                raise self.refuse(key, why)
            if key in self.left:
                self.none(key, "is off")

    def words(self, key: str, ours: str, table: Mapping[Any, Any], otherwise: Any, why: str) -> None:
        """A key whose words are other ones here; a word not in the table becomes ``otherwise``."""
        if not self.has(key):
            return
        value = self.take(key)
        known = value if isinstance(value, str | bool | int) else repr(value)
        if known in table:
            self.translated(key, ours, table[known])
        else:
            self.changed(key, ours, otherwise, f"{value} is not known here: {why}")

    def default(self, ours: str, value: Any, name: str) -> None:
        """What holds there where nothing is written, where it is not what holds here."""
        if self.get(ours) is None:
            self.put(ours, value)
            self.notes.append(Note("default", name, ours))

    def drop(self, table: Mapping[str, str], how: Literal["none", "changed", "refused"] = "none") -> None:
        """Keys without an equivalent, with the reason for each; those that are off have no effect."""
        for key, why in table.items():
            if key not in self.left:
                continue
            if is_off(self.left[key]):
                self.none(key, "is off: no effect on what is learned")
            elif how == "refused":
                self.refused(key, why)
            elif how == "changed":
                self.changed(key, "", None, why)
            else:
                self.none(key, why)

    def idle(self, table: Mapping[str, Any], why: str) -> None:
        """Keys that have the value of the table, with which they change nothing."""
        for key, value in table.items():
            if self.has(key) and self.left[key] == value:
                self.none(key, why)

    def drop_listed(self, framework: str) -> None:
        """Keys that ``keys/FRAMEWORK.yaml`` lists, and settings of a feature whose own key decides."""
        tables = _tables(framework)
        self.idle(dict.fromkeys(tables.get("idle_if_1", {}), 1), "is 1")
        for key, why in tables.get("changed_if_false", {}).items():
            if self.left.get(key) is False:
                self.changed(key, "", None, why)
        for kind in ("none", "changed", "refused"):
            self.drop(tables.get(kind, {}), kind)
        for prefix, feature in tables.get("parts", {}).items():
            for key in [key for key in self.left if key.startswith(prefix)]:
                self.none(key, f"belongs to {feature}")

    def refuse(self, key: str, why: str) -> Refusal:
        """The error for something that cannot be translated at all."""
        value = self.source.get(key)
        shown = f"{key}: {value}" if isinstance(value, str | int | float) else key
        return Refusal(key, f"{shown} cannot be converted: {why}", why)

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


@cache
def _tables(framework: str) -> dict[str, dict[str, str]]:
    """What the loss of a key means → key → reason."""
    listed = read_yaml("halftune.convert", f"keys/{framework}.yaml").items()
    return {kind: {key: why for why, keys in reasons.items() for key in keys} for kind, reasons in listed}
