"""The Runs tab: every run on the disk, what the open ones do, their curves; starts what the Train tab has written."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.core.errors import HalftuneError
from halftune_webui.context import Context
from halftune_webui.paths import inside
from halftune_webui.recipe import examine
from halftune_webui.runs import launch, queue
from halftune_webui.runs.curves import chart
from halftune_webui.runs.listing import Listing
from halftune_webui.runs.log_tail import log_tail
from halftune_webui.runs.metrics import COLUMNS, Metrics
from halftune_webui.runs.show import REPORT, name_of, run_card, run_list
from halftune_webui.runs.state import RunState

EVERY = 1.5  # seconds between two looks at the disk
MOST = 6  # runs that are open at once, as many as there are colours
# The report may be anybody's: it runs nothing, and asks no server for anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_SMOOTH = ("loss", "grad_norm", "tokens_per_second")
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


class Desk:
    """What all pages of one board share: the list and the metrics, each remembering what it has read."""

    def __init__(self, context: Context) -> None:
        self.settings, self.words = context.settings, context.words
        self.listing = Listing(context.settings.runs)
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


def live(elem_id: str) -> gr.HTML:
    """An area of HTML that keeps scrolling and folding when it is written anew; ``submit`` tells of its buttons."""
    script = files("halftune_webui").joinpath("assets", "live.js").read_text(encoding="utf-8")
    return gr.HTML(html_template='<div class="ht-live"></div>', js_on_load=script, elem_id=elem_id)


def build(context: Context) -> None:
    """The list, the open runs, their curves, a report."""
    desk, words = Desk(context), context.words
    opened, sent = gr.State([]), gr.State({})
    listed, cards = live("run-list"), live("run-cards")
    curves = gr.HTML(
        html_template='<div class="ht-charts"></div>',
        js_on_load=files("halftune_webui").joinpath("assets", "charts.js").read_text(encoding="utf-8"),
        elem_id="curves",
        words=json.dumps(words.below("curves")),
    )
    report = live("run-report")
    outputs = [opened, sent, listed, cards, curves]

    def refresh(paths: list[str], before: dict[str, str]) -> tuple[Any, ...]:
        return _refresh(desk, paths, before)

    def acted(paths: list[str], before: dict[str, str], event: gr.EventData) -> tuple[Any, ...]:
        paths, shown = _act(desk, paths, event.act, event.run, bool(event._data.get("on")))
        return (*_refresh(desk, paths, before), shown)

    def started(text: str, before: dict[str, str]) -> tuple[Any, ...]:
        run = _start(desk, text)
        if run is None:
            return gr.skip(), *(gr.skip() for _ in outputs)
        return gr.Tabs(selected="runs"), *_refresh(desk, [str(run)], before)

    timer = gr.Timer(EVERY)
    timer.tick(refresh, [opened, sent], outputs, **_QUIET)
    for area in (listed, cards, report):
        area.submit(acted, [opened, sent], [*outputs, report], **_QUIET)
    context.start.click(started, [context.recipe, sent], [context.tabs, *outputs], **_QUIET)
    board = Blocks.root_block
    assert board is not None
    board.load(lambda: _refresh(desk, _first(desk), {}), None, outputs, **_QUIET)


def _first(desk: Desk) -> list[str]:
    """What a new page opens: what is running now, else the latest run."""
    states = desk.states()
    living = [str(state.folder) for state in states if state.live]
    return living[:MOST] or [str(state.folder) for state in states[:1]]


def _refresh(desk: Desk, paths: list[str], before: dict[str, str]) -> tuple[Any, ...]:
    """Open runs, what has been sent, and the areas; those that show the same as before are not sent again."""
    states = {state.folder: state for state in desk.states()}
    opened = [run for run in map(Path, paths) if run in states]
    runs, words = desk.settings.runs, desk.words
    desk.forget(opened)
    metrics = {run: desk.read(run) for run in opened}
    cards = [run_card(states[run], metrics[run].alarms, log_tail(run), runs, words) for run in opened]
    areas = {
        "list": run_list(list(states.values()), opened, runs, words),
        "cards": "".join(cards),
        "curves": _curves(metrics, runs),
    }
    marks = {name: sha256(text.encode()).hexdigest() for name, text in areas.items()}
    changed = [areas[name] if marks[name] != before.get(name) else gr.skip() for name in areas]
    return [str(run) for run in opened], marks, *changed


def _curves(metrics: dict[Path, Metrics], runs: Path) -> str:
    named = [(name_of(run, runs), one) for run, one in metrics.items()]
    charts = [
        chart(column, [(name, one.series[column]) for name, one in named], smooth=column in _SMOOTH)
        for column in COLUMNS
    ]
    return json.dumps({"runs": [name for name, _ in named], "charts": [one for one in charts if one["lines"]]})


def _start(desk: Desk, text: str) -> Path | None:
    """Starts the recipe of the Train tab; where something runs already, it waits for its turn."""
    examined = examine(text or "", desk.settings)
    if examined.problems:
        gr.Warning(escape("\n".join(map(str, examined.problems[:3]))))
        return None
    try:  # through the queue, which one page at a time can change: two pages start two runs one after the other
        run = launch.start(desk.settings, examined.runnable, wait=True)
    except HalftuneError as error:
        gr.Warning(escape(str(error)))
        return None
    busy = run in queue.waiting(desk.settings.runs)
    gr.Info(escape(desk.words("runs.waits" if busy else "runs.begins", name=name_of(run, desk.settings.runs))))
    return run


def _act(desk: Desk, paths: list[str], act: str, name: str, on: bool) -> tuple[list[str], Any]:
    """Does what a button says; the runs that are open afterwards, and what the report area shows."""
    if act == "close":
        return paths, ""
    if act == "open":
        return [name], ""
    if act == "tick":
        others = [path for path in paths if path != name]
        return ([*others, name] if on else others)[-MOST:], gr.skip()
    doing: dict[str, Callable[[Path], None]] = {
        "stop": lambda run: launch.stop(desk.settings, run),
        "resume": lambda run: launch.resume(desk.settings, run),
        "now": lambda run: launch.start_now(desk.settings, run),
        "delete": lambda run: launch.delete(desk.settings, run),
    }
    try:
        run = launch.find(desk.settings, name)
        if act == "report":
            return paths, _report(desk, run)
        doing[act](run)
    except HalftuneError as error:
        gr.Warning(escape(str(error)))
    return paths, gr.skip()


def _report(desk: Desk, run: Path) -> str:
    """A run's report in a frame of its own, which runs no script."""
    try:
        page = inside(desk.settings.roots, str(run / REPORT)).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        gr.Warning(escape(f"{REPORT}: {error.strerror}"))
        return ""
    title, close = escape(f"{name_of(run, desk.settings.runs)} · {REPORT}"), escape(desk.words("runs.acts.close"))
    head = f'<header><h3>{title}</h3><span class="acts"><button data-act="close">{close}</button></span></header>'
    alone = escape(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">{page}')
    return f'<section class="card">{head}<iframe sandbox title="{title}" srcdoc="{alone}"></iframe></section>'
