"""A web UI of its own per test file, and a headless browser to look at it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
START = 300  # seconds, on a machine that is busy with other tests
PATIENCE = 60_000  # milliseconds for whatever a page does by itself; what starts a process takes longer


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
        self.process.wait(60)


@pytest.fixture(scope="module")
def start_web_ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., WebUI]]:
    """``start_web_ui(*arguments, folder=None, before="", **variables)`` → a web UI on a free port.

    It is stopped after the test file. ``before`` is Python that its process runs first.
    """
    pytest.importorskip("gradio", reason="the web UI's package is not installed")
    web_uis: list[WebUI] = []

    def start(*arguments: str, folder: Path | None = None, before: str = "", **variables: str) -> WebUI:
        folder = folder or tmp_path_factory.mktemp("web_ui")
        program = ["-c", f"{before}\nfrom halftune.cli import main\nmain()"] if before else ["-m", "halftune"]
        command = [sys.executable, *program, "webui", "--port", "0", *arguments]
        environment = {**os.environ, "LANG": "C.UTF-8", **variables}
        terminal = tmp_path_factory.mktemp("terminal") / "stderr.txt"
        with terminal.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        web_uis.append(WebUI(_address(process, terminal), folder, process, terminal))
        return web_uis[-1]

    yield start
    for web_ui in web_uis:
        if web_ui.process.poll() is None:
            web_ui.stop()
        print(web_ui.terminal.read_text(), file=sys.stderr)


def _address(process: subprocess.Popen[str], terminal: Path) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START)
    line = process.stdout.readline() if ready else ""
    assert "http://" in line, f"the web UI did not start: {line!r}, exit code {process.poll()}, {terminal.read_text()}"
    return line.split()[-1]


@pytest.fixture(scope="module")
def web_ui(start_web_ui: Callable[..., WebUI]) -> WebUI:
    """A web UI in an empty folder."""
    return start_web_ui()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium; skips where it, or playwright, is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: {CHROMIUM} is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=QUIET.split())
        yield chromium
        chromium.close()


@dataclass
class Seen:
    """What a page did besides showing itself."""

    requests: list[str]
    errors: list[str]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """``open_page(url, width=1280, recipe="", **context)`` → a page of a browser that knows nothing yet but a recipe.

    After the test, by ``page.seen``: no request went anywhere but to the web UI, and the page raised no error.
    """
    contexts, pages = [], []

    def open_(url: str, width: int = 1280, recipe: str = "", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        page = context.new_page()
        if recipe:  # as an earlier visit has left it; before the page's own scripts, which write there, too
            page.add_init_script(f"localStorage.setItem('halftune-recipe', {json.dumps(recipe)})")
        seen = Seen([], [])
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        contexts.append(context)
        pages.append((url.partition("#")[0], seen))
        page.seen = seen
        page.set_default_timeout(PATIENCE)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    for url, seen in pages:
        outside = [request for request in seen.requests if not request.startswith((url, "blob:", "data:"))]
        assert not outside, f"the page asked other servers: {outside}"
        assert not seen.errors, seen.errors
