"""Chat in a terminal: reads lines, streams answers, runs commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial

from halftune.core.errors import HalftuneError
from halftune.core.log import held_back
from halftune.core.table import did_you_mean
from halftune.infer.session import ChatSession

HELP = """\
/adapter on|off   answer with the trained or the base model
/compare [TEXT]   show both answers to TEXT, or to the last question
/image PATH       attach an image to the next message
/video PATH       attach a video to the next message
/audio PATH       attach a sound to the next message
/system [TEXT]    set the system prompt; without TEXT remove it
/reset            start a new conversation
/help             show this list
/quit             exit (also Ctrl-D); Ctrl-C stops an answer"""


class Repl:
    """A chat in a terminal."""

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self._last = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "adapter": self._adapter,
            "compare": self._compare,
            **{kind: partial(self._attach, kind) for kind in ("image", "video", "audio")},
            "system": self._system,
            "reset": self._reset,
            "help": lambda _: print(HELP),
        }

    def loop(self) -> None:
        """Read and handle lines until the end of input or /quit."""
        with contextlib.suppress(ImportError):  # line editing and history, if available
            import readline  # noqa: F401
        print("type /help for commands")
        while True:
            try:
                line = input("\nyou> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(exit with /quit or Ctrl-D)")
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self.handle(line)

    def handle(self, line: str) -> None:
        """Handle a command or a message; prints errors."""
        try:
            if not line.startswith("/"):
                self._answer(line)
                return
            name, _, argument = line[1:].partition(" ")
            if name in self._commands:
                self._commands[name](argument.strip())
            else:
                print(f"unknown command /{name} · {did_you_mean(name, [*self._commands, 'quit'])}")
        except HalftuneError as error:
            print(error, file=sys.stderr)

    def _answer(self, text: str) -> None:
        self._last = text
        self.session.record(text, self._stream(text, tuned=self.session.tuned))

    def _compare(self, text: str) -> None:
        again = not text
        text = text or self._last
        if not text:
            print("nothing to compare yet · use /compare TEXT, or ask a question first")
            return
        if again and self.session.history:  # ask the same question at the same point of the conversation
            del self.session.history[-2:]
        self._last = text
        trained = self._stream(text, tuned=True, label="trained> ")
        base = self._stream(text, tuned=False, label="base> ")
        self.session.record(text, trained if self.session.tuned else base)

    def _stream(self, text: str, *, tuned: bool, label: str = "model> ") -> str:
        """Print an answer while it is generated, then the held-back log; Ctrl-C stops it and keeps the partial text."""
        said: list[str] = []

        def on_text(piece: str) -> None:
            said.append(piece)
            print(piece, end="", flush=True)

        with held_back():
            print(label, end="", flush=True)
            try:
                answer = self.session.answer(text, tuned=tuned, on_text=on_text)
                print("" if answer else "(empty answer)", flush=True)
            except KeyboardInterrupt:
                print(" … stopped", flush=True)
            except HalftuneError:
                print(flush=True)  # print the error on its own line
                raise
        return "".join(said)

    def _adapter(self, argument: str) -> None:
        if argument not in ("on", "off"):
            print("use /adapter on or /adapter off")
            return
        self.session.tuned = argument == "on"
        print("using the trained model" if self.session.tuned else "using the base model")

    def _attach(self, kind: str, argument: str) -> None:
        if not argument:
            print(f"use /{kind} PATH")
            return
        medium = self.session.attach(_unquoted(argument), kind)
        pixels, seconds = f"{medium.width} × {medium.height} pixels", f"{medium.seconds:.1f} s"
        shown = {"image": pixels, "video": f"{pixels}, {seconds}", "audio": seconds}
        print(f"attached: {shown[kind]}")

    def _system(self, argument: str) -> None:
        self.session.system = argument
        print("system prompt set" if argument else "system prompt removed")

    def _reset(self, _: str) -> None:
        self.session.history.clear()
        self.session.attached.clear()
        self._last = ""
        print("new conversation")


def _unquoted(path: str) -> str:
    """A path without the quotes that a shell would need."""
    return path[1:-1] if path[:1] in ("'", '"') and path[:1] == path[-1:] and len(path) > 2 else path
