"""Runs as HTML: the list, and a card for each run that is open. Everything that comes from a run is escaped."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from halftune.plan.duration import clock
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.runs.state import FINAL, RunState
from halftune_webui.runs.view.metrics import Alarm

REPORT = "report.html"


def name_of(run: Path, runs: Path) -> str:
    """How a run is called: its path below the folder of runs, else its whole path."""
    path, before = str(run), f"{runs}{os.sep}"  # as text: a list asks this for a thousand runs
    return path.removeprefix(before)


@dataclass(frozen=True)
class Mark:
    """What somebody said of a run: a name to show, tags, a note, and whether it stands first."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    pinned: bool = False


def run_list(
    states: Sequence[RunState],
    opened: Sequence[Path],
    runs: Path,
    words: Words,
    *,
    mark: Callable[[Path], Mark] = lambda run: Mark(),
    total: int = 0,
    ticked: int = 0,
) -> Markup:
    """The table of runs.

    Args:
        states: the runs to list.
        opened: those whose curves are shown, in the order of their colours.
        runs: the folder of runs.
        words: the labels.
        mark: what was said of a run.
        total: how many there are with those that are not listed; 0 for none but these.
        ticked: how many are ticked, listed or not.
    """
    shown = {"states": states, "opened": list(opened), "mark": mark, "total": total, "ticked": ticked}
    return render("run_list", **shown, of=_Of(runs, words), words=words)


def run_card(
    state: RunState,
    alarms: Sequence[Alarm],
    log: str,
    runs: Path,
    words: Words,
    *,
    output: str = "",
    mark: Mark | None = None,
    more: str = "",
) -> Markup:
    """One run: why it ended, what it does, how far it is, what is odd, what can be done.

    Args:
        state: how it stands.
        alarms: what is odd in its metrics.
        log: what it said last.
        runs: the folder of runs.
        words: the labels.
        output: of an export: the folder that it writes. There is nothing to resume then.
        mark: what somebody said of it.
        more: HTML that stands before the log.
    """
    shown = {"state": state, "alarms": alarms, "log": log, "output": output, "mark": mark or Mark(), "more": more}
    return render("run_card", **shown, of=_Of(runs, words), words=words)


@dataclass(frozen=True)
class _Of:
    """What the templates ask of a run, in words."""

    runs: Path
    words: Words

    def name(self, run: Path) -> str:
        return name_of(run, self.runs)

    def exported(self, output: str) -> str:
        return name_of(Path(output), Path.cwd())

    def ending(self, state: RunState) -> str:
        return ending(state, self.words)

    def waits_for(self, state: RunState) -> str:
        """Its place in the queue, and the run before it."""
        if state.behind is None:
            return self.words("runs.place", n=state.place)
        return self.words("runs.place_behind", n=state.place, name=self.name(state.behind))

    def phase(self, state: RunState) -> str:
        """A phase in words; one that another version of halftune wrote stands as it is."""
        if not state.live or not state.phase:
            return ""
        if state.first is not None:
            return self.words("runs.first", name=self.name(state.first))
        return self.words.table.get(f"runs.phases.{state.phase}", state.phase)

    def steps(self, state: RunState) -> str:
        if not state.step and not state.total:
            return ""
        return f"{state.step:,}" + (f" / {state.total:,}" if state.total else "")

    def loss(self, state: RunState) -> str:
        if state.loss is None:
            return ""
        return f"{state.loss:.4g}" if math.isfinite(state.loss) else self.words("runs.no_number")

    def left(self, state: RunState) -> str:
        return "" if state.seconds_left is None else clock(state.seconds_left)

    def began(self, state: RunState) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(state.began)) if state.began else ""

    def has_result(self, run: Path) -> bool:
        return (run / FINAL).is_dir()

    def has_report(self, run: Path) -> bool:
        return (run / REPORT).is_file()


def ending(state: RunState, words: Words) -> str:
    """Why a run ended, or cannot be read; empty where nothing is to be said."""
    if state.end == "crashed":
        return words("runs.end.crashed", signal=state.cause)
    if state.end:
        return "\n".join(part for part in (words(f"runs.end.{state.end}"), state.cause) if part)
    return state.cause
