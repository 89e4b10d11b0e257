"""Pictures of the board, every tab filled, wide and narrow, light and dark, English and Chinese: to be looked at.

python scripts/board_pictures.py pictures                   all of them, many minutes; needs /usr/bin/chromium
python scripts/board_pictures.py pictures --only runs chat --lang zh --width 390
python scripts/board_pictures.py pictures --rows alpaca.json --folder board     other rows; the folder is kept

Chinese needs a font of the system (fonts-wqy-zenhei). docs/images/webui*.png are such pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from halftune.core.status import NAME, read_status

HALFTUNE = (sys.executable, "-m", "halftune")
CHROMIUM = "/usr/bin/chromium"
WIDE = 1280  # pixels in which every tab has its button
WAIT = 180_000  # milliseconds: each process imports torch, and the machine may be busy
MODEL = "builtin:qwen2-tiny"
PLACES = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Cuba": "Havana",
    "Italy": "Rome",
}
QUESTION = "What is the capital of Japan?"

# Text that names the folder of these runs, which says nothing to a reader.
HIDE_FOLDER = """([folder, instead]) => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, instead);
}"""

PRETRAIN = """\
model: {{name_or_path: {model}}}
adapter: none
data: {{train: builtin:stdlib-text, max_length: 128}}
method: pretrain
training: {{output_dir: runs/pretrain, max_steps: 100, learning_rate: 3.0e-3, logging_steps: 1}}
"""
TUNE = """\
# An adapter that knows eight capitals.
model: {{name_or_path: runs/pretrain/final}}
adapter: {{type: lora, rank: 32}}
data: {{train: {rows}, eval: [{{path: {rows}, samples: 8}}], max_length: {length}}}
training:
  output_dir: runs/{name}
  max_steps: {steps}
  learning_rate: {rate}
  per_device_train_batch_size: 2
  seed: 1
  eval_steps: 20
  save_steps: end
  logging_steps: 1
generation: {{max_new_tokens: 48, repetition_penalty: 1.3}}
"""
WRONG = (("training.learning_rate", "fast"), ("adapter.rank", "0"), ("data.max_length", "12.5"))


def main() -> None:
    """Makes runs, serves them, takes the pictures."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="board"))
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = "capitals.jsonl"
    if args.rows:
        rows = args.rows.name
        shutil.copy(args.rows, folder / rows)
    else:
        (folder / rows).write_text("".join(_row(*place) for place in PLACES.items()) * 12)
    _make_runs(folder, rows)
    try:
        with sync_playwright() as driver, _living(folder, rows):
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            for language in args.lang:
                with _board(folder, language) as address:
                    page = browser.new_page(viewport={"width": WIDE, "height": 900})
                    page.set_default_timeout(WAIT)
                    _take(page, address, _shots(args, language, folder), args.only, rows)
                    page.close()
            browser.close()
    finally:
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the pictures go")
    parser.add_argument("--rows", type=Path, help="rows to train on (default: eight capitals)")
    parser.add_argument("--folder", type=Path, help="where the board works; kept, and its runs are used again")
    parser.add_argument("--lang", nargs="+", choices=("en", "zh"), default=["en", "zh"])
    parser.add_argument("--width", nargs="+", type=int, default=[1440, 768, 390])
    parser.add_argument("--scheme", nargs="+", choices=("light", "dark"), default=["light", "dark"])
    parser.add_argument("--only", nargs="+", choices=tuple(TABS), default=list(TABS))
    return parser.parse_args()


def _row(country: str, city: str) -> str:
    question, answer = f"What is the capital of {country}?", f"The capital of {country} is {city}."
    return json.dumps({"prompt": question, "completion": answer}) + "\n"


def _make_runs(folder: Path, rows: str) -> None:
    """Two finished runs to compare, and one that died; those that are there already are kept."""
    recipes = {
        "pretrain": PRETRAIN.format(model=MODEL),
        "answers": TUNE.format(rows=rows, name="answers", steps=300, rate="5.0e-3", length=192),
        "slower": TUNE.format(rows=rows, name="slower", steps=120, rate="5.0e-4", length=192),
        "too-short": TUNE.format(rows=rows, name="too-short", steps=120, rate="5.0e-3", length=8),
    }
    for name, text in recipes.items():
        if not (folder / "runs" / name / NAME).exists():
            (folder / f"{name}.yaml").write_text(text)
            subprocess.run([*HALFTUNE, "train", "--config", f"{name}.yaml"], cwd=folder, check=name == "pretrain")


@contextmanager
def _living(folder: Path, rows: str) -> Iterator[None]:
    """A run in the middle of its work; it stands still, so that it costs nothing and looks the same in each picture."""
    run = folder / "runs" / "long"
    shutil.rmtree(run, ignore_errors=True)
    text = TUNE.format(rows=rows, name="long", steps=2000, rate="2.0e-3", length=192)
    (folder / "long.yaml").write_text(text)
    process = subprocess.Popen([*HALFTUNE, "train", "--config", "long.yaml"], cwd=folder)
    try:
        while (status := read_status(run / NAME)) is None or status.step < 80:
            assert process.poll() is None, "the run ended"
            time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _board(folder: Path, language: str) -> Iterator[str]:
    command = [*HALFTUNE, "webui", "--port", "0", "--lang", language]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait()


Shoot = Callable[[Any, str], None]


