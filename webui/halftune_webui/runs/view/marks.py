"""What people say of runs: a name, tags, a note, a pin; kept beside the runs, so a run's own files stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from halftune.core.atomic import write_text
from halftune.core.errors import ConfigError
from halftune.core.files import read_json
from halftune_webui.runs import queue
from halftune_webui.runs.view.show import Mark, name_of
from halftune_webui.runs.waiting import OWN_FOLDER

_FILE = Path(OWN_FOLDER) / "marks.json"
NAME, NOTE, TAG, TAGS = 80, 2000, 30, 8  # characters of a name, a note and a tag; tags


@dataclass
class Marks:
    """The marks of all runs below a folder, read again when the file has changed.

    Attributes:
        runs: the folder of runs.
    """

    runs: Path
    _seen: int = -1
    _marks: dict[str, Mark] = field(default_factory=dict)

    def of(self, run: Path) -> Mark:
        """What was said of a run."""
        return self.all().get(name_of(run, self.runs), Mark())

    def pin(self, run: Path) -> None:
        """Pins a run, or no longer."""
        self._change(run, lambda mark: replace(mark, pinned=not mark.pinned))

    def say(self, run: Path, said: str) -> None:
        """Sets name, tags and note.

        Args:
            run: the run.
            said: JSON of the page's form, ``{"name", "tags", "note"}``; tags are separated by commas.

        Raises:
            ConfigError: it is none, or too long.
        """
        try:
            values = json.loads(said)
            name, tags, note = (str(values[key]).strip() for key in ("name", "tags", "note"))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError("expected a name, tags and a note", code="webui.bad_note") from None
        listed = tuple(dict.fromkeys(filter(None, (tag.strip() for tag in tags.split(",")))))
        limits = ((name, NAME), (note, NOTE), *((tag, TAG) for tag in listed))
        if len(listed) > TAGS or any(len(text) > most for text, most in limits):
            what = f"at most {NAME} characters fit a name, {NOTE} a note, {TAG} each of {TAGS} tags"
            raise ConfigError(what, remedy="shorten it", code="webui.bad_note")
        self._change(run, lambda mark: replace(mark, name=name, tags=listed, note=note))

    def forget(self, run: Path) -> None:
        """Lets go of what was said of a run that is gone."""
        if self.of(run) != Mark():
            self._change(run, lambda mark: Mark())

    def all(self) -> dict[str, Mark]:
        """Name of a run, as :func:`~halftune_webui.runs.view.show.name_of` gives it → what was said of it."""
        path = self.runs / _FILE
        try:
            now = path.stat().st_mtime_ns
            if now != self._seen:
                found = read_json(path, root=self.runs)
                self._marks = {key: _mark(value) for key, value in found.items()} if isinstance(found, dict) else {}
                self._seen = now
        except (OSError, ValueError):
            self._marks, self._seen = {}, -1
        return self._marks

    def _change(self, run: Path, change: Callable[[Mark], Mark]) -> None:
        with queue.locked(self.runs, "marks"):
            marks, key = dict(self.all()), name_of(run, self.runs)
            marks[key] = change(marks.get(key, Mark()))
            kept = {key: asdict(mark) for key, mark in marks.items() if mark != Mark()}
            write_text(self.runs / _FILE, json.dumps(kept, ensure_ascii=False, indent=1))
            self._marks, self._seen = marks, -1


def _mark(value: Any) -> Mark:
    """A mark of the file; what makes no sense there is left out."""
    if not isinstance(value, dict):
        return Mark()
    name, note, tags = value.get("name"), value.get("note"), value.get("tags")
    return Mark(
        name=name if isinstance(name, str) else "",
        tags=tuple(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else (),
        note=note if isinstance(note, str) else "",
        pinned=value.get("pinned") is True,
    )
