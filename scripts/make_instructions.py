"""Makes the shipped instruction set ``builtin:python-docs`` from the docstrings of Python's standard library.

    python scripts/make_instructions.py [OUTPUT]

Each row is a question about a module, class, function or method and the first paragraph of its docstring. The result
depends on the Python version that runs this (the shipped file: 3.11) and on nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "src/halftune/data/builtin/python_docs.jsonl"
ROWS = 1500
MIN_ANSWER, MAX_ANSWER = 18, 400

MODULES = """
abc argparse array ast asyncio base64 bisect builtins bz2 calendar cmath codecs collections colorsys concurrent.futures
configparser contextlib copy csv dataclasses datetime decimal difflib dis email.message enum fileinput fnmatch fractions
ftplib functools gc getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies
importlib inspect io ipaddress itertools json keyword linecache locale logging lzma mailbox math mimetypes
multiprocessing numbers operator os os.path pathlib pdb pickle pkgutil platform plistlib pprint profile queue quopri
random re sched secrets select shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string
struct subprocess symtable sys tarfile tempfile textwrap threading time timeit token tokenize traceback tracemalloc
types typing unicodedata unittest unittest.mock urllib.parse urllib.request uuid venv warnings wave weakref webbrowser
xml.etree.ElementTree xmlrpc.client zipapp zipfile zlib
""".split()  # noqa: SIM905

STYLES = {
    "function": ("What does {name} do?", "Explain {name}.", "What is {name} for?", "Describe {name} in Python."),
    "class": ("What is {name}?", "Explain the class {name}.", "What is {name} for?", "Describe {name} in Python."),
    "module": (
        "What is the module {name} for?",
        "Explain Python's module {name}.",
        "What does the module {name} offer?",
    ),
}


def things() -> Iterator[tuple[str, str, object]]:
    """(kind, dotted name, object) of everything public."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        yield "module", module_name, module
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, member in sorted(vars(module).items()):
            if name.startswith("_") or inspect.ismodule(member):
                continue
            if inspect.isclass(member):
                if issubclass(member, BaseException) and module_name != "builtins":
                    continue
                yield "class", prefix + name, member
                for method, value in sorted(vars(member).items()):
                    if not method.startswith("_") and (
                        callable(value) or isinstance(value, (classmethod, staticmethod))
                    ):
                        yield "function", f"{prefix}{name}.{method}", value
            elif callable(member):
                yield "function", prefix + name, member


def answer(thing: object) -> str:
    """The first paragraph of prose in a docstring, on one line; "" where it will not do."""
    text = inspect.getdoc(thing) or ""
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        line = re.sub(r"^[\w.]+\([^)]*\)\s*(->\s*[\w\[\], .]+?)?\s*(?:--|:)\s*", "", line)  # a signature in front
        line = re.sub(r"``?([^`']+?)(``?|')", r"\1", line)
        line = re.sub(r":\w+:", "", line)
        if re.match(r"^[\w.]+\(", line):
            continue
        if not (MIN_ANSWER <= len(line) <= MAX_ANSWER and line.isascii() and line[0].isalpha()):
            return ""
        if any(mark in line for mark in ("<", ">>>", "`")) or line.endswith(":"):
            return ""
        line = line[0].upper() + line[1:]
        return line if line[-1] in ".!?" else f"{line}."
    return ""


def rows() -> list[tuple[str, dict[str, str]]]:
    """All (kind, question and answer); no answer and no object twice."""
    seen: set[str] = set()
    made = []
    for kind, name, thing in things():
        text = answer(thing)
        if not text or text in seen:
            continue
        seen.add(text)
        styles = STYLES[kind]
        row = {"instruction": styles[len(made) % len(styles)].format(name=name), "output": text}
        made.append(("method" if re.search(r"(^|\.)[A-Z]\w*\.\w", name) else kind, row))
    return made


def choose(found: list[tuple[str, dict[str, str]]]) -> list[dict[str, str]]:
    """All modules, classes and functions, then as many methods as there is room for, thinned out evenly."""
    chosen = {index for index, (kind, _) in enumerate(found) if kind == "module"}
    for kinds in (("class", "function"), ("method",)):
        places = [index for index, (kind, _) in enumerate(found) if kind in kinds]
        room = min(ROWS - len(chosen), len(places))
        chosen |= {places[number * len(places) // room] for number in range(room)}
    return [found[index][1] for index in sorted(chosen)]


def main() -> None:
    """Writes the set."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    chosen = choose(rows())
    lines = [json.dumps(row, ensure_ascii=True) + "\n" for row in chosen]
    output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(chosen)} rows, {sum(map(len, lines)):,} bytes: {output}")


if __name__ == "__main__":
    main()
