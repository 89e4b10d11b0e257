"""How fuzzing is done: few inputs, always the same, in the tests; thousands of new ones by ``scripts/fuzz.py``."""

from __future__ import annotations

import hashlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, Phase, settings
from patience import LIMIT

from halftune.core.errors import HalftuneError

# Share of the inputs that each kind of target gets, and how many it gets in the ordinary run of the tests.
TOTAL = os.environ.get("HALFTUNE_FUZZ_INPUTS")
Damage = Callable[[bytes], bytes]
ANSWERS: Counter[str] = Counter()  # how many inputs ended "well", how many were "refused"
# For one input, most of which take milliseconds: seconds of CPU, enough for a slow machine, and on the clock, where it
# may wait for others.
CPU_LIMIT, CLOCK_LIMIT = 60, LIMIT


def budget(share: float, few: int) -> settings:
    """How many inputs a test throws: ``few``, always the same, or its share of ``HALFTUNE_FUZZ_INPUTS`` new ones."""
    return settings(
        max_examples=few if TOTAL is None else max(1, round(share * int(TOTAL))),
        derandomize=TOTAL is None,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),  # a failing input is shown as it is: making it smaller takes long
        print_blob=TOTAL is not None,
        suppress_health_check=list(HealthCheck),  # type: ignore[arg-type]  # a metaclass's iterator
    )


class Hang(BaseException):
    """An input that took too long; no handler in between may take it for an ordinary error."""


def _alarm(number: int, frame: FrameType | None) -> None:
    seconds = f"{CLOCK_LIMIT} seconds" if number == signal.SIGALRM else f"{CPU_LIMIT} CPU-seconds"
    raise Hang(f"no answer in {seconds}")


@contextmanager
def _limited() -> Iterator[None]:
    timers = ((signal.SIGALRM, signal.ITIMER_REAL, CLOCK_LIMIT), (signal.SIGPROF, signal.ITIMER_PROF, CPU_LIMIT))
    before = [signal.signal(number, _alarm) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


@contextmanager
def answered() -> Iterator[None]:
    """Inside, whatever is done ends well or in a HalftuneError with a sentence, and in time."""
    said: HalftuneError | None = None
    try:
        with _limited():
            yield
    except HalftuneError as error:
        said = error
    ANSWERS["well" if said is None else "refused"] += 1
    assert said is None or (str(said).strip() and 1 <= said.exit_code < 70)


def fingerprint(folder: Path) -> dict[str, str]:
    """Name → sha256 of every file in a folder, locks apart."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }
