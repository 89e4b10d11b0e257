"""What a command costs before it does its work: CPU-seconds of the whole process, median of several runs.

python scripts/bench/startup.py        a Markdown table on stdout
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNS = 5
ROWS = '{"prompt": "one", "completion": "two"}\n' * 8
RECIPE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
precision: fp32
data: {train: rows.jsonl, max_length: 64}
training: {output_dir: run, max_steps: 1, save_steps: end}
"""


def cpu_seconds(arguments: list[str], folder: Path) -> float:
    """User and system time of ``python -m halftune`` with these arguments, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "halftune", *arguments], cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints a row per command."""
    print(f"| command | CPU-s, median of {RUNS} | least … most |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text(ROWS)
        (folder / "x.yaml").write_text(RECIPE)
        (folder / "wrong.yaml").write_text(RECIPE.replace("max_steps", "max_stepz"))
        commands = {
            "`halftune --help`": ["--help"],
            "`train` with a misspelt key: all problems, exit 2": ["train", "--config", "wrong.yaml"],
            "`halftune plan`": ["plan", "--config", "x.yaml"],
            "`train`, one step of eight short rows, with report, plot and result": [
                "train",
                "--config",
                "x.yaml",
                "training.output_dir=run{run}",
            ],
        }
        for label, arguments in commands.items():
            times = [cpu_seconds([part.format(run=run) for part in arguments], folder) for run in range(RUNS + 1)][1:]
            print(f"| {label} | {statistics.median(times):.2f} | {min(times):.2f} … {max(times):.2f} |", flush=True)


if __name__ == "__main__":
    main()
