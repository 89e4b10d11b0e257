"""The terminal side of a chat: reads lines, streams answers, understands a few commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from halftune.core.errors import HalftuneError
from halftune.core.log import held_back
from halftune.core.table import did_you_mean
from halftune.infer.session import ChatSession

HELP = """\
/adapter on|off   answer with or without what was trained
/compare [TEXT]   both answers to TEXT, or to the last question
/system [TEXT]    set the system prompt; without TEXT remove it
/reset            forget the conversation
/help             this
/quit             leave (so does Ctrl-D); Ctrl-C stops an answer"""


class Repl:
    """One chat in a terminal."""

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self._last = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "adapter": self._adapter,
            "compare": self._compare,
            "system": self._system,
            "reset": self._reset,
            "help": lambda _: print(HELP),
        }

    def loop(self) -> None:
        """Until the end of input or /quit."""
        with contextlib.suppress(ImportError):  # line editing and history, where the platform has it
            import readline  # noqa: F401
        print("/help lists the commands")
        while True:
            try:
                line = input("\nyou> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(/quit or Ctrl-D leaves)")
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self.handle(line)

    def handle(self, line: str) -> None:
        """One line: a command, or something to answer. Errors are told, and the chat goes on."""
        try:
            if not line.startswith("/"):
                self._say(line)
                return
            name, _, argument = line[1:].partition(" ")
            if name in self._commands:
                self._commands[name](argument.strip())
            else:
                print(f"unknown command /{name} · {did_you_mean(name, [*self._commands, 'quit'])}")
        except HalftuneError as error:
            print(error, file=sys.stderr)

    def _say(self, text: str) -> None:
        self._last = text
        self.session.record(text, self._stream(text, tuned=self.session.tuned))

    def _compare(self, text: str) -> None:
        again = not text
        text = text or self._last
        if not text:
            print("nothing to compare yet · /compare TEXT, or ask something first")
            return
        if again and self.session.history:  # the same question, in the same place of the conversation
            del self.session.history[-2:]
        self._last = text
        trained = self._stream(text, tuned=True, label="trained> ")
        base = self._stream(text, tuned=False, label="base> ")
        self.session.record(text, trained if self.session.tuned else base)

    def _stream(self, text: str, *, tuned: bool, label: str = "model> ") -> str:
        """Prints an answer as it comes, and after it what was logged; Ctrl-C ends it, what was said by then counts."""
        said: list[str] = []

        def on_text(piece: str) -> None:
            said.append(piece)
            print(piece, end="", flush=True)

        with held_back():
            print(label, end="", flush=True)
            try:
                answer = self.session.answer(text, tuned=tuned, on_text=on_text)
                print("" if answer else "(an empty answer)", flush=True)
            except KeyboardInterrupt:
                print(" … stopped", flush=True)
            except HalftuneError:
                print(flush=True)  # what is wrong is told on a line of its own
                raise
        return "".join(said)

    def _adapter(self, argument: str) -> None:
        if argument not in ("on", "off"):
            print("/adapter on, or /adapter off")
            return
        self.session.tuned = argument == "on"
        print("answers show the training" if self.session.tuned else "answers are the base model's")

    def _system(self, argument: str) -> None:
        self.session.system = argument
        print("system prompt set" if argument else "system prompt removed")

    def _reset(self, _: str) -> None:
        self.session.history.clear()
        self._last = ""
        print("the conversation is forgotten")
