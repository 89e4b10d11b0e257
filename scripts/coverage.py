"""Counts how many recipes of other frameworks in a folder convert, and which keys stand in the way.

python scripts/coverage.py FOLDER
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from halftune.config.load import read_draft
from halftune.convert.convert import Converted, convert_file
from halftune.core.errors import ConfigError

SHOWN = 25  # keys in each list


def problems(converted: Converted) -> list[str]:
    """The codes of what makes a converted recipe invalid, files and the machine left out."""
    with tempfile.TemporaryDirectory() as folder:
        draft = read_draft(Path(folder) / "recipe.yaml", converted.yaml, look_at_files=False)
    return [problem.code for problem in draft.problems]


def main() -> None:
    """Print status counts, then the keys by number of recipes, and by recipes that only they hold back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    counts, invalid = Counter[str](), Counter[str]()
    keys = {"refused": Counter[str](), "changed": Counter[str]()}
    alone = Counter[str]()
    for path in sorted(args.folder.rglob("*.y*ml")):
        try:
            converted = convert_file(path)
        except ConfigError as error:
            counts[f"no training config ({error.code})"] += 1
            continue
        counts[converted.status] += 1
        found = {kind: {note.key for note in converted.of(kind)} for kind in keys}
        for kind, names in found.items():
            keys[kind].update(names)
        lost = found["refused"] | found["changed"]
        if len(lost) == 1:
            alone.update(lost)
        if converted.status != "refused":
            invalid.update(set(problems(converted)))
    for title, counter in (
        ("status", counts), ("refused by", keys["refused"]), ("approximate by", keys["changed"]),
        ("nothing but", alone), ("invalid recipes", invalid),
    ):  # fmt: skip
        print(f"\n{title}")
        for name, count in counter.most_common(SHOWN):
            print(f"{count:>6}  {name}")


if __name__ == "__main__":
    main()
