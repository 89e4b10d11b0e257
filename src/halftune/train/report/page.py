"""``report.html``: one page that needs nothing else, from the files of a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from halftune.core.atomic import write_text
from halftune.core.log import get_logger
from halftune.core.status import NAME as STATUS
from halftune.core.status import finish
from halftune.train.report.answers import answers
from halftune.train.report.curves import curves
from halftune.train.report.dataset import dataset
from halftune.train.report.decisions import decisions
from halftune.train.report.dtypes import dtypes
from halftune.train.report.html import Html, element, section
from halftune.train.report.machine import machine
from halftune.train.report.profile import profile
from halftune.train.report.record import Record, read
from halftune.train.report.summary import cards, sentence

log = get_logger(__name__)
NAME = "report.html"
_SECTIONS: tuple[tuple[str, str, Callable[[Record], Html]], ...] = (
    ("curves", "Curves", curves),
    ("samples", "Answers", answers),
    ("data", "Data", dataset),
    ("plan", "Plan", decisions),
    ("dtypes", "Dtypes", dtypes),
    ("profile", "Profile", profile),
    ("environment", "Environment", machine),
)


@dataclass(frozen=True)
class Status:
    """How a run stands; ``note`` is the error that stopped it, or what is worth saying."""

    word: Literal["running", "finished", "stopped", "unfinished"]
    note: str = ""


def write_report(folder: Path, status: Status | None = None) -> Path:
    """Writes ``folder/report.html``, completely or not at all, and returns its path.

    Args:
        folder: a run folder in any state; what is missing in it is left out of the page.
        status: how the run stands; by default as ``finished.json`` says.

    Raises:
        OSError: the page cannot be written.
    """
    if status is None:
        status = Status("finished" if (folder / "finished.json").exists() else "unfinished")
    write_text(folder / NAME, page(read(folder), status))
    return folder / NAME


def bring_up_to_date(folder: Path) -> None:
    """Writes the report, and the last status, of a finished run that was killed, or met a full disk, after its result.

    Needs no torch. That the report cannot be written is said, and nothing else.
    """
    report, finished = folder / NAME, folder / "finished.json"
    try:
        if not report.exists() or report.stat().st_mtime_ns < finished.stat().st_mtime_ns:
            write_report(folder)
    except OSError as error:
        log.warning("cannot write %s: %s", report, error.strerror)
    finish(folder / STATUS)


def page(record: Record, status: Status) -> Html:
    """The whole page."""
    parts = [(anchor, title, _shown(build, title, record)) for anchor, title, build in _SECTIONS]
    parts = [part for part in parts if part[2]]
    links = [element("a", title, href=f"#{anchor}") for anchor, title, _ in parts]
    style = files("halftune.train.report").joinpath("style.css").read_text(encoding="utf-8")
    head = element(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><meta name="generator" content="halftune">'),
        element("title", f"{record.name} · {status.word}"),
        Html(f"<style>{style}</style>"),
    )
    top = element(
        "header",
        element("p", "halftune run report", class_="over"),
        element("h1", record.name),
        element("p", sentence(record), class_="lead") if sentence(record) else None,
        _status(status),
        _unreadable(record),
        cards(record),
        element("nav", links, aria_label="Sections") if len(links) > 1 else None,
    )
    foot = element("footer", f"Written by halftune on {time.strftime('%d %B %Y at %H:%M')}")
    body = element("body", top, element("main", [part for _, _, part in parts]), foot)
    return Html("<!doctype html>\n" + element("html", head, body, lang="en"))


def _status(status: Status) -> Html:
    note = element("span", status.note) if status.note and status.word != "stopped" else None
    line = element("p", element("b", status.word), note, class_=f"status {status.word}")
    if status.word == "stopped" and status.note:
        return Html(line + element("pre", status.note, class_="error"))
    return line


def _unreadable(record: Record) -> Html:
    if not record.unreadable:
        return Html("")
    return element("p", f"Left out, because they cannot be read: {', '.join(record.unreadable)}.", class_="bad")


def _shown(build: Callable[[Record], Html], title: str, record: Record) -> Html:
    """A section, or a line in its place where a file of the run folder does not have the form that it should have."""
    try:
        return build(record)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        log.warning("the report's section %s is left out: %s: %s", title, type(error).__name__, error)
        words = f"This section is left out: its files are not of the form expected ({type(error).__name__}: {error})."
        return section(title.lower(), title, element("p", words, class_="bad"))
