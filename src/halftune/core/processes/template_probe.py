"""Renders a chat template once in a separate process, with limits on memory and CPU time. Imports only Jinja.

Templates are part of untrusted checkpoints. Jinja's sandbox prevents access to files and code, but not endless loops or
gigabytes of text. Run as a program, this file reads ``{"template": …}`` from standard input and answers by exit code.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes

MEMORY, SECONDS, LENGTH = 1 << 30, 5, 1 << 20  # bytes of address space, of CPU time, characters of a template
_TOO_LARGE, _WAIT = 3, 120.0  # exit code; seconds of wall time, long enough for a busy machine


@lru_cache(maxsize=64)
def excess(template: str) -> str:
    """Describe which limit a template exceeds, as a clause; empty if it renders within the limits.

    Invalid templates, and those that reject the test conversations, pass: rendering reports them.
    """
    if len(template) > LENGTH:
        return f"has {len(template):,} characters; the maximum is {LENGTH:,}"
    try:
        given = json.dumps({"template": template})
        command = [sys.executable, "-I", __file__]
        done = subprocess.run(command, input=given, text=True, capture_output=True, timeout=_WAIT)
    except subprocess.TimeoutExpired:
        return f"was not rendered within {_WAIT:.0f} s, on a busy machine or without end"
    if done.returncode == _TOO_LARGE:
        return f"needs more than {MEMORY >> 30} GiB of memory to render a short conversation"
    if done.returncode == -signal.SIGXCPU:  # the soft limit of CPU time sends it
        return f"needs more than {SECONDS} s of CPU time to render a short conversation"
    if done.returncode < 0:
        return f"was not checked: signal {-done.returncode} ended the process that renders it"
    if done.returncode:
        return f"was not checked: {' '.join(done.stderr.strip().splitlines()[-1:])}"
    return ""


def _conversations() -> list[dict[str, Any]]:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}
    answer, tool = {"role": "assistant", "content": "4"}, {"name": "add", "parameters": {"type": "object"}}
    long = [system] + [user, answer] * 20
    return [
        {"messages": [user], "add_generation_prompt": True},
        {"messages": long},
        {"messages": [user, answer], "tools": [{"type": "function", "function": tool}]},
    ]


def _folds_too_much(tree: nodes.Template) -> bool:
    """Whether a constant expression exceeds the memory limit.

    Jinja evaluates constants at compile time, also in branches that are never rendered, and ignores failures.
    """
    from jinja2 import nodes

    for node in tree.find_all(nodes.Expr):
        try:
            node.as_const()
        except nodes.Impossible as error:
            if isinstance(error.__cause__, MemoryError):
                return True
    return False


def _main() -> int:
    import re

    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    source = json.load(sys.stdin)["template"]
    # a tag of transformers' own extension (AssistantTracker), which is unknown to Jinja
    source = re.sub(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}", "", source)
    # as transformers makes it: utils/chat_template_utils.py
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda _: "2000-01-01"}
    for conversation in _conversations():
        try:
            if _folds_too_much(environment.parse(source)):
                return _TOO_LARGE
            environment.from_string(source).render(bos_token="<s>", eos_token="</s>", **conversation)
        except MemoryError:
            return _TOO_LARGE
        except (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError):
            continue
    return 0


if __name__ == "__main__":
    sys.exit(_main())
