"""The Chat tab: a run's result and its base model side by side, under the run's own plan."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.config.sections.training import GenerationSection
from halftune.core.errors import HalftuneError
from halftune_webui.calls import event_values, refused
from halftune_webui.context import Context
from halftune_webui.runs import start_stop
from halftune_webui.runs.chat import Chat
from halftune_webui.runs.state import is_live
from halftune_webui.runs.stored import check_model, generation_of
from halftune_webui.runs.view.show import name_of
from halftune_webui.tabs.choose import chooser
from halftune_webui.tabs.live import script

_DEFAULTS = GenerationSection().model_dump()
# Of the run's recipe, for the reader to change: smallest, largest, step.
_SAMPLING = {
    "max_new_tokens": (1, 2048, 1),
    "temperature": (0, 2, 0.05),
    "top_p": (0.01, 1, 0.01),
    "top_k": (0, 200, 1),
    "repetition_penalty": (0.5, 2, 0.05),
}
_EVERY = 0.1  # seconds between two looks of an answer
_SIDES = ("trained", "base")
_WHOLE = ("max_new_tokens", "top_k")


@dataclass
class Chats:
    """The chats of all pages, one each: a page that opens another model, or is closed, gives its model back."""

    of: dict[str, Chat] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, page: str, run: Path) -> Chat | None:
        """A page's chat, where it is with this run and its process is there."""
        chat = self.of.get(page)
        return chat if chat is not None and chat.run == run and chat.alive else None

    def open(self, page: str, chat: Chat) -> None:
        """A page's new chat."""
        self.close(page)
        with self.lock:
            self.of[page] = chat

    def close(self, page: str) -> None:
        """Ends a page's chat."""
        with self.lock:
            chat = self.of.pop(page, None)
        if chat is not None:
            chat.close()


def build(context: Context) -> None:
    """The model, the conversations, and how answers are chosen."""
    words = context.words
    with gr.Row(elem_id="chat-model", elem_classes="ht-row"):
        run = chooser(context, "chat")
    chat = gr.HTML(
        html_template='<div class="ht-chat ht-live"></div>',
        js_on_load=script("chat", WORDS=words.below("chat")),
        elem_id="chat",
        chosen="",
    )
    with gr.Accordion(words("chat.settings"), open=False, elem_id="chat-settings"):
        system = gr.Textbox(label=words("chat.system"), lines=2, elem_id="chat-system")
        with gr.Row():
            sampling = [
                gr.Slider(low, high, value=_DEFAULTS[name], step=step, label=words(f"chat.{name}"), min_width=300)
                for name, (low, high, step) in _SAMPLING.items()
            ]
    _wire(context, run, chat, system, sampling)


def _wire(context: Context, run: gr.Dropdown, chat: gr.HTML, system: gr.Textbox, sampling: list[gr.Slider]) -> None:
    chats, quiet = Chats(), dict[str, Any](show_progress="hidden", api_visibility="private")

    def picked(name: str | None, request: gr.Request) -> Iterator[str]:
        if name:
            yield from _serve(context, chats, str(request.session_hash), _Asked("load", 0, name, {}, {}))

    def asked(request: gr.Request, event: gr.EventData, prompt: str | None, *values: float) -> Iterator[str]:
        yield from _serve(context, chats, str(request.session_hash), _question(event, prompt or "", values))

    def done(request: gr.Request, event: gr.EventData) -> Any:
        page, (act,) = str(request.session_hash), event_values(event, act=str)
        if act == "stop" and (open_chat := chats.of.get(page)):
            open_chat.stop()
        if act == "free" and (open_chat := chats.of.get(page)):
            chats.close(page)
            return json.dumps({"state": "freed", "run": str(open_chat.run)})
        return gr.skip()

    def closed(request: gr.Request) -> None:
        chats.close(str(request.session_hash))

    run.change(lambda name: _chosen(context, name), run, [chat, *sampling], **quiet)
    run.input(picked, run, chat, concurrency_limit=4, **quiet)
    chat.submit(asked, [system, *sampling], chat, concurrency_limit=8, **quiet)
    chat.click(done, None, chat, queue=False, **quiet)
    blocks = Blocks.root_block
    assert blocks is not None
    blocks.unload(closed)


