"""What a page shows of the runs and does to them, without the page: one controller per web UI, one view per page."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from markupsafe import Markup

from halftune.core.errors import HalftuneError
from halftune.core.files import read_text
from halftune.train.report.series import script_source
from halftune_webui.html import render
from halftune_webui.labels import Words
from halftune_webui.recipes.recipe import examine
from halftune_webui.recipes.yaml_edit import set_value
from halftune_webui.runs import queue, start_stop
from halftune_webui.runs.before_start import obstacles
from halftune_webui.runs.listing import Listing
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.state import FINAL, LIVE, RunState
from halftune_webui.runs.stored import recipe_of
from halftune_webui.runs.view.details import details, differences
from halftune_webui.runs.view.gpus import Gpus, gpu_view
from halftune_webui.runs.view.marks import Marks
from halftune_webui.runs.view.metrics import Metrics
from halftune_webui.runs.view.show import REPORT, Mark, name_of, run_card, run_list
from halftune_webui.runs.waiting import waiting
from halftune_webui.settings import Settings

AREAS = ("list", "cards", "curves", "gpus")
MOST = 6  # runs whose cards and curves are shown at once, as many as there are colours
PAGE = 50  # runs that the list shows, and shows more
# Which states a choice of the list stands for; every state where it is not in here.
FILTERS: dict[str, tuple[str, ...]] = {
    "live": LIVE,
    "queued": ("queued",),
    "finished": ("finished",),
    "stopped": ("stopped",),
    "died": ("died", "unreadable"),
}
# The report may be anybody's: it runs no script but that of the curves, and asks no server for anything.
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; script-src {script_source()}"


class RunsController:
    """What all pages of one web UI share: the list and the metrics, each remembering what it has read.

    Args:
        settings: limits of the web UI.
        words: the labels.
        listing: of the runs; one of its own by default.
        fresh: seconds for which one look at the disk serves every page.
    """

    def __init__(self, settings: Settings, words: Words, listing: Listing | None = None, fresh: float = 0.0) -> None:
        self.settings, self.words, self.fresh = settings, words, fresh
        self.listing, self.marks, self.gpus = listing or Listing(settings.runs), Marks(settings.runs), Gpus()
        self.metrics: dict[Path, Metrics] = {}
        self.lock = threading.Lock()  # pages ask at the same time
        self._states: list[RunState] = []
        self._looked = -math.inf

    def states(self) -> list[RunState]:
        """Every run, after the queue has had its turn."""
        runs = self.settings.runs
        with self.lock:
            if time.monotonic() - self._looked < self.fresh:
                return self._states
            states = self.listing.look(waits := waiting(runs))
            if waits and not any(state.live for state in states):
                queue.start_next(self.settings)
                states = self.listing.look(waiting(runs))
            self._states, self._looked = states, time.monotonic()
            return states

    def look_again(self) -> None:
        """Something was done: the next look is at the disk."""
        with self.lock:
            self._looked = -math.inf

    def read(self, run: Path) -> Metrics:
        """A run's metrics, up to now."""
        with self.lock:
            metrics = self.metrics.setdefault(run, Metrics(run))
            metrics.update()
            return metrics

    def curves(self, metrics: dict[Path, Metrics]) -> str:
        """The charts of these runs as JSON; only a run that has new numbers is drawn again."""
        drawn = {(name := name_of(run, self.settings.runs)): one.drawn(name) for run, one in metrics.items()}
        charts = []
        for column in dict.fromkeys(name for lines, _ in drawn.values() for name in lines):
            found = ", ".join(lines[column] for lines, _ in drawn.values() if column in lines)
            charts.append(f'{{"name": {json.dumps(column)}, "lines": [{found}]}}')
        scales = ", ".join(f"{json.dumps(name)}: {scale}" for name, (_, scale) in drawn.items())
        return f'{{"runs": {json.dumps(list(drawn))}, "charts": [{", ".join(charts)}], "scales": {{{scales}}}}}'

    def forget(self, opened: Sequence[Path]) -> None:
        """Lets go of the metrics of runs that are gone."""
        with self.lock:
            for run in [run for run in self.metrics if run not in opened and not run.is_dir()]:
                del self.metrics[run]


