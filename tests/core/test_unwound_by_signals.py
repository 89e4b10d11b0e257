"""SIGTERM unwinds a process that cleans up behind itself."""

from __future__ import annotations

import signal

import pytest

from halftune.core.processes.signals import unwound_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_and_is_as_before_afterwards(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as end, unwound_by_signals():
            signal.raise_signal(number)
        assert end.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_ignored_and_handled_signals_stay_as_they_are() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwound_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
