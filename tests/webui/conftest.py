"""One web UI for all tests, others for those that need their own, and a headless browser to look at them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from patience import LIMIT

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)


@dataclass
class WebUI:
    """A running ``halftune webui``.

    Attributes:
        url: its address.
        folder: its working directory; runs lie in ``folder / "runs"``.
        process: the server.
        terminal: what it prints there besides its address.
    """

    url: str
    folder: Path
    process: subprocess.Popen[str]
    terminal: Path

    def stop(self, how: int = signal.SIGTERM) -> None:
        """Ends the server; runs that it started go on."""
        self.process.send_signal(how)
        self.process.wait(LIMIT)


@contextmanager
def _web_uis(new_folder: Callable[[str], Path]) -> Iterator[Callable[..., WebUI]]:
    """A function that starts web UIs; they are stopped at the end."""
    pytest.importorskip("gradio", reason="the web UI's package is not installed")
    web_uis: list[WebUI] = []

    def start(*arguments: str, folder: Path | None = None, before: str = "", **variables: str) -> WebUI:
        folder = folder or new_folder("web_ui")
        program = ["-c", f"{before}\nfrom halftune.cli import main\nmain()"] if before else ["-m", "halftune"]
        command = [sys.executable, *program, "webui", "--port", "0", *arguments]
        environment = {**os.environ, "LANG": "C.UTF-8", **variables}
        terminal = new_folder("terminal") / "stderr.txt"
        with terminal.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        web_uis.append(WebUI("", folder, process, terminal))
        web_uis[-1].url = _address(process, terminal)
        return web_uis[-1]

    try:
        yield start
    finally:
        for web_ui in web_uis:
            if web_ui.process.poll() is None:
                web_ui.stop()
            print(web_ui.terminal.read_text(), file=sys.stderr)


@pytest.fixture(scope="module")
def start_web_ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., WebUI]]:
    """``start_web_ui(*arguments, folder=None, before="", **variables)`` → a web UI on a free port.

    It is stopped after the test file. ``before`` is Python that its process runs first.
    """
    with _web_uis(tmp_path_factory.mktemp) as start:
        yield start


def _address(process: subprocess.Popen[str], terminal: Path) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], LIMIT)
    line = process.stdout.readline() if ready else ""
    assert "http://" in line, f"the web UI did not start: {line!r}, exit code {process.poll()}, {terminal.read_text()}"
    return line.split()[-1]


@pytest.fixture(scope="session")
def web_ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    """The web UI that all tests share: each leaves it as it is, and writes files and runs under names of its own."""
    with _web_uis(tmp_path_factory.mktemp) as start:
        yield start()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium; skips where it, or playwright, is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"no browser: {CHROMIUM} is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=QUIET.split())
        yield chromium
        chromium.close()


@dataclass
class Seen:
    """What a page did besides showing itself.

    Attributes:
        requests: addresses that it asked for.
        errors: that it raised, or wrote to its console: Gradio writes those of a component's script there.
        expected: texts of errors that the test brings about.
    """

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """``open_page(url, width=1280, recipe="", before=None, **context)`` → a page in a browser that knows only a recipe.

    ``before(page)`` is called before the page is opened. After the test, by ``page.seen``: no request went anywhere but
    to the web UI, and there was no error but those expected.
    """
    contexts, pages = [], []

    def open_(
        url: str, width: int = 1280, recipe: str = "", before: Callable[[Any], object] | None = None, **options: Any
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * LIMIT)
        if recipe:  # as an earlier visit has left it; before the page's own scripts, which write there, too
            page.add_init_script(f"localStorage.setItem('halftune-recipe', {json.dumps(recipe)})")
        page.seen = seen = Seen()
        pages.append((url.partition("#")[0], seen))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
        if before:
            before(page)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    for url, seen in pages:
        outside = [request for request in seen.requests if not request.startswith((url, "blob:", "data:"))]
        assert not outside, f"the page asked other servers: {outside}"
        errors = [error for error in seen.errors if not any(text in error for text in seen.expected)]
        assert not errors, errors