@dataclass
class View:
    """What one page shows.

    Attributes:
        opened: runs that are ticked, the latest last; cards and curves of the last ``MOST`` are shown.
        sent: digest of what each of ``AREAS`` was sent last.
        turn: counts what the reader did. A look at the disk that began before is out of date, and is not sent.
        query: text that listed runs have in their name, model, tags or note.
        state: one of ``FILTERS``, or empty for all.
        limit: how many runs are listed.
    """

    opened: list[Path] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    turn: int = 0
    query: str = ""
    state: str = ""
    limit: int = PAGE

    def show(self, runs: list[Path]) -> None:
        """The reader wants to see these runs."""
        self.turn += 1
        self.opened = runs

    def restore(self, runs: list[Path]) -> None:
        """The address of a page that was loaded again keeps these runs; no run where it keeps none."""
        if runs:
            self.show(runs[:MOST])

    def search(self, query: str, state: str) -> None:
        """The reader wants to see the runs of a kind in the list."""
        self.turn += 1
        self.query, self.state, self.limit = query.strip().lower(), state, PAGE

    def more(self) -> None:
        """The reader wants to see more of the list."""
        self.turn += 1
        self.limit += PAGE


def first(states: Sequence[RunState]) -> list[Path]:
    """What a new page opens: what is running now, else the latest run."""
    return [state.folder for state in states if state.live][:MOST] or [state.folder for state in states[:1]]


def matching(controller: RunsController, view: View, states: Sequence[RunState]) -> list[RunState]:
    """The runs that the reader asks for, pinned ones first."""
    said, runs = controller.marks.all(), controller.settings.runs
    if kinds := FILTERS.get(view.state):
        states = [state for state in states if state.state in kinds]
    if view.query:
        states = [state for state in states if view.query in _searched(state, said, runs)]
    pinned = {name for name, mark in said.items() if mark.pinned}
    return sorted(states, key=lambda state: name_of(state.folder, runs) not in pinned) if pinned else list(states)


def _searched(state: RunState, said: dict[str, Mark], runs: Path) -> str:
    name = name_of(state.folder, runs)
    mark = said.get(name, Mark())
    return "\n".join((name, state.model, mark.name, *mark.tags, mark.note)).lower()


def refresh(controller: RunsController, view: View) -> list[str | None]:
    """Each of ``AREAS`` as HTML or JSON; None for one that shows the same as before."""
    turn, states = view.turn, {state.folder: state for state in controller.states()}
    if not view.turn and not view.opened:  # a run that was started elsewhere opens on a page that had none to show
        view.opened = first(list(states.values()))
    ticked = [run for run in view.opened if run in states]
    opened, runs, words, marks = ticked[-MOST:], controller.settings.runs, controller.words, controller.marks
    controller.forget(opened)
    metrics = {run: controller.read(run) for run in opened}
    found = matching(controller, view, list(states.values()))
    many = {"total": len(found) or len(states), "ticked": len(ticked)}
    areas = (
        run_list(found[: view.limit], opened, runs, words, mark=marks.of, **many),
        _cards(controller, {run: states[run] for run in opened}, metrics),
        controller.curves(metrics),
        gpu_view(controller.gpus.look(), words),
    )
    if view.turn != turn:  # the reader has opened something else meanwhile, and been answered
        return [None] * len(AREAS)
    return _unsent(view, areas)


def _unsent(view: View, areas: Sequence[str]) -> list[str | None]:
    """The areas that differ from what the page has been sent."""
    digests = {name: sha256(text.encode()).hexdigest() for name, text in zip(AREAS, areas, strict=True)}
    before, view.sent = view.sent, digests
    return [text if digests[name] != before.get(name) else None for name, text in zip(AREAS, areas, strict=True)]


def _cards(controller: RunsController, states: Mapping[Path, RunState], metrics: Mapping[Path, Metrics]) -> str:
    """How the runs differ, and a card for each."""
    settings, words, marks = controller.settings, controller.words, controller.marks
    cards = [differences(list(states), settings, words)]
    for run, state in states.items():
        mark, alarms = marks.of(run), metrics[run].alarms
        more = details(run, mark, words, served=state.state == "finished" and (run / FINAL).is_dir())
        cards.append(run_card(state, alarms, log_tail(run), settings.runs, words, mark=mark, more=more))
    return "".join(cards)


