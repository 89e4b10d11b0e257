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

Every error is one line: where it is (file and line, row, key), what is wrong, and after the dot what to do.
The code in brackets names the kind of mistake; it stays when the sentence changes. `halftune explain CODE` says what it
means and how to fix it; [all codes](#error-codes) are at the end.
`python scripts/errors_page.py > docs/reference/errors.md` makes each of these mistakes and writes down the messages; a
test compares.

## Exit codes

| code | what it means |
|---|---|
| 0 | done |
"""
REST = """\
| 4 | `halftune convert`: the recipe would learn something else; nothing is written |
| 70 | a bug of ours: one sentence names the file with the traceback; please report it |
| 130, 143, 129 | stopped by Ctrl-C, SIGTERM, SIGHUP; training has saved a checkpoint and says where |
| 141 | the reader of the output has left, as in `halftune schema \\| head -1` |

## Where in the code

`--traceback` behind any verb, or `HALFTUNE_TRACEBACK=1`, shows the Python traceback of an error in front of its
sentence. Without it, the traceback of a bug goes into a file in `~/.cache/halftune/errors` (or the temporary folder),
with the versions and the command; the sentence names the file.

## What is loaded

Weights and adapters are read from safetensors, all else from JSON, on every path: training, going on, chat, export.
Pickles (`.bin`, `.pt`, `.pth`, `.ckpt`) can run code when they are loaded and are refused, with the command that
converts them. Python that comes with a checkpoint runs only where the recipe names the model and sets
`model.trust_remote_code: true`; for a hub model it must also name the commit in `model.revision` (a branch or tag can
move). Code that a checkpoint fetches from another repository is refused, because nothing pins it. The files that run
are listed, with their sha256.

## What is said
"""


def page(answers: Mapping[str, Answer]) -> str:
    """The page, from what each case was answered."""
    parts = [HEAD + "".join(_codes()) + REST]
    parts.append("Unless something else is shown, the recipe `x.yaml` is this one, with one thing changed, and")
    parts.append("`rows.jsonl` holds one good row.\n")
    parts.append(textwrap.indent(RECIPE, "    "))
    for heading, cases in GROUPS.items():
        parts.append(f"### {heading}\n")
        for case in cases:
            parts += _entry(case, answers[case.name])
    parts += ["## Error codes\n", "| code | what it means | how to fix it |\n|---|---|---|"]
    parts += [f"| `{each.code}` | {each.means} | {each.fix} |" for each in catalogue().values()]
    return "\n".join(parts) + "\n"


def _codes() -> Iterator[str]:
    """One row for each exit code of the tree of errors, with the kinds that leave with it."""
    bases = (errors.HalftuneError, errors.Problems)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind not in bases]
    found: dict[int, list[str]] = {}
    for kind in kinds:
        if issubclass(kind, errors.HalftuneError):
            found.setdefault(kind.exit_code, []).append(str(kind.__doc__).splitlines()[0].rstrip("."))
    for code, lines in sorted(found.items()):
        yield f"| {code} | {'; '.join(lines)} |\n"


def _entry(case: Case, answer: Answer) -> list[str]:
    message = answer.message
    if message.startswith("usage:"):
        message = message.splitlines()[-1]
    shown = textwrap.indent(f"$ {_program(case.command)}\n{message}".rstrip(), "    ")
    warned = " (a warning; the run goes on)" if answer.code == 0 else ""
    return [f"**{case.name[0].upper()}{case.name[1:]}** · exit code {answer.code}{warned}\n", f"{shown}\n"]


def _program(command: str) -> str:
    return command if command.startswith("train ") else f"halftune {command}"
