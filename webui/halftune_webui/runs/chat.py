"""A chat with a run's result: a process that holds the model, spoken to in lines of JSON; gone when nobody needs it."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from halftune.core.errors import HalftuneError
from halftune_webui.runs.detached import environment
from halftune_webui.runs.log_tail import cause_in, split_code
from halftune_webui.settings import HALFTUNE

IDLE = 600.0  # seconds without a question after which the model's memory is given back


class Chat:
    """One process, one model. It ends with this process, too: its input ends then.

    Attributes:
        run: whose result is talked to.
    """

    def __init__(self, run: Path, idle: float = IDLE) -> None:
        self.run, self.idle = run, idle
        # open as long as the process
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*HALFTUNE, "chat", str(run), "--json-lines"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env=environment(),
            text=True,
            encoding="utf-8",
        )
        self._turn = threading.Lock()  # one answer at a time
        self._writing = threading.Lock()
        self._number = 0
        self._timer: threading.Timer | None = None
        self._ready: dict[str, Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def ready(self) -> dict[str, Any]:
        """Waits until the model is loaded; what it is and how it computes.

        Raises:
            HalftuneError: it cannot be loaded.
        """
        with self._turn:
            if self._ready is None:
                self._ready = self._event()
                self._rest()
            return self._ready

    def answer(
        self, messages: list[dict[str, Any]], *, adapter: bool, generation: dict[str, Any]
    ) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yields ``(the answer so far, None)`` as it comes, last ``(the answer, the closing event)``.

        Raises:
            HalftuneError: the request is wrong, or the process is gone.
        """
        self.ready()
        with self._turn:
            self._awake()
            self._number += 1
            number, said = self._number, ""
            self._write({"id": number, "messages": messages, "adapter": adapter, "generation": generation})
            try:
                while True:
                    event = self._event()
                    if event.get("id") not in (number, None):
                        continue  # of an answer that was left
                    if event["event"] == "error":
                        raise HalftuneError(event["message"], code=event["code"])
                    if event["event"] == "end":
                        yield event["answer"], event
                        return
                    said += event["text"]
                    yield said, None
            finally:
                self._rest()

    def stop(self) -> None:
        """Ends the answer that is being given."""
        if self.alive:
            self._write({"stop": True})

    def close(self) -> None:
        """Ends the process."""
        self._awake()
        self._process.kill()
        self._process.wait()

    def _write(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._writing:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._gone() from error

    def _event(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:  # something that a library printed
                continue
            if isinstance(event, dict) and "event" in event:
                return event
        raise self._gone()

    def _gone(self) -> HalftuneError:
        self._process.wait()
        self._errors.seek(0)
        said = split_code(cause_in(self._errors.read().decode(errors="replace")))
        what = said.text or "the model's process has ended"
        return HalftuneError(what, remedy="load the model again", code=said.code or "webui.verb_failed")

    def _rest(self) -> None:
        self._timer = threading.Timer(self.idle, self.close)
        self._timer.daemon = True
        self._timer.start()

    def _awake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
