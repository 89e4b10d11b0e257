"""``report.html``: one self-contained page from the files of a run folder.

Written after every evaluation and at the end, also of a run that was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeVar

from jinja2 import TemplateError
from markupsafe import Markup

from halftune.core.atomic import write_text
from halftune.core.files import read_text
from halftune.core.log import get_logger
from halftune.core.manifest import entry
from halftune.core.status import NAME as STATUS
from halftune.core.status import finish
from halftune.core.templates import render
from halftune.train.callback import Callback
from halftune.train.report.decisions import decisions, dtypes
from halftune.train.report.series import HERE, Record, curves, read
from halftune.train.report.summary import cards, dataset, machine, profile, sentence
from halftune.train.state import TrainState

log = get_logger(__name__)
NAME = "report.html"
_T = TypeVar("_T")


class Report(Callback):
    """Comes last: it reads what the other callbacks have written."""

    watches = True

    def on_evaluate(self, run: TrainState, metrics: dict[str, float]) -> None:
        """The report so far."""
        self._write(run, Status("running", f"step {run.step:,} of {run.total_steps:,}"))

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """The whole report."""
        if error is None:
            self._write(run, Status("finished", f"stopped early: {run.stop}" if run.stop else ""))
        else:
            self._write(run, Status("stopped", str(error) or type(error).__name__))

    def _write(self, run: TrainState, status: Status) -> None:
        if not run.is_main:
            return
        write_report(run.folder, status)


def answers(record: Record) -> Markup:
    """The section of samples: the model's answers before and after training, side by side."""
    return render(HERE, "samples", record=record) if record.samples else Markup()


def rollouts(record: Record) -> Markup:
    """The section of the answers that were rewarded in training."""
    return render(HERE, "rollouts", record=record) if record.rollouts else Markup()


# anchor, name in the navigation, title, content
_SECTIONS: tuple[tuple[str, str, str, Callable[[Record], Markup]], ...] = (
    ("curves", "Curves", "Curves", curves),
    ("samples", "Answers", "Answers before and after", answers),
    ("rollouts", "Rewards", "Rewarded answers", rollouts),
    ("data", "Data", "Data", dataset),
    ("plan", "Plan", "Plan", decisions),
    ("dtypes", "Dtypes", "Dtypes as they are", dtypes),
    ("profile", "Profile", "Profile", profile),
    ("environment", "Environment", "Environment", machine),
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
    text = str(page(read(folder), status, _end_of(folder) if status.word == "finished" else ""))
    write_text(folder / NAME, text.encode("utf-8", "replace").decode())  # JSON may hold half a surrogate pair
    return folder / NAME


def bring_up_to_date(folder: Path) -> None:
    """Writes the report, and the last status, of a finished run that was killed, or met a full disk, after its result.

    Needs no torch. That the report cannot be written is said, and nothing else.
    """
    report = folder / NAME
    try:
        if not report.exists() or f'content="{_end_of(folder)}"' not in read_text(report):
            write_report(folder)
    except OSError as error:
        log.warning("cannot write %s: %s", report, error.strerror)
    finish(folder / STATUS)


def _end_of(folder: Path) -> str:
    """A checksum of ``finished.json``, by which a page is known to tell of this end; empty while there is none."""
    path = folder / "finished.json"
    return entry(path)["sha256"] if path.is_file() else ""


def page(record: Record, status: Status, end: str) -> Markup:
    """The whole page; ``end`` is a checksum of the end that it tells of."""
    sections = [(anchor, name, title, _shown(build, title, record)) for anchor, name, title, build in _SECTIONS]
    here = files(HERE)
    style = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "charts.css"))
    return render(
        HERE,
        "page",
        record=record,
        status=status,
        end=end,
        sentence=_built(sentence, "summary", record) or "",
        cards=_built(cards, "numbers", record) or [],
        sections=[section for section in sections if section[-1]],
        style=Markup(style),
        moment=time.strftime("%d %B %Y at %H:%M"),
    )


def _shown(build: Callable[[Record], Markup], title: str, record: Record) -> Markup:
    """A section, or a line in its place where a file of the run folder does not have the form that it should have."""
    if (built := _built(build, title, record)) is not None:
        return built
    return Markup('<p class="bad">{}</p>').format("This section is left out: its files are not of the form expected.")


def _built(build: Callable[[Record], _T], title: str, record: Record) -> _T | None:
    """A part of the page; None where a file of the run folder does not have the form that it should have."""
    try:
        return build(record)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        log.warning("the report's section %s is left out: %s: %s", title, type(error).__name__, error)
        return None
