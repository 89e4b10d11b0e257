"""docs/reference/errors.md: exit codes, and the exact message of every bad input in the table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from bad_inputs.case import RECIPE, Answer, Case
from bad_inputs.table import GROUPS

from halftune.core import errors
from halftune.core.error_codes import catalogue

HEAD = """\
# Errors

An error is one line: the place (file and line, row or key), the problem, and the remedy after `·`. The code in brackets
identifies the kind of error. It stays the same when the text changes. `halftune explain CODE` prints meaning and
remedy; [all codes](#error-codes) are at the end.

`python scripts/errors_page.py > docs/reference/errors.md` triggers each error below and records its message. A test
compares the page with the program.

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
"""
REST = """\
| 70 | A bug in halftune; the message names the file with the traceback. Please report it |
| 130, 143, 129 | Stopped by Ctrl-C, SIGTERM, SIGHUP; training has saved a checkpoint and printed its path |
| 141 | The reader of the output has closed the pipe, as in `halftune schema \\| head -1` |

## Tracebacks

`--traceback` after any verb, or `HALFTUNE_TRACEBACK=1`, prints the Python traceback before the message. Without it, the
traceback of a bug is written to a file in `~/.cache/halftune/errors` (or the temporary folder), with the versions and
the command. The message names the file.

## Pickles and remote code

Weights and adapters are read from safetensors, everything else from JSON. This holds for training, resume, chat and
export.

| | |
|---|---|
| pickles (`.bin`, `.pt`, `.pth`, `.ckpt`) | refused: they can execute code. The message has a conversion command |
| Python code of a checkpoint | runs only with `model.trust_remote_code: true` and, for a hub model, a pinned commit |
| code that a checkpoint fetches from another repository | refused, because it is not pinned |
| code that runs | is listed with its SHA-256 |

`model.revision` pins a commit. A branch or tag is refused, because it can move.

## Messages
"""


def page(answers: Mapping[str, Answer]) -> str:
    """The page, from what each case was answered."""
    parts = [HEAD + "".join(_codes()) + REST]
    parts.append(
        "Each example changes one thing in this recipe `x.yaml`, or in `rows.jsonl`, which holds one valid row.\n"
    )
    parts.append(textwrap.indent(RECIPE, "    "))
    for heading, cases in GROUPS.items():
        parts.append(f"### {heading}\n")
        for case in cases:
            parts += _entry(case, answers[case.name])
    parts += ["## Error codes\n", "| code | meaning | remedy |\n|---|---|---|"]
    parts += [f"| `{each.code}` | {each.means} | {each.fix} |" for each in catalogue().values()]
    return "\n".join(parts) + "\n"


def _codes() -> Iterator[str]:
    """One row for each exit code of the error classes: the first sentence of each class with that code."""
    bases = (errors.HalftuneError, errors.Problems)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind not in bases]
    found: dict[int, list[str]] = {}
    for kind in kinds:
        if issubclass(kind, errors.HalftuneError):
            found.setdefault(kind.exit_code, []).append(
                str(kind.__doc__).splitlines()[0].partition(". ")[0].rstrip(".")
            )
    for code, verb in (
        (4, "`halftune convert`: the recipe would learn something else"),
        (4, "`halftune certify`: a no"),
        (4, "`halftune evaluate`: a score beyond its limit"),
    ):
        found[code].append(verb)
    for code, lines in sorted(found.items()):
        yield f"| {code} | {'; '.join(lines)} |\n"


def _entry(case: Case, answer: Answer) -> list[str]:
    message = answer.message
    if message.startswith("usage:"):
        message = message.splitlines()[-1]
    shown = textwrap.indent(f"$ {_program(case.command)}\n{message}".rstrip(), "    ")
    warned = " (a warning; the run goes on)" if answer.code == 0 else ""
    return [f"**{_title(case.name)}** · exit code {answer.code}{warned}\n", f"{shown}\n"]


def _title(name: str) -> str:
    return name if name.startswith(("bf16", "fp16", "config.json")) else f"{name[0].upper()}{name[1:]}"


def _program(command: str) -> str:
    return command if command.startswith("train ") else f"halftune {command}"
