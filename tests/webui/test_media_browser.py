"""A data set with sounds in a browser: one ZIP file, its rows with players, a model that hears them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halftune.data.media.sound import encoded
from halftune.data.sources.builtin.tones import RATE

RECIPE = """
model: {name_or_path: "builtin:qwen2_audio-tiny"}
adapter: none
data: {train: "builtin:tones", audio: true, max_length: 128}
training: {output_dir: runs/heard, max_steps: 2, logging_steps: 1}
generation: {max_new_tokens: 4}
"""


def tones(folder: Path, name: str) -> Path:
    """An archive with 12 rows, their sounds of half a second, and a hidden file."""
    packed = folder / name
    with zipfile.ZipFile(packed, "w") as file:
        rows = []
        for number in range(12):
            sound = 0.3 * np.sin(2 * np.pi * (200 + 100 * number) * np.arange(RATE // 2) / RATE)
            file.writestr(f"mine/wavs/{number}.wav", encoded(sound, RATE))
            asked = {"role": "user", "content": "<audio>How high is it?"}
            messages = [asked, {"role": "assistant", "content": str(number)}]
            rows.append({"messages": messages, "audios": [f"wavs/{number}.wav"]})
        file.writestr("mine/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        file.writestr("mine/.hidden", "x")
    return packed


def upload(page: Any, file: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.locator(".ht-files .bar button").nth(1).click()
    chooser.value.set_files(file)


def test_an_archive_becomes_the_training_data(web_ui: Any, open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = open_page(web_ui.url, recipe=RECIPE)
    page.wait_for_function("window.halftuneRecipe?.includes('builtin:tones')")
    upload(page, tones(tmp_path, "heard.zip"))
    page.wait_for_function("window.halftuneRecipe?.includes('data/heard/mine/rows.jsonl')")
    assert len(list((web_ui.folder / "data" / "heard" / "mine" / "wavs").iterdir())) == 12
    page.seen.expected.append("status of 400")
    (tmp_path / "broken.zip").write_bytes(b"PK")
    upload(page, tmp_path / "broken.zip")
    page.locator(".ht-files .problem").wait_for()
    assert not (web_ui.folder / "data" / "broken").exists()


@pytest.mark.nightly
def test_own_sounds_from_the_upload_to_the_chat(
    start_web_ui: Callable[..., Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    page = open_page(start_web_ui().url, recipe=RECIPE)
    page.wait_for_function("window.halftuneRecipe?.includes('builtin:tones')")
    upload(page, tones(tmp_path, "heard.zip"))
    page.wait_for_function("window.halftuneRecipe?.includes('data/heard/mine/rows.jsonl')")
    page.get_by_role("tab", name="Data", exact=True).click()
    page.click("#look-at-data")
    page.locator("#data-report audio").nth(4).wait_for()
    page.wait_for_function("[...document.querySelectorAll('#data-report audio')].every((one) => one.duration === 0.5)")
    page.get_by_role("tab", name="Train", exact=True).click()
    page.click("#start:enabled")
    page.locator("#run-cards .card[data-card]").get_by_text("finished", exact=True).wait_for()
    page.click("#run-cards [data-act=chat]")
    page.click("#chat-load")
    page.wait_for_selector("#chat-attach:visible")
    page.set_input_files(
        "#chat-file", {"name": "a.wav", "mimeType": "audio/wav", "buffer": encoded(np.zeros(RATE), RATE)}
    )
    page.wait_for_selector(".asking .media audio")
    page.fill("#chat-message", "How high is it?")
    page.keyboard.press("Enter")
    page.locator("#trained .foot", has_text="tokens").wait_for()
    assert page.locator("#trained .user audio").count() == 1
