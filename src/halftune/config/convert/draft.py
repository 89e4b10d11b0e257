"""A recipe in the making: what has become of each of the old config's keys, and the values of the new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from halftune.core.errors import ConfigError

Kind = Literal["translated", "default", "changed", "none"]
HEADINGS: dict[Kind, str] = {
    "translated": "translated",
    "default": "not written there; its default, written out here",
    "changed": "changed meaning",
    "none": "no equivalent",
}


@dataclass(frozen=True)
class Note:
    """What became of one key: ``ours`` is what stands for it in the recipe, ``why`` what to know about it."""

    kind: Kind
    key: str
    ours: str = ""
    why: str = ""


@dataclass
class Draft:
    """Collects the new values and one note per old key.

    Attributes:
        source: the old config; keys are taken out of ``left`` as they are dealt with.
        framework: its name.
        values: the recipe, nested.
        notes: in the order in which keys were dealt with.
    """

    source: dict[str, Any]
    framework: str
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    left: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = dict(self.source)

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

    def translated(self, key: str, ours: str, value: Any) -> None:
        """A key with the same meaning."""
        self.left.pop(key, None)
        self.put(ours, value)
        self.notes.append(Note("translated", key, ours))

    def changed(self, key: str, ours: str, value: Any, why: str) -> None:
        """A key that means something else here."""
        self.left.pop(key, None)
        if ours:
            self.put(ours, value)
        self.notes.append(Note("changed", key, ours, why))

    def none(self, key: str, why: str) -> None:
        """A key without an equivalent."""
        self.left.pop(key, None)
        self.notes.append(Note("none", key, "", why))

    def rename(self, table: Mapping[str, str]) -> None:
        """Keys that only have another name; null is left to the defaults."""
        for key, ours in table.items():
            if self.has(key):
                self.translated(key, ours, self.take(key))
            elif key in self.left:
                self.none(key, "is null: the default holds")

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

    def drop(self, table: Mapping[str, str]) -> None:
        """Keys without an equivalent, with the reason for each."""
        for key, why in table.items():
            if key in self.left:
                value = self.left[key]
                self.none(key, "is off there, and not here either" if value in (None, False, "no", "none") else why)

    def refuse(self, key: str, what: str) -> ConfigError:
        """The error for something that cannot be translated at all."""
        value = self.source.get(key)
        shown = f"{key}: {value}" if isinstance(value, str | int | float) else key
        return ConfigError(f"{shown} cannot be converted: {what}")

    def finish(self) -> None:
        """Accounts for the keys that nobody knew."""
        for key in list(self.left):
            self.none(key, f"not a key of {self.framework} that this converter knows")


Converter = Callable[[Draft], None]
