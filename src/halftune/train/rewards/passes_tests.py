"""``passes_tests``: the share of tests in the column ``tests`` that an answer's Python code passes."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.train.rewards import RewardFunction
from halftune.train.rewards.sandbox import hides_files, isolates, run_python

log = get_logger(__name__)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def make(section: RewardFunctionSection, method: GrpoMethod) -> RewardFunction:
    """See ``REWARD_FUNCTIONS``. Says if the system cannot take the network from programs.

    Raises:
        ConfigError: running code is not allowed.
    """
    if not section.run_code:
        raise ConfigError("passes_tests runs code", remedy="set run_code: true", code="config.code_not_allowed")
    if not isolates():
        log.warning("this system does not isolate programs: code in answers can reach the network")
    if not hides_files():
        log.warning("this system has no Landlock: code in answers can read your files")

    def passes_tests(completions: Sequence[str], tests: Sequence[Any], **_: Any) -> list[float | None]:
        """The share of passed tests; None for a row without tests."""

        def score(pair: tuple[str, Any]) -> float | None:
            each = _listed(pair[1])
            return share_passed(code_of(pair[0]), each, section.seconds, section.memory_mib) if each else None

        found = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process
            for share in pool.map(score, zip(completions, tests, strict=True)):
                heartbeat.beat()
                found.append(share)
        return found

    return passes_tests


def _listed(tests: Any) -> list[str]:
    each = [tests] if isinstance(tests, str) else tests or []
    if not isinstance(each, list | tuple) or not all(isinstance(one, str) for one in each):
        raise ValueError("the column tests is a text of Python, or a list of them")
    return list(each)


def code_of(answer: str) -> str:
    """The last fenced block of Python in an answer, or all of it."""
    found = _BLOCK.findall(answer)
    return found[-1] if found else answer


def share_passed(code: str, tests: Sequence[str], seconds: float, memory_mib: int) -> float:
    """Runs the code, then each test, in one process; a test passes if it raises nothing."""
    mark = secrets.token_hex(8)  # what the code prints is not counted
    # local names: the code may define exec and print, or replace the built-in ones
    lines = ["def judge(run, tell, space):", f"    run({code!r}, space)"]
    for number, test in enumerate(tests):
        lines.append(f"    try:\n        run({test!r}, space)\n        tell('\\n{mark} {number}', flush=True)")
        lines.append("    except Exception:\n        pass")
    lines.append("judge(exec, print, {'__name__': '__main__'})")
    printed = run_python("\n".join(lines), seconds, memory_mib).splitlines()
    return sum(f"{mark} {number}" in printed for number in range(len(tests))) / len(tests)
