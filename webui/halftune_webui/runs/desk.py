"""What a page shows of the runs and does to them, without the page: one desk per board, one view per page."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from pathlib import Path

from halftune.core.errors import HalftuneError
from halftune_webui.labels import Words
from halftune_webui.paths import inside
from halftune_webui.recipe import examine
from halftune_webui.runs import launch, queue
from halftune_webui.runs.curves import chart
from halftune_webui.runs.listing import Listing
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.metrics import COLUMNS, Metrics
from halftune_webui.runs.show import REPORT, name_of, run_card, run_list
from halftune_webui.runs.state import RunState
from halftune_webui.settings import Settings

AREAS = ("list", "cards", "curves")
MOST = 6  # runs that are open at once, as many as there are colours
# The report may be anybody's: it runs nothing, and asks no server for anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_SMOOTH = ("loss", "grad_norm", "tokens_per_second")


class Desk:
    """What all pages of one board share: the list and the metrics, each remembering what it has read."""

    def __init__(self, settings: Settings, words: Words) -> None:
        self.settings, self.words = settings, words
        self.listing = Listing(settings.runs)
        self.metrics: dict[Path, Metrics] = {}
        self.lock = threading.Lock()  # pages ask at the same time

    def states(self) -> list[RunState]:
        """Every run, after the queue has had its turn."""
        runs = self.settings.runs
        with self.lock:
            queue.start_next(self.settings)
            return self.listing.look(queue.waiting(runs))

    def read(self, run: Path) -> Metrics:
        """A run's metrics, up to now."""
        with self.lock:
            metrics = self.metrics.setdefault(run, Metrics(run))
            metrics.update()
            return metrics

    def forget(self, opened: Sequence[Path]) -> None:
        """Lets go of the metrics of runs that are gone."""
        with self.lock:
            for run in [run for run in self.metrics if run not in opened and not run.is_dir()]:
                del self.metrics[run]


@dataclass
class View:
    """What one page shows.

    Attributes:
        opened: runs that are open, in the order of their colours.
        sent: digest of what each of ``AREAS`` was sent last.
        turn: counts what the reader did. A look at the disk that began before is out of date, and is not sent.
    """

    opened: list[Path] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    turn: int = 0

    def show(self, runs: list[Path]) -> None:
        """The reader wants to see these runs."""
        self.turn += 1
        self.opened = runs


def first(states: Sequence[RunState]) -> list[Path]:
    """What a new page opens: what is running now, else the latest run."""
    return [state.folder for state in states if state.live][:MOST] or [state.folder for state in states[:1]]


def refresh(desk: Desk, view: View) -> list[str | None]:
    """Each of ``AREAS`` as HTML or JSON; None for one that shows the same as before."""
    turn, states = view.turn, {state.folder: state for state in desk.states()}
    if not view.turn and not view.opened:  # a run that was started elsewhere opens on a page that had none to show
        view.opened = first(list(states.values()))
    opened = [run for run in view.opened if run in states]
    runs, words = desk.settings.runs, desk.words
    desk.forget(opened)
    metrics = {run: desk.read(run) for run in opened}
    cards = [run_card(states[run], metrics[run].alarms, log_tail(run), runs, words) for run in opened]
    areas = (run_list(list(states.values()), opened, runs, words), "".join(cards), _curves(metrics, runs))
    if view.turn != turn:  # the reader has opened something else meanwhile, and been answered
        return [None for _ in AREAS]
    marks = {name: sha256(text.encode()).hexdigest() for name, text in zip(AREAS, areas, strict=True)}
    before, view.sent = view.sent, marks
    return [text if marks[name] != before.get(name) else None for name, text in zip(AREAS, areas, strict=True)]


def _curves(metrics: dict[Path, Metrics], runs: Path) -> str:
    named = [(name_of(run, runs), one) for run, one in metrics.items()]
    charts = [
        chart(column, [(name, one.series[column]) for name, one in named], smooth=column in _SMOOTH)
        for column in COLUMNS
    ]
    return json.dumps({"runs": [name for name, _ in named], "charts": [one for one in charts if one["lines"]]})


def start(desk: Desk, view: View, text: str) -> str:
    """Starts a recipe, or puts it into the queue where something runs already, and opens it; what is to be said.

    Raises:
        HalftuneError: it cannot be started; at most three of its problems.
    """
    examined = examine(text, desk.settings)
    if examined.problems:
        raise HalftuneError("\n".join(map(desk.words.problem, examined.problems[:3])))
    # through the queue, which one page at a time can change: two pages start two runs one after the other
    run = launch.start(desk.settings, examined.runnable, wait=True)
    view.show([run])
    busy = run in queue.waiting(desk.settings.runs)
    return desk.words("runs.waits" if busy else "runs.begins", name=name_of(run, desk.settings.runs))


def act(desk: Desk, view: View, what: str, name: str, on: bool) -> str | None:
    """Does what a button of the list, a card or the report says.

    Args:
        desk: of the board.
        view: of the page.
        what: ``open``, ``tick``, ``report``, ``close``, ``stop``, ``stop_at_once``, ``resume``, ``now``
            or ``delete``.
        name: path of the run, as the browser sent it.
        on: whether a tick was set.

    Returns:
        what the report's area shows from now on; None: as before.

    Raises:
        HalftuneError: it cannot be done, there is no such run, or no such button.
    """
    doing: dict[str, Callable[[Path], None]] = {
        "open": lambda run: view.show([run]),
        "tick": lambda run: view.show(([*_without(view, run), run] if on else _without(view, run))[-MOST:]),
        "stop": lambda run: launch.stop(desk.settings, run),
        "stop_at_once": lambda run: launch.stop(desk.settings, run, at_once=True),
        "resume": lambda run: launch.resume(desk.settings, run),
        "now": lambda run: launch.start_now(desk.settings, run),
        "delete": lambda run: launch.delete(desk.settings, run),
    }
    if what == "close":
        return ""
    run = launch.find(desk.settings, name)
    if what == "report":
        return _report(desk, run)
    if what not in doing:
        raise HalftuneError("the board has no such button", where=what)
    doing[what](run)
    return None


def _without(view: View, run: Path) -> list[Path]:
    return [one for one in view.opened if one != run]


def _report(desk: Desk, run: Path) -> str:
    """A run's report in a frame of its own, which runs no script."""
    try:
        page = inside(desk.settings.roots, str(run / REPORT)).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise HalftuneError(f"cannot be read: {error.strerror}", where=REPORT) from error
    title, close = escape(f"{name_of(run, desk.settings.runs)} · {REPORT}"), escape(desk.words("runs.acts.close"))
    head = f'<header><h3>{title}</h3><span class="acts"><button data-act="close">{close}</button></span></header>'
    page = page.replace('href="#', 'href="about:srcdoc#')  # in the frame, # alone is a place of the board
    alone = escape(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{page}')
    frame = f'<iframe sandbox title="{title}" srcdoc="{alone}"></iframe>'
    return f'<section class="card" data-show="{title}">{head}{frame}</section>'
