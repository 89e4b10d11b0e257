"""The Chat tab: a run's result and its base model side by side, under the run's own plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context as Blocks

from halftune.config.sections.generation import GenerationSection
from halftune.core.errors import HalftuneError
from halftune_webui.context import Context
from halftune_webui.runs import launch
from halftune_webui.runs.chat import Chat
from halftune_webui.runs.state import is_live
from halftune_webui.runs.stored import check_model, generation_of
from halftune_webui.tabs.choose import chooser
from halftune_webui.tabs.data import failed, waiting
from halftune_webui.tabs.runs import live

Messages = list[dict[str, str]]
_DEFAULTS = GenerationSection().model_dump()
# Of the run's recipe, for the reader to change: smallest, largest, step.
_SAMPLING = {
    "max_new_tokens": (1, 2048, 1),
    "temperature": (0, 2, 0.05),
    "top_p": (0.01, 1, 0.01),
    "top_k": (0, 200, 1),
    "repetition_penalty": (0.5, 2, 0.05),
}


@dataclass
class Chats:
    """The chats of all pages, one each: a page that opens another model, or is closed, gives its model back."""

    of: dict[str, Chat] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

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


@dataclass(frozen=True)
class _Parts:
    """What the events read and write."""

    run: gr.Dropdown
    loaded: gr.HTML
    both: gr.Checkbox
    system: gr.Textbox
    told: list[gr.State]
    shown: list[gr.HTML]
    base_side: gr.Column
    text: gr.Textbox
    sampling: list[gr.Slider]


def build(context: Context) -> None:
    """The model, both conversations, the question, and how answers are chosen."""
    words = context.words
    with gr.Row(elem_id="chat-model", elem_classes="ht-row"):
        run = chooser(context, "chat-run")
        load = gr.Button(words("chat.load"), variant="primary", elem_id="chat-load")
        free = gr.Button(words("chat.free"), elem_id="chat-free")
    loaded = live("chat-loaded")
    with gr.Row(elem_id="answers"):
        with gr.Column(min_width=300):
            trained = live("trained")
        with gr.Column(min_width=300) as base_side:
            base = live("base")
    text = gr.Textbox(label=words("chat.ask"), lines=2, elem_id="chat-text")
    with gr.Row(elem_id="asking", elem_classes="ht-row"):
        send = gr.Button(words("chat.send"), variant="primary", elem_id="chat-send")
        stop = gr.Button(words("chat.stop"), elem_id="chat-stop")
        anew = gr.Button(words("chat.anew"), elem_id="chat-new")
    with gr.Accordion(words("chat.settings"), open=False, elem_id="chat-settings"):
        both = gr.Checkbox(value=True, label=words("chat.both"), elem_id="chat-both")
        system = gr.Textbox(label=words("chat.system"), lines=2, elem_id="chat-system")
        with gr.Row():
            sampling = [
                gr.Slider(low, high, value=_DEFAULTS[name], step=step, label=words(f"chat.{name}"), min_width=300)
                for name, (low, high, step) in _SAMPLING.items()
            ]
    parts = _Parts(run, loaded, both, system, [gr.State([]), gr.State([])], [trained, base], base_side, text, sampling)
    _wire(context, parts, load, free, send, stop, anew)


def conversation(messages: Messages, title: str, silent: str) -> str:
    """One conversation as it was written: markup of a model could make the page load pictures from anywhere.

    Args:
        messages: what was said.
        title: who answers.
        silent: stands where an answer ended before its first word.
    """
    said = "".join(
        f'<p class="{message["role"]}">{escape(message["content"])}</p>'
        if message["content"].strip()
        else f'<p class="help">{escape(silent)}</p>'
        for message in messages
    )
    name = escape(title)
    return f'<section class="talk"><h4>{name}</h4><div data-keep="{name}" tabindex="0">{said}</div></section>'


def _wire(
    context: Context, parts: _Parts, load: gr.Button, free: gr.Button, send: gr.Button, stop: gr.Button, anew: gr.Button
) -> None:
    chats, quiet = Chats(), dict[str, Any](show_progress="hidden", api_visibility="private")

    def opened(name: str | None, request: gr.Request) -> Iterator[Any]:
        for shown in _load(context, chats, name, str(request.session_hash)):
            yield [shown, *(gr.skip() for _ in parts.sampling)]
        chat = chats.of.get(str(request.session_hash))
        if chat is not None and chat.alive:
            yield [gr.skip(), *_sampling(chat.run)]

    def asked(request: gr.Request, *values: Any) -> Iterator[Any]:
        yield [gr.skip() for _ in (parts.text, *sides)]  # a question that is not put empties nothing
        yield from _ask(context, chats.of.get(str(request.session_hash)), *values)

    def stopped(request: gr.Request) -> None:
        if chat := chats.of.get(str(request.session_hash)):
            chat.stop()

    def freed(request: gr.Request) -> str:
        chats.close(str(request.session_hash))
        return f'<p class="help">{escape(context.words("chat.freed"))}</p>'

    def closed(request: gr.Request) -> None:
        chats.close(str(request.session_hash))

    titles = [context.words("chat.trained"), context.words("chat.base")]
    sides = [*parts.told, *parts.shown]
    inputs = [parts.text, *parts.told, parts.both, parts.system, *parts.sampling]

    def empty() -> list[Any]:
        return [[], [], *(conversation([], title, "") for title in titles)]

    load.click(opened, parts.run, [parts.loaded, *parts.sampling], concurrency_limit=4, **quiet).then(
        empty, None, sides, **quiet
    )
    free.click(freed, None, parts.loaded, **quiet)
    gr.on([send.click, parts.text.submit], asked, inputs, [parts.text, *sides], concurrency_limit=8, **quiet)
    stop.click(stopped, None, None, queue=False, api_visibility="private")
    anew.click(empty, None, sides, **quiet)
    parts.both.change(lambda on: gr.Column(visible=on), parts.both, parts.base_side, **quiet)
    board = Blocks.root_block
    assert board is not None
    board.load(empty, None, sides, **quiet)
    board.unload(closed)


def _load(context: Context, chats: Chats, name: str | None, page: str) -> Iterator[Any]:
    """Loads the model of a run; the conversations begin anew."""
    words = context.words
    if not name:
        yield failed(words("chat.choose"))
        return
    yield waiting(words("chat.loading"))
    try:
        run = launch.find(context.settings, name)
        if is_live(run):
            raise HalftuneError(words("chat.live"))
        check_model(context.settings, run)
        chat = Chat(run)
        chats.open(page, chat)
        ready = chat.ready()
    except HalftuneError as error:
        yield failed(str(error))
        return
    what = words("chat.ready", **{key: ready[key] for key in ("base", "storage", "compute", "device")})
    yield f'<p class="ok" id="chat-ready">{escape(what)}</p>'


def _sampling(run: Path) -> list[gr.Slider]:
    """As the run's recipe has it; a value beyond a slider's end makes it longer."""
    values = generation_of(run).model_dump()
    return [
        gr.Slider(minimum=min(low, values[name]), maximum=max(high, values[name]), value=values[name])
        for name, (low, high, _) in _SAMPLING.items()
    ]


def _ask(
    context: Context,
    chat: Chat | None,
    text: str | None,
    trained: Messages,
    base: Messages,
    both: bool,
    system: str | None,
    *sampling: float,
) -> Iterator[Any]:
    """Streams the answer of the trained model, then that of its base."""
    if not text or not text.strip():  # a box that was never touched is None
        return
    if chat is None or not chat.alive:
        gr.Warning(context.words("chat.first"))
        return
    whole = {"max_new_tokens", "top_k"}
    generation = {name: int(value) if name in whole else value for name, value in zip(_SAMPLING, sampling, strict=True)}
    sides = {True: trained, **({False: base} if both else {})}
    for adapter in sides:
        sides[adapter] = [*sides[adapter], {"role": "user", "content": text}]
    for adapter, messages in sides.items():
        start = [{"role": "system", "content": system}] if system and system.strip() else []
        try:
            for answer, _ in chat.answer([*start, *messages], adapter=adapter, generation=generation):
                sides[adapter] = [*messages, {"role": "assistant", "content": answer}]
                yield "", *_both(context, sides[True], sides.get(False, base))
        except HalftuneError as error:
            gr.Warning(escape(str(error)))
            return


def _both(context: Context, trained: Messages, base: Messages) -> tuple[Any, ...]:
    """Both conversations, and how they look."""
    words, silent = context.words, context.words("chat.silent")
    shown = [conversation(told, words(f"chat.{who}"), silent) for told, who in ((trained, "trained"), (base, "base"))]
    return trained, base, *shown
