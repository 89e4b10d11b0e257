"""The Chat tab in a browser, with a stand-in for the process that holds the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

pytestmark = pytest.mark.nightly
STAND_IN = f"""
import sys
from halftune_webui.runs import chat
chat.HALFTUNE = (sys.executable, {str(Path(__file__).with_name("stand_in_chat.py"))!r})
"""
RECIPE = "model: {name_or_path: builtin:qwen2-tiny}\ndata: {train: builtin:python-docs}\n"


def finished(folder: Path, name: str) -> Path:
    """A run with a result, as far as the web UI looks at one."""
    run = folder / "runs" / name
    (run / "final").mkdir(parents=True)
    (run / "resolved.yaml").write_text(f"{RECIPE}training: {{output_dir: {run}}}\ngeneration: {{max_new_tokens: 7}}\n")
    (run / "finished.json").write_text(json.dumps({"step": 3}))
    return run


@pytest.fixture(scope="module")
def chat_web_ui(start_web_ui: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("chats")
    for name in ("one", "two", "films"):
        finished(folder, name)
    return start_web_ui(folder=folder, before=STAND_IN)


def opened(open_page: Callable[..., Any], web_ui: Any, run: str = "one", **options: Any) -> Any:
    """A page in the Chat tab, at a run; as its address says."""
    place = quote(str(web_ui.folder / "runs" / run))
    page = open_page(f"{web_ui.url}/#tab=chat&chat={place}", **options)
    page.wait_for_function(
        "run => document.querySelector('#chat-run input')?.value === run"
        " && document.querySelector('#chat [data-chat]')",
        arg=run,
    )
    return page


def enabled(page: Any) -> set[str]:
    """Buttons that can be pressed."""
    return {
        one.removeprefix("chat-")
        for one in page.evaluate(
            "[...document.querySelectorAll('#chat button[id^=chat-]:enabled')].map((one) => one.id)"
        )
    }


def idle(page: Any) -> None:
    page.wait_for_selector("#chat-again:enabled")


def test_nothing_that_is_typed_gets_lost(chat_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page, box = opened(open_page, chat_web_ui), "#chat-message"
    assert enabled(page) == {"load"}
    page.locator(box).fill("a b")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("c")
    assert page.locator(box).input_value() == "a b\nc"
    assert enabled(page) == {"load", "send"}
    page.keyboard.press("Enter")  # the model is loaded first; the question waits for it
    page.keyboard.type("meanwhile")
    page.locator("#base p.assistant", has_text="base a b c").wait_for()
    idle(page)
    assert page.locator("#trained p.user").inner_text() == "a b\nc"
    assert page.locator("#trained p.assistant").inner_text() == "tuned a b c"
    assert page.locator("#trained .foot").inner_text().endswith("40 tokens/s (4 tokens)")
    assert page.locator(box).input_value() == "meanwhile"

    page.locator(box).fill("long")
    page.keyboard.press("Enter")
    page.locator("#trained p.assistant", has_text="tuned on on").wait_for()
    assert enabled(page) == {"free", "stop"}
    page.keyboard.type("not yet")
    page.keyboard.press("Enter")  # nothing is sent while an answer comes, and nothing is lost
    assert page.locator(box).input_value() == "not yet"
    page.locator("#chat-both").uncheck()  # of the next question
    page.locator("#chat-stop").click()
    page.locator("#base p.assistant", has_text="base on on").wait_for(state="attached")  # the other side's turn
    page.locator("#chat-stop").click()
    idle(page)
    assert page.locator("#trained p.user").count() == 2
    assert page.locator(box).input_value() == "not yet"


def test_it_says_who_answers_and_keeps_a_conversation_over_a_reload(
    chat_web_ui: Any, open_page: Callable[..., Any]
) -> None:
    page = opened(open_page, chat_web_ui)
    page.locator("#chat-message").fill("hello <img src=x>")
    page.keyboard.press("Enter")
    page.locator("#base p.assistant").wait_for()
    idle(page)
    assert page.locator("#chat-ready").inner_text().startswith("one is loaded")
    assert page.locator("#trained h3").inner_text() == "one"
    assert "tiny" in page.locator("#base h3").inner_text()
    page.locator("#chat-settings > button").click()
    page.wait_for_function("document.querySelector('#chat-settings input[type=number]')?.value === '7'")  # the recipe's
    page.reload()
    page.locator("#trained p.assistant", has_text="hello <img src=x>").wait_for()  # as text
    assert page.evaluate("new URLSearchParams(location.hash.slice(1)).get('tab')") == "chat"
    page.locator("#chat-again").click()
    page.wait_for_selector("#chat-ready")
    idle(page)
    assert page.locator("#trained p.user").count() == 1  # asked once more, not twice

    page.locator("#chat-run input").click()
    page.get_by_role("option", name="two").click()  # is enough to load it
    page.locator("#chat-ready", has_text="two is loaded").wait_for()
    assert page.locator("#trained p").count() == 0
    assert page.locator("#trained h3").inner_text() == "two"
    page.wait_for_function("new URLSearchParams(location.hash.slice(1)).get('chat').endsWith('/two')")
    page.locator("#chat-free").click()
    page.locator("#chat .status", has_text="free again").wait_for()
    assert enabled(page) == {"load"}


def test_what_goes_wrong_leaves_the_question_to_ask_again(chat_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, chat_web_ui)
    page.locator("#chat-message").fill("die")
    page.keyboard.press("Enter")
    page.locator("#chat .cause", has_text="out of GPU memory").wait_for()
    idle(page)
    assert page.locator("#trained p.user").inner_text() == "die"


def test_on_a_telephone_the_message_box_is_in_view(chat_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, chat_web_ui, width=390)
    page.locator("#chat-message").fill("a " * 400)
    page.keyboard.press("Enter")
    page.locator("#trained p.assistant").wait_for()
    idle(page)
    assert not page.locator("#base").is_visible()
    page.locator("#pick-base").click()
    page.locator("#base p.assistant").wait_for()
    assert not page.locator("#trained").is_visible()
    page.evaluate("window.scrollTo(0, 0)")
    box = page.locator("#chat-message").bounding_box()
    assert box["y"] + box["height"] <= 900
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_files_go_with_the_next_message(chat_web_ui: Any, open_page: Callable[..., Any], tmp_path: Path) -> None:
    from PIL import Image

    from halftune.data.media.sound import encoded
    from halftune.data.sources.builtin.tones import RATE, SAMPLES

    files = [tmp_path / name for name in ("one.png", "two.png", "three.wav", "broken.png", "broken.wav", "long.wav")]
    for file in files[:2]:
        Image.new("RGB", (8, 8), "red").save(file)
    files[2].write_bytes(encoded(np.zeros(SAMPLES), RATE))
    for file in files[3:5]:
        file.write_bytes(b"nothing")
    files[5].write_bytes(encoded(np.zeros(61 * RATE), RATE))
    page = opened(open_page, chat_web_ui)
    assert page.locator("#chat-attach").is_hidden()
    page.click("#chat-load")
    page.wait_for_selector("#chat-attach:visible")
    assert page.locator("#chat-file").get_attribute("accept") == "image/*,audio/*"
    page.set_input_files("#chat-file", files[:4])
    page.wait_for_selector("#chat .status .cause")
    page.set_input_files("#chat-file", files[4:])
    assert page.locator(".media img").count() == 2
    assert page.locator(".media audio").count() == 1
    page.locator(".media button").first.click()
    page.wait_for_function("document.querySelectorAll('.media div').length === 2")
    page.evaluate(_DROP)  # the same sound once more
    page.wait_for_function("document.querySelectorAll('.media audio').length === 2")
    page.fill("#chat-message", "what is this")
    page.keyboard.press("Enter")
    answer = "tuned data:image/png; input_audio input_audio what is this"
    page.wait_for_function("said => document.querySelector('#trained .assistant')?.textContent === said", arg=answer)
    assert page.locator("#trained .user img").count() == 1
    lasts = "(all) => [...document.querySelectorAll('#trained .user audio')].every((one) => one.duration === all)"
    page.wait_for_function(lasts, arg=SAMPLES / RATE)
    assert page.locator("#trained .user audio").count() == 2
    assert page.locator(".media div").count() == 0


def test_a_video_that_the_browser_cannot_play_is_named(chat_web_ui: Any, open_page: Callable[..., Any]) -> None:
    page = opened(open_page, chat_web_ui, "films")
    page.click("#chat-load")
    page.wait_for_selector("#chat-attach:visible")
    page.set_input_files("#chat-file", {"name": "a.avi", "mimeType": "video/x-msvideo", "buffer": b"RIFF"})
    page.locator(".media .help", has_text="a.avi").wait_for()
    page.fill("#chat-message", "what is this")
    page.keyboard.press("Enter")
    page.locator("#trained .user .help", has_text="a.avi").wait_for()
    page.locator("#trained .assistant", has_text="tuned video_url what is this").wait_for()


_DROP = """async () => {
  const sound = await (await fetch(document.querySelector('.media audio').src)).blob(), files = new DataTransfer();
  files.items.add(new File([sound], 'again.wav', {type: 'audio/wav'}));
  document.querySelector('.ht-chat').dispatchEvent(new DragEvent('drop', {dataTransfer: files, bubbles: true}));
}"""
