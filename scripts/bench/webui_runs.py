"""What a page's look at many runs costs: the first one, one at nothing new, a search, new steps.

python scripts/bench/webui_runs.py --runs 1000 --steps 200
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from halftune.core.status import NAME, StatusFile
from halftune_webui.labels import load_words
from halftune_webui.runs.controller import RunsController, View, refresh
from halftune_webui.runs.view.metrics import Metrics
from halftune_webui.settings import Settings


def main() -> None:
    """Prints medians in seconds of CPU time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(args.runs):
            make(root / f"run-{number:02d}", args.steps, living=number == 0)
        measure(root, args.steps)


def make(run: Path, steps: int, *, living: bool) -> None:
    """A run folder as training leaves it."""
    run.mkdir()
    (run / "resolved.yaml").write_text("model: {name_or_path: builtin:qwen2-tiny}\n")
    (run / "plan.json").write_text(json.dumps({"model": "m", "precision": {"compute": {"value": "bf16"}}}))
    (run / "metrics.jsonl").write_text("".join(map(line, range(1, steps + 1))))
    status = {"step": steps, "total": 2 * steps, "loss": 1.0}
    if living:
        StatusFile(run / NAME).tell(state="running", **status)
    else:
        StatusFile(run / NAME).tell(state="finished", process="gone", **status)
        (run / "finished.json").write_text(json.dumps({"step": steps}))


def line(step: int) -> str:
    """A line of metrics."""
    values = {"step": step, "epoch": step / 1000, "loss": 2 + math.sin(step), "learning_rate": 1e-4, "grad_norm": 1.5}
    more = {"tokens": 4096, "tokens_real": 4000, "tokens_trained": 2000, "seconds": 0.5, "memory_bytes": 10**10}
    return json.dumps({**values, **more, "time": 1e9 + step}) + "\n"


def measure(root: Path, steps: int) -> None:
    """The list, and the curves of one run."""
    controller, view = RunsController(Settings((root,), root), load_words("en")), View()
    run = root / "run-00"

    def look() -> None:
        refresh(controller, view)

    def search() -> None:
        view.search("run-00", "")
        refresh(controller, view)

    print(f"page, first look:        {spent(look, 1):.4f} s")
    print(f"page, nothing new:       {spent(look, 15):.4f} s")
    print(f"search:                  {spent(search, 15):.4f} s")
    metrics = Metrics(run)

    def curves() -> None:
        metrics.update()
        json.dumps([metrics.line("run", name, smooth=True) for name in metrics.charts()])

    print(f"curves, first look:      {spent(curves, 1):.4f} s")

    def grown() -> None:
        nonlocal steps
        steps += 1
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(steps))
        metrics.update()

    print(f"metrics, one new step:   {spent(grown, 15):.4f} s")
    print(f"curves, drawn again:     {spent(curves, 15):.4f} s")


def spent(action: Callable[[], None], times: int) -> float:
    """Median CPU seconds."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