def start(controller: RunsController, view: View, text: str) -> str:
    """Starts a recipe, or puts it into the queue where something runs already, and opens it; what is to be said.

    Raises:
        HalftuneError: it cannot be started; at most three of its problems.
    """
    examined = examine(text, controller.settings)
    if problems := (*examined.problems, *obstacles(examined, controller.settings)):
        raise HalftuneError("\n".join(map(controller.words.problem, problems[:3])), code=problems[0].code)
    # through the queue, which one page at a time can change: two pages start two runs one after the other
    run = start_stop.start(controller.settings, examined.runnable, wait=True)
    view.show([run])
    controller.look_again()
    busy = run in waiting(controller.settings.runs)
    return controller.words("runs.waits" if busy else "runs.begins", name=name_of(run, controller.settings.runs))


@dataclass(frozen=True)
class Done:
    """What the page does after a button.

    Attributes:
        report: what the report's area shows from now on; None: as before.
        tab: the tab to open; empty for the one that is open.
        run: the run to choose there.
        recipe: the text for the form; None: as it is.
        said: a sentence for the reader.
    """

    report: str | None = None
    tab: str = ""
    run: Path | None = None
    recipe: str | None = None
    said: str = ""


def act(controller: RunsController, view: View, what: str, name: str, on: bool, text: str = "") -> Done:
    """Does what a button of the list, a card or the report says.

    Args:
        controller: of the web UI.
        view: of the page.
        what: the button.
        name: path of the run, as the browser sent it.
        on: whether a tick was set.
        text: what was written into a form.

    Raises:
        HalftuneError: it cannot be done, there is no such run, or no such button.
    """
    alone: dict[str, Callable[[], Done]] = {
        "close": lambda: Done(report=""),
        "more": lambda: _only(view.more()),
        "untick": lambda: _only(view.show([])),
        "delete_ticked": lambda: _delete_ticked(controller, view),
    }
    if what in alone:
        return alone[what]()
    run = start_stop.find(controller.settings, name)
    settings = controller.settings
    doing: dict[str, Callable[[], Done | None]] = {
        "open": lambda: view.show([run]),
        "tick": lambda: view.show([*_without(view, run), run] if on else _without(view, run)),
        "stop": lambda: start_stop.stop(settings, run),
        "stop_at_once": lambda: start_stop.stop(settings, run, at_once=True),
        "resume": lambda: start_stop.resume(settings, run),
        "now": lambda: start_stop.start_now(settings, run),
        "delete": lambda: _delete(controller, run),
        "pin": lambda: controller.marks.pin(run),
        "mark": lambda: controller.marks.say(run, text),
        "report": lambda: Done(report=_report(controller, run)),
        "edit": lambda: Done(tab="train", recipe=_again(settings, run)),
        **{tab: (lambda tab=tab: Done(tab=tab, run=run)) for tab in ("chat", "evaluate", "export")},
    }
    if what not in doing:
        raise HalftuneError("the web UI has no such button", where=what, code="core.unknown_name")
    done = doing[what]()
    controller.look_again()
    return done or Done()


def _only(_: None) -> Done:
    return Done()


def _again(settings: Settings, run: Path) -> str:
    """A run's recipe for another try, into its own folder where nothing was trained in there."""
    text = recipe_of(run)
    folder = start_stop.free_beside(run) if start_stop.is_in_use(settings, run) else run
    return set_value(text, ("training", "output_dir"), name_of(folder, settings.roots[0]))


def _delete(controller: RunsController, run: Path) -> None:
    start_stop.delete(controller.settings, run)
    controller.marks.forget(run)


def _delete_ticked(controller: RunsController, view: View) -> Done:
    """Deletes what is ticked and does not work; says how many are left."""
    left = []
    for run in view.opened:
        try:
            _delete(controller, start_stop.find(controller.settings, str(run)))
        except HalftuneError:
            left.append(run)
    view.show([run for run in left if run.is_dir()])
    controller.look_again()
    return Done(said=controller.words("runs.not_deleted", n=len(view.opened)) if view.opened else "")


def _without(view: View, run: Path) -> list[Path]:
    return [one for one in view.opened if one != run]


def _report(controller: RunsController, run: Path) -> str:
    """A run's report in a frame of its own, which reaches nothing of this page."""
    try:
        page = read_text(run / REPORT)
    except OSError as error:
        raise HalftuneError(f"cannot be read: {error.strerror}", where=REPORT, code="core.unreadable") from error
    page = page.replace('href="#', 'href="about:srcdoc#')  # in the frame, # alone is a place of the web UI
    policy = Markup('<meta http-equiv="Content-Security-Policy" content="{}">').format(_POLICY)
    title = f"{name_of(run, controller.settings.runs)} · {REPORT}"
    return render("report_frame", title=title, page=f"<!doctype html>{policy}{page}", words=controller.words)
