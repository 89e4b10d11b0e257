"""halftune beside plain transformers, TRL, LLaMA-Factory, axolotl and torchtune: the same work, measured from outside.

  python scripts/bench/peers.py --work FOLDER --setup --data DATA     environments, models and data, once (about 10 GB)
  python scripts/bench/peers.py --work FOLDER --verify                do all do the same work? one sample, no learning
  python scripts/bench/peers.py --work FOLDER                         measure: JSON lines and tables
  python scripts/bench/peers.py --work FOLDER --only halftune torchtune --models 3M --precisions fp32 --rounds 3

DATA holds LLaMA-Factory's alpaca_en_demo.json and identity.json. Every framework has an environment of its own;
halftune is measured in the one that runs this script. They take turns, so that what else the machine does falls on all.
Speed is tokens that are not padding per CPU-second of the training process, without the first steps. Linux only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peer.environments import set_up
from peer.frameworks import FRAMEWORKS
from peer.job import Job
from peer.measure import run_measured, summary
from peer.tables import same_work, speeds

LENGTH, WARM_UP = 512, 2
# rows per step without and with packing, and measured steps: enough for a median, few enough for an evening
SIZES = {"3M": {"rows": 8, "packed_rows": 8, "steps": 20}, "25M": {"rows": 4, "packed_rows": 4, "steps": 8}}
VERIFIED_STEPS, NO_RATE = 4, 1e-12


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, models, data and runs")
    parser.add_argument("--setup", action="store_true", help="install the frameworks and make models and data")
    parser.add_argument("--data", type=Path, help="with --setup: folder with alpaca_en_demo.json and identity.json")
    parser.add_argument("--verify", action="store_true", help="compare what is computed instead of how fast")
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), help="frameworks")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--packing", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is measured")
    parser.add_argument("--steps", type=int, help=f"measured steps (after {WARM_UP} that warm up)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a run may take")
    parser.add_argument("--quiet", action="store_true", help="the tables only; the lines are in FOLDER all the same")
    return parser.parse_args()


def measure(name: str, model: str, precision: str, packed: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One run of one framework; its folder keeps the configuration and everything that it printed."""
    work, size = args.work.resolve(), SIZES[model]
    out = work / "runs" / f"{name}-{model}-{precision}-{'packed' if packed else 'padded'}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    steps = (VERIFIED_STEPS if args.verify else args.steps or size["steps"]) + WARM_UP
    job = Job(
        model=work / "fixture" / model,
        data=work / "fixture" / ("same" if args.verify else "data"),
        out=out,
        precision=precision,
        packed=packed,
        rows=size["packed_rows" if packed else "rows"],
        length=LENGTH,
        steps=steps,
        log_every=1 if args.verify else 10,
        learning_rate=NO_RATE if args.verify else 1e-3,
    )
    framework = FRAMEWORKS[name]
    command = framework.command(work / "environments" / name, job)
    found = summary(run_measured(command, out, threads=args.threads, timeout=args.timeout), WARM_UP)
    losses = framework.losses(out) if found["rc"] == 0 else []
    shutil.rmtree(out / "cache", ignore_errors=True)
    return {
        "framework": name,
        "model": model,
        "precision": precision,
        "packed": packed,
        "rows": job.rows,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        **found,
        "first_loss": losses[0] if losses else None,
        "mean_loss": sum(losses) / len(losses) if losses else None,
    }


def main() -> None:
    """Sets up, verifies or measures."""
    args = arguments()
    if args.setup:
        set_up(args.work.resolve(), args.data, args.only)
        return
    missing = [name for name in args.only if name != "halftune" and not (args.work / "environments" / name).is_dir()]
    if missing or not (args.work / "fixture").is_dir():
        sys.exit(f"not set up: {', '.join(missing) or 'models and data'} · --setup --data FOLDER does that")
    results = []
    lines = args.work / ("verified.jsonl" if args.verify else "measured.jsonl")
    for number in range(1 if args.verify else args.rounds):
        for model in args.models:
            for precision in args.precisions:
                for packing in args.packing:
                    for name in args.only:
                        if precision in FRAMEWORKS[name].cannot:
                            continue
                        result = {"round": number, **measure(name, model, precision, packing == "on", args)}
                        results.append(result)
                        print(json.dumps(result), file=sys.stderr if args.quiet else sys.stdout, flush=True)
                        with lines.open("a") as file:
                            file.write(json.dumps(result) + "\n")
    print("\n" + (same_work(results) if args.verify else speeds(results)))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))}: exit {error.returncode}")