@dataclass(frozen=True)
class _Asked:
    """What a page wants.

    Attributes:
        act: ``load`` or ``ask``.
        number: of the page, which takes an answer for its question by it.
        run: path of the run, of the browser.
        talks: of ``_SIDES``: what was said, the question last.
        generation: how answers are chosen.
    """

    act: str
    number: int
    run: str
    talks: dict[str, list[dict[str, Any]]]
    generation: dict[str, float]


def _question(event: gr.EventData, prompt: str, values: Sequence[float]) -> _Asked:
    """What a page asks, with the system prompt and the values of the sliders."""
    act, number, name, conversations = event_values(event, act=str, number=int, run=str, conversations=dict)
    start = [{"role": "system", "content": prompt}] if prompt.strip() else []
    chosen = {key: int(value) if key in _WHOLE else value for key, value in zip(_SAMPLING, values, strict=True)}
    if not all(isinstance(said, list) for said in conversations.values()):
        raise refused("a conversation that is no list")
    talks = {side: [*start, *said] for side, said in conversations.items() if side in _SIDES and act == "ask"}
    return _Asked(act, number, name, talks, chosen)


def _serve(context: Context, chats: Chats, page: str, asked: _Asked) -> Iterator[str]:
    """Loads the run's model where it is not there, then answers; each piece says everything that is known."""
    state: dict[str, Any] = {"number": asked.number, "run": asked.run, "answers": {}}
    try:
        run = start_stop.find(context.settings, asked.run)
        chat = chats.get(page, run)
        if chat is None:
            yield json.dumps({**state, "state": "loading"})
            chat = _open(context, chats, page, run)
        ready = chat.ready()
    except HalftuneError as error:
        yield json.dumps({**state, "state": "failed", "error": context.words.problem(error), "over": True})
        return
    state |= {
        "state": "ready",
        **{kind: bool(ready.get(kind)) for kind in ("images", "videos", "audio")},
        "base": ready["base"],
        "said": _ready(context, run, ready),
    }
    yield json.dumps({**state, "over": not asked.talks})
    due = 0.0
    try:
        for side, messages in asked.talks.items():
            for text, end in chat.answer(messages, adapter=side == "trained", generation=asked.generation):
                state["answers"][side] = {"text": text, "done": end is not None}
                if end is not None:
                    state["answers"][side] |= {"seconds": end.get("seconds"), "tokens": end.get("tokens")}
                elif time.monotonic() < due:  # each one holds the whole answer, and models are faster than readers
                    continue
                yield json.dumps(state)
                due = time.monotonic() + _EVERY
    except HalftuneError as error:
        state |= {"error": context.words.problem(error), "state": "ready" if chat.alive else "failed"}
    yield json.dumps({**state, "over": True})


def _open(context: Context, chats: Chats, page: str, run: Path) -> Chat:
    if is_live(run):
        raise HalftuneError(context.words("chat.live"), code="webui.run_active")
    check_model(context.settings, run)
    chat = Chat(run)
    chats.open(page, chat)
    return chat


def _chosen(context: Context, name: str | None) -> list[Any]:
    """Which run the page talks to, and how its recipe chooses answers."""
    try:
        folder = start_stop.find(context.settings, name) if name else None
    except HalftuneError:
        folder = None
    if folder is None:
        return [gr.HTML(chosen="{}"), *(gr.skip() for _ in _SAMPLING)]
    which = {"run": str(folder), "name": name_of(folder, context.settings.runs)}
    return [gr.HTML(chosen=json.dumps(which)), *_sampling(folder)]


def _ready(context: Context, run: Path, ready: dict[str, Any]) -> str:
    words, name = context.words, name_of(run, context.settings.runs)
    how = "adapter" if ready.get("adapter", True) else "whole"
    what = words(f"chat.{how}", base=ready["base"])
    return words("chat.ready", name=name, what=what, **{key: ready[key] for key in ("storage", "compute", "device")})


def _sampling(run: Path) -> list[gr.Slider]:
    """As the run's recipe has it; a value beyond a slider's end makes it longer."""
    values = generation_of(run).model_dump()
    return [
        gr.Slider(minimum=min(low, values[name]), maximum=max(high, values[name]), value=values[name])
        for name, (low, high, _) in _SAMPLING.items()
    ]