def _shots(args: argparse.Namespace, language: str, folder: Path) -> Shoot:
    def shoot(page: Any, name: str) -> None:
        for width in args.width:
            page.set_viewport_size({"width": width, "height": 900})
            for scheme in args.scheme:
                page.evaluate("dark => document.body.classList.toggle('dark', dark)", scheme == "dark")
                page.wait_for_timeout(400)
                page.evaluate(HIDE_FOLDER, [str(folder.resolve()), "/home/me/board"])
                page.screenshot(path=args.out / f"{name}-{language}-{width}-{scheme}.png", full_page=True)
                if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                    print(f"{name}-{language}-{width}-{scheme}: {wide} pixels wide", file=sys.stderr)
        page.set_viewport_size({"width": WIDE, "height": 900})

    return shoot


def _take(page: Any, address: str, shoot: Shoot, only: Sequence[str], rows: str) -> None:
    page.goto(address)
    page.evaluate("text => localStorage.setItem('halftune-recipe', text)", _recipe(rows))
    page.reload()
    page.wait_for_selector(".ht-plan .memory")
    for name, fill in TABS.items():
        if name in only:
            page.locator(f"#tab-{name}-button").click()
            fill(page, shoot)


def _recipe(rows: str) -> str:
    return TUNE.format(rows=rows, name="next", steps=120, rate="5.0e-3", length=192)


def _field(page: Any, path: str, text: str) -> None:
    box = page.locator(f'.row[data-path="{path}"] input')
    box.fill(text)
    box.press("Tab")


def _train(page: Any, shoot: Shoot) -> None:
    shoot(page, "train")
    compute = page.locator('.row[data-path="precision.compute"] select')
    compute.select_option("fp16")
    page.wait_for_selector(".ht-plan .problem, .ht-plan .chip.fp16")
    shoot(page, "train-fp16")
    page.locator("#machine input").click()
    page.get_by_role("option", name="Tesla T4").click()
    page.wait_for_selector(".ht-plan .elsewhere")
    compute.select_option("auto")
    page.wait_for_selector('tr[data-plan="compute"] .chip.fp16')
    page.locator('.row[data-path="precision.compute"] .why summary').click()
    shoot(page, "train-t4")
    for path, text in WRONG:
        _field(page, path, text)
    page.wait_for_selector('.row[data-path="data.max_length"].wrong')
    shoot(page, "train-problems")
    for path, _ in WRONG:
        page.locator(f'.row[data-path="{path}"] .reset').click()
    page.wait_for_selector(".ht-problems.fine", state="attached")
    for group in page.locator("details.group:not([hidden]) > summary").all():
        group.click()
    shoot(page, "train-all")
    _field(page, "training.output_dir", "runs/next")
    page.wait_for_selector("#start:enabled")


def _runs(page: Any, shoot: Shoot) -> None:
    page.wait_for_selector("[data-chart=loss] path.main")
    shoot(page, "runs-live")
    page.locator("#run-list .name", has_text="too-short").click()
    page.wait_for_selector("#run-cards .cause")
    shoot(page, "runs-died")
    page.locator("#run-list .name", has_text="answers").click()
    page.locator("#run-list tr", has_text="slower").locator("input").click()
    page.wait_for_function("document.querySelectorAll('[data-chart=loss] path.main').length === 2")
    shoot(page, "runs-compare")
    page.locator("#run-cards .card", has_text="answers").locator("[data-act=report]").first.click()
    page.frame_locator("#run-report iframe").get_by_text("halftune run report").wait_for()
    shoot(page, "runs-report")
    page.locator("#run-report [data-act=close]").click()
    page.locator("#tab-train-button").click()
    page.locator("#start:enabled").click()
    page.wait_for_selector("#run-cards .state.queued")
    shoot(page, "runs-queue")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#run-cards [data-act=stop]").click()
    page.locator("#run-cards [data-act=delete]").click()
    page.wait_for_selector("#run-cards .card:has(.queued)", state="detached")


def _data(page: Any, shoot: Shoot) -> None:
    page.locator("#look-at-data").click()
    page.locator("#data-report .sample").first.wait_for()
    shoot(page, "data")


def _chat(page: Any, shoot: Shoot) -> None:
    shoot(page, "chat-empty")
    page.locator("#chat-run input").click()
    page.get_by_role("option", name="answers").click()
    page.locator("#chat-ready").wait_for()
    page.locator("#chat-message").fill(QUESTION)
    page.locator("#chat-send").click()
    for side in ("#trained", "#base"):
        page.locator(f"{side} p.assistant").wait_for()
    page.wait_for_timeout(4000)
    shoot(page, "chat")
    page.locator("#chat-settings > button").click()
    shoot(page, "chat-settings")
    page.locator("#chat-free").click()


def _export(page: Any, shoot: Shoot) -> None:
    shoot(page, "export-empty")
    page.locator("#export-run input").click()
    page.get_by_role("option", name="answers").click()
    page.locator("#export-force input").check()
    before = page.locator("#exports .card").count()  # of earlier pictures in the same folder
    page.locator("#export-start").click()
    page.locator("#exports .card").nth(before).wait_for()
    page.wait_for_function("!document.querySelector('#exports .state:not(.finished)')")
    shoot(page, "export")


def _doctor(page: Any, shoot: Shoot) -> None:
    page.locator("#machine-facts table").first.wait_for()
    page.locator("#doctor-start").click()
    page.locator("#doctor-found table").first.wait_for()
    shoot(page, "doctor")


TABS: dict[str, Callable[[Any, Shoot], None]] = {
    "train": _train,
    "data": _data,
    "runs": _runs,
    "chat": _chat,
    "export": _export,
    "doctor": _doctor,
}

if __name__ == "__main__":
    main()
