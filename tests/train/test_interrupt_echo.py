"""A scheduler that signals every process reaches one of several twice, by itself and through its launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from halftune.train.signals import interrupt
from halftune.train.signals.interrupt import SIGNALS, Interrupts


class Left(BaseException):
    """Stands for the end of the process."""


def leave(code: int) -> None:
    raise Left(code)


@pytest.fixture
def heard() -> Iterator[None]:
    """Signals have an effect, also where the tests themselves run in the background with some ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("launched", "second", "wait", "stays"),
    [
        ("TORCHELASTIC_RUN_ID", signal.SIGTERM, 5.0, True),
        ("HALFTUNE_SWEEP", signal.SIGTERM, 5.0, True),
        ("TORCHELASTIC_RUN_ID", signal.SIGTERM, 0.0, False),
        ("TORCHELASTIC_RUN_ID", signal.SIGINT, 5.0, False),
        ("", signal.SIGTERM, 5.0, False),
    ],
)
def test_the_same_signal_soon_after_is_its_echo(
    monkeypatch: pytest.MonkeyPatch, launched: str, second: signal.Signals, wait: float, stays: bool
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv(launched, "x")
    monkeypatch.setattr(interrupt, "ECHO", wait)
    monkeypatch.setattr(os, "_exit", leave)
    with Interrupts() as interrupts:
        interrupts.defer_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        if stays:
            os.kill(os.getpid(), second)
        else:
            with pytest.raises(Left, match=str(128 + second)):
                os.kill(os.getpid(), second)
        assert interrupts.received == signal.SIGTERM
