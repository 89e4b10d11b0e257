"""What the board costs: from the command to the first page, and from a choice in the form to the new plan.

python scripts/bench/webui_page.py                       needs /usr/bin/chromium
python scripts/bench/webui_page.py --pages 4 --runs 1000  four pages that show the runs, and nothing else

CPU-seconds are those of the server, not of the browser. The wall time of a change runs from the choice to the
new plan on the screen, so it counts the browser, too, and whatever else the machine does; where that is much,
``chrt -r 1`` before the command (as root) shows what the page takes where nothing else wants the CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from webui_runs import make

CHROMIUM = "/usr/bin/chromium"
WORDS = ("fp32", "auto")
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="how often the board is started")
    parser.add_argument("--changes", type=int, default=20, help="how often the precision is changed")
    parser.add_argument("--pages", type=int, default=0, help="measures this many pages that show the runs instead")
    parser.add_argument("--runs", type=int, default=1000, help="runs that those pages list; one of them works")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.pages:
        _open_pages(args.pages, args.runs)
        return
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        for last in range(args.starts, 0, -1):
            server, address = _serve(folder)
            try:
                urllib.request.urlopen(address).read()
                starts.append(_spent(server))
                if last == 1:
                    print(f"to the first page: {statistics.median(starts):.2f} CPU-seconds {_all(starts)}")
                    _changes(server, address, args.changes)
            finally:
                server.terminate()
                server.wait()


def _open_pages(pages: int, runs: int, seconds: float = 20) -> None:
    """What pages cost that show the runs and are left alone, and what a search costs."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        for number in range(runs):
            place = Path(folder, "runs", f"run-{number:04d}")
            place.parent.mkdir(exist_ok=True)
            make(place, 200, living=number == 0)
        server, address = _serve(folder)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            opened = []
            for _ in range(pages):
                opened.append(browser.new_page())
                opened[-1].goto(f"{address}/#tab=runs", timeout=120_000)
                opened[-1].wait_for_selector("[data-chart=loss] path.main", state="attached", timeout=120_000)
            opened[0].wait_for_timeout(5000)
            idle = _idle(server, opened[0], seconds)
            print(f"{pages} pages that show {runs} runs: {idle:.3f} CPU-seconds a second")
            before, box = _spent(server), opened[0].locator("#run-query").get_by_role("textbox")
            box.fill("run-0007")
            opened[0].wait_for_function("document.querySelectorAll('#run-list tbody tr').length === 1")
            print(f"a search: {_spent(server) - before:.2f} CPU-seconds")
        finally:
            browser.close()
            server.terminate()
            server.wait()


def _serve(folder: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "halftune", "webui", "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1]


def _spent(server: subprocess.Popen[str]) -> float:
    """CPU-seconds of the server so far, those of its ended children included."""
    text = Path(f"/proc/{server.pid}/stat").read_text()
    return sum(map(int, re.split(r"\) . ", text)[1].split()[10:14])) / TICK


def _changes(server: subprocess.Popen[str], address: str, times: int) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(address)
        page.wait_for_selector(".ht-plan .memory")
        page.wait_for_timeout(3000)
        idle = _idle(server, page)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        walls, spent, requests = [], [], []
        for number in range(times):
            asked.clear()
            before, began = _spent(server), time.perf_counter()
            _choose(page, WORDS[number % 2])
            walls.append(time.perf_counter() - began)
            page.wait_for_timeout(300)
            spent.append(_spent(server) - before - idle * (time.perf_counter() - began))
            requests.append(sum("/queue/" not in url for url in asked))
        browser.close()
    print(f"an idle page: {idle:.3f} CPU-seconds a second")
    print(f"a change of the precision: {statistics.mean(spent):.3f} CPU-seconds of the server (mean of {times})")
    print(f"  wall time to the new plan: median {statistics.median(walls):.2f} s, largest {max(walls):.2f} s")
    print(f"  load of the machine: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    print(f"  requests: {statistics.median(requests):.0f}")


def _idle(server: subprocess.Popen[str], page: Any, seconds: float = 6) -> float:
    before = _spent(server)
    page.wait_for_timeout(1000 * seconds)
    return (_spent(server) - before) / seconds


def _choose(page: Any, word: str) -> None:
    """Changes the precision, and waits for the plan that answers it."""
    page.locator('.row[data-path="precision.compute"] select').select_option(word)
    said = "asked for" if word != "auto" else "bf16|fp16|fp32"
    page.wait_for_function(
        """([said, word]) => {
          const row = document.querySelector('tr[data-plan=compute]');
          return row && RegExp(said).test(row.innerText) && (word !== 'auto' || !/asked for/.test(row.innerText));
        }""",
        arg=[said, word],
        polling=10,
    )


def _all(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:.2f}" for value in values) + ")"


if __name__ == "__main__":
    main()
