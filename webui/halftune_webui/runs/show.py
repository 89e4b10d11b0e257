"""Runs as HTML: the list, and a card for each run that is open. Everything that comes from a run is escaped."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from halftune.plan.duration import clock
from halftune_webui.labels import Words
from halftune_webui.runs.metrics import Alarm
from halftune_webui.runs.state import FINAL, RunState

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
) -> str:
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
    if not states:
        return f'<p class="empty">{escape(words("runs.no_match" if total else "runs.none", folder=runs))}</p>'
    head = "".join(
        f"<th{' class=n' if name in ('loss', 'left') else ''}>{escape(words(f'runs.{name}'))}</th>"
        for name in ("name", "state", "progress", "loss", "left", "started")
    )
    rows = "".join(_row(state, opened, runs, words, mark(state.folder)) for state in states)
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    foot = []
    if total > len(states):
        foot.append(f"<span>{escape(words('runs.shown', n=len(states), total=f'{total:,}'))}</span>")
        foot.append(f'<button data-act="more">{escape(words("runs.acts.more"))}</button>')
    if ticked > 1:
        ask = f'data-ask="{escape(words("runs.ask_delete_ticked", n=ticked))}"'
        label = escape(words("runs.acts.delete_ticked", n=ticked))
        foot.append(f'<button data-act="untick">{escape(words("runs.acts.untick"))}</button>')
        foot.append(f'<button data-act="delete_ticked" class="bad" {ask}>{label}</button>')
    below = f'<div class="foot">{"".join(foot)}</div>' if foot else ""
    return f'<div class="list" data-keep="list" data-from="top" tabindex="0">{table}</div>{below}'


def _row(state: RunState, opened: Sequence[Path], runs: Path, words: Words, mark: Mark) -> str:
    name, path = name_of(state.folder, runs), escape(str(state.folder))
    place = opened.index(state.folder) + 1 if state.folder in opened else 0
    what = " · ".join(part for part in (mark.name and name, state.model, state.precision) if part)
    why = _why(ending(state, words)) if state.state in ("died", "unreadable") else ""
    if state.place:
        why = _sub(_waits_for(state, runs, words))
    tick = (
        f'<input type="checkbox" id="tick-{path}" data-act="tick" data-run="{path}" '
        f'class="{f"l{place}" if place else ""}" {"checked" if place else ""} '
        f'aria-label="{escape(words("runs.show", name=name))}">'
    )
    pin = f'<span class="pin" title="{escape(words("runs.pinned"))}">★</span> ' if mark.pinned else ""
    tags = "".join(f'<span class="tag">{escape(tag)}</span>' for tag in mark.tags)
    left = "" if state.seconds_left is None else clock(state.seconds_left)
    cells = [
        f"<td>{tick}</td>",
        f'<td>{pin}<button class="name" id="open-{path}" data-act="open" data-run="{path}">'
        f"{escape(mark.name or name)}</button>{tags}{_sub(what)}{why}</td>",
        f"<td>{_badge(state, words)}</td>",
        f'<td class="how">{_bar(state) if state.live else ""}{_sub(_steps(state, runs, words))}</td>',
        f'<td class="n quiet">{_loss(state, words)}</td>',
        f'<td class="n quiet">{escape(left)}</td>',
        f'<td class="quiet">{_when(state.began)}</td>',
    ]
    return f'<tr class="{"open" if place else ""}">{"".join(cells)}</tr>'


def _waits_for(state: RunState, runs: Path, words: Words) -> str:
    """Its place in the queue, and the run before it."""
    if state.behind is None:
        return words("runs.place", n=state.place)
    return words("runs.place_behind", n=state.place, name=name_of(state.behind, runs))


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
) -> str:
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
    mark = mark or Mark()
    name = name_of(Path(output), Path.cwd()) if output else name_of(state.folder, runs)
    acts = f'<span class="acts">{_acts(state, name, words, mark, export=bool(output))}</span>'
    parts = [f"<header><h3>{escape(mark.name or name)}</h3>{_badge(state, words)}{acts}</header>"]
    if reason := ending(state, words):
        calm = " calm" if state.state == "stopped" else ""
        parts.append(f'<p class="cause{calm}">{escape(reason)}</p>')
    if state.live:
        parts.append(_bar(state))
    parts.append(f'<div class="facts">{_facts(state, output or str(state.folder), runs, words)}</div>')
    parts += [f'<p class="note">{escape(mark.note)}</p>'] if mark.note else []
    parts += [f'<p class="alarm" role="alert">{escape(_alarm(alarm, words))}</p>' for alarm in alarms]
    if state.casts:
        parts.append(f'<p class="alarm">{escape(words("runs.casts", n=f"{state.casts:,}"))}</p>')
    parts.append(more)
    if log:
        key = escape(f"log {state.folder}")
        opened = " open" if state.state == "died" or output else ""  # an export says there what was checked
        text = f'<pre data-keep="{key} text" tabindex="0">{escape(log)}</pre>'
        summary = f"<summary>{escape(words('runs.log'))}</summary>"
        parts.append(f'<details data-keep="{key}"{opened}>{summary}{text}</details>')
    return f'<section class="card" data-card="{escape(str(state.folder))}">{"".join(parts)}</section>'


def command_line(command: str, words: Words) -> str:
    """A command of the command line, with a button that copies it."""
    label = escape(words("runs.command"))
    copy = f'<button type="button" data-copy="{escape(command)}">{escape(words("runs.copy"))}</button>'
    return f'<div class="command"><span>{label}</span><code>{escape(command)}</code>{copy}</div>'


def ending(state: RunState, words: Words) -> str:
    """Why a run ended, or cannot be read; empty where nothing is to be said."""
    if state.end == "crashed":
        return words("runs.end.crashed", signal=state.cause)
    if state.end:
        return "\n".join(part for part in (words(f"runs.end.{state.end}"), state.cause) if part)
    return state.cause


def _badge(state: RunState, words: Words) -> str:
    return f'<span class="state {state.state}">{escape(words(f"runs.states.{state.state}"))}</span>'


def _bar(state: RunState) -> str:
    if not state.total:
        return '<div class="progress unknown"><i></i></div>'
    share = min(1.0, state.step / state.total)
    edges = f'aria-valuenow="{state.step}" aria-valuemin="0" aria-valuemax="{state.total}"'
    return f'<div class="progress" role="progressbar" {edges}><i style="width:{share:.1%}"></i></div>'


def _sub(text: str) -> str:
    return f'<span class="sub">{escape(text)}</span>'


def _why(reason: str) -> str:
    """Its first line; the card says all."""
    line = reason.partition("\n")[0]
    return f'<span class="sub why" title="{escape(reason)}">{escape(line)}</span>'


def _steps(state: RunState, runs: Path, words: Words) -> str:
    parts = []
    if state.live and state.phase:
        parts.append(_phase(state, runs, words))
    if state.step or state.total:
        parts.append(f"{state.step:,}" + (f" / {state.total:,}" if state.total else ""))
    return " · ".join(parts)


def _phase(state: RunState, runs: Path, words: Words) -> str:
    """A phase in words; one that another version of halftune wrote stands as it is."""
    if state.first is not None:
        return words("runs.first", name=name_of(state.first, runs))
    return words.table.get(f"runs.phases.{state.phase}", state.phase)


def _facts(state: RunState, folder: str, runs: Path, words: Words) -> str:
    facts = [("phase", _phase(state, runs, words) if state.live and state.phase else "")]
    facts += [("queue", _waits_for(state, runs, words))] if state.place else []
    if state.step or state.total:
        facts.append(("step", f"{state.step:,}" + (f" / {state.total:,}" if state.total else "")))
    facts += [
        ("left", "" if state.seconds_left is None else clock(state.seconds_left)),
        ("loss", _loss(state, words)),
        ("model", state.model),
        ("precision", state.precision),
        ("host", state.host),
        ("started", _when(state.began)),
        ("folder", folder),
    ]
    shown = [
        f"<div><span>{escape(words(f'runs.{name}'))}</span> <b>{escape(text)}</b></div>" for name, text in facts if text
    ]
    return "".join(shown)


def _loss(state: RunState, words: Words) -> str:
    if state.loss is None:
        return ""
    return f"{state.loss:.4g}" if math.isfinite(state.loss) else escape(words("runs.no_number"))


def _alarm(alarm: Alarm, words: Words) -> str:
    return words(f"runs.alarms.{alarm.kind}", step=f"{alarm.step:,}", n=f"{alarm.count:,}")


def _acts(state: RunState, name: str, words: Words, mark: Mark, *, export: bool) -> str:
    acts: list[tuple[str, str, str]] = []  # what, label, question
    if state.state == "queued":
        acts += [("now", "now", ""), ("stop", "unqueue", "")]
    if state.live and not state.host:
        twice = state.state == "stopping"
        what = "stop_at_once" if twice else "stop"
        acts.append((what, what, words("runs.ask_stop_at_once") if twice else ""))
    if state.state in ("stopped", "died") and not export:
        acts.append(("resume", "resume", ""))
    if state.state == "finished" and not export and (state.folder / FINAL).is_dir():
        acts += [("chat", "chat", ""), ("export", "export", "")]
    if not export:
        acts.append(("edit", "edit", ""))
    if (state.folder / REPORT).is_file():
        acts.append(("report", "report", ""))
    if not export:
        acts.append(("pin", "unpin" if mark.pinned else "pin", ""))
    if not state.live and state.state != "queued":
        label = "forget" if export else "delete"
        acts.append(("delete", label, words(f"runs.ask_{label}", name=name)))
    path = escape(str(state.folder))
    bad = ("stop", "stop_at_once", "delete")
    return "".join(
        f'<button id="{act}-{path}" data-act="{act}" data-run="{path}" class="{"bad" if act in bad else ""}"'
        f"{f' data-ask={_quoted(question)}' if question else ''}>{escape(words(f'runs.acts.{label}'))}</button>"
        for act, label, question in acts
    )


def _quoted(text: str) -> str:
    return f'"{escape(text)}"'


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if moment else ""
