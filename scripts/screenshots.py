"""Takes the pictures of docs/images anew: trains the quickstart in a folder of its own, opens the web UI in Chromium.

    python scripts/screenshots.py [FOLDER]        about five minutes on two cores; FOLDER keeps the runs

Needs playwright, /usr/bin/chromium and a font with Chinese characters.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
HALFTUNE = [sys.executable, "-m", "halftune"]
RECIPES = ("quickstart_pretrain.yaml", "quickstart.yaml")
SLOWER = ["training.output_dir=runs/slower", "training.learning_rate=5e-4", "training.num_train_epochs=4"]
QUESTION = "In bf16, how many bits does the exponent have?"
WIDE, TALL, PHONE = 1280, 960, {"width": 390, "height": 640}


def train(folder: Path) -> None:
    """A finished run, and one with a smaller learning rate."""
    for name in RECIPES:
        shutil.copy(ROOT / "configs" / name, folder)
    for changes in ((), SLOWER):
        subprocess.run([*HALFTUNE, "train", "--config", RECIPES[1], *changes], cwd=folder, check=True)


@contextmanager
def web_ui(folder: Path, language: str) -> Iterator[str]:
    """A web UI in ``folder``; gives its address."""
    command = [*HALFTUNE, "webui", "--port", "0", "--lang", language]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()


def opened(browser: Any, url: str, place: str = "", **context: Any) -> Any:
    """A page with the quickstart in its form."""
    page = browser.new_context(**{"viewport": {"width": WIDE, "height": TALL}, **context}).new_page()
    recipe = (ROOT / "configs" / RECIPES[1]).read_text(encoding="utf-8").replace("runs/quickstart\n", "runs/next\n")
    page.add_init_script(f"localStorage.setItem('halftune-recipe', {json.dumps(recipe)})")
    page.goto(f"{url}/#{place}")
    page.wait_for_function("window.halftuneRecipe")
    return page


def plan_a_t4(page: Any) -> None:
    """Selects a T4, and shows why it cannot compute in bf16."""
    page.locator(".ht-plan .subject").wait_for()
    page.locator("#machine input").click()
    page.get_by_role("option", name="Tesla T4").click()
    page.locator(".ht-plan .subject", has_text="Tesla T4").wait_for()
    page.locator('.row[data-path="precision.compute"] details summary').click()


def take(browser: Any, folder: Path) -> None:
    runs = folder / "runs"
    with web_ui(folder, "en") as url:
        page = opened(browser, url)
        plan_a_t4(page)
        page.screenshot(path=IMAGES / "webui.png")

        page = opened(browser, url, "tab=runs")
        for name in ("quickstart", "slower"):
            named = page.locator(".name", has_text=re.compile(f"^{name}$"))
            page.locator("#run-list tr", has=named).locator("input").check()
        page.locator("[data-chart=loss] path.main").nth(1).wait_for()
        page.screenshot(path=IMAGES / "webui-runs.png", full_page=True)

        page = opened(browser, url, f"tab=chat&chat={quote(str(runs / 'quickstart'))}")
        page.locator("#chat [data-chat$='/quickstart']").wait_for(state="attached")
        page.locator("#chat-message").fill(QUESTION)
        page.keyboard.press("Enter")
        page.locator("#chat-again:enabled").wait_for(timeout=120_000)
        page.screenshot(path=IMAGES / "webui-chat.png")

        page = browser.new_page(viewport={"width": 1180, "height": 1500})
        page.goto((runs / "quickstart" / "report.html").as_uri())
        page.screenshot(path=IMAGES / "report.png")
    with web_ui(folder, "zh") as url:
        narrow = []
        for place, shown in (("", ".row"), ("tab=data", "#data-report .sample"), ("tab=runs", "#run-list .name")):
            page = opened(browser, url, place, viewport=PHONE, color_scheme="dark")
            if place == "tab=data":
                page.locator("#look-at-data").click()
            page.locator(shown).first.wait_for()
            page.locator(shown).first.scroll_into_view_if_needed()
            narrow.append(Image.open(BytesIO(page.screenshot())))
    gap, step = 20, PHONE["width"] + 20
    picture = Image.new("RGB", (step * len(narrow) - gap, PHONE["height"]), "white")
    for number, one in enumerate(narrow):
        picture.paste(one, (number * step, 0))
    picture.save(IMAGES / "webui-narrow.png")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/halftune-screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    train(folder)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        take(browser, folder)
        browser.close()


if __name__ == "__main__":
    main()
