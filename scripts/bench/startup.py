"""What a command costs before it does its work: CPU-seconds of the whole process, median of several runs.

python scripts/bench/startup.py        a Markdown table on stdout
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from harness import cpu_seconds, head, row, write_lines

RUNS = 5
RECIPE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
precision: fp32
data: {train: rows.jsonl, max_length: 64}
training: {output_dir: run, max_steps: 1, save_steps: end}
"""
TRAIN = "train --config x.yaml training.output_dir=run{run}"
COMMANDS = {
    "`halftune --help`": "--help",
    "`train` with a misspelt key: all problems, exit 2": "train --config wrong.yaml",
    "`halftune plan`": "plan --config x.yaml",
    "`train`, one step of eight short rows, with report, plot and result": TRAIN,
}


def main() -> None:
    """Prints a row per command."""
    print(head("command", f"CPU-s, median of {RUNS}", "least … most"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lines(folder / "rows.jsonl", [{"prompt": "one", "completion": "two"}] * 8)
        (folder / "x.yaml").write_text(RECIPE)
        (folder / "wrong.yaml").write_text(RECIPE.replace("max_steps", "max_stepz"))
        for label, words in COMMANDS.items():
            command = [sys.executable, "-m", "halftune", *words.split()]
            times = [cpu_seconds([part.format(run=run) for part in command], folder) for run in range(RUNS + 1)][1:]
            print(row(label, f"{statistics.median(times):.2f}", f"{min(times):.2f} … {max(times):.2f}"), flush=True)


if __name__ == "__main__":
    main()
