"""Write a run's result as a plain model: the adapter merged into its base, checked against the unmerged forward.

  halftune export runs/quickstart --output models/quickstart
  halftune export configs/quickstart.yaml --output models/quickstart --dtype fp32

The merge is done in fp32. Weights are stored in the base checkpoint's own dtype unless --dtype says otherwise, and
config.json names it. Nothing is written when the merged model answers differently than rounding explains.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from halftune.core import log
from halftune.core.startup import quick_imports
from halftune.core.status import StatusFile, told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``halftune export``."""
    parser.add_argument("run", metavar="RUN_DIR_OR_CONFIG", help="a run folder, or the YAML file of a finished run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="format of the weights")
    parser.add_argument("--status", metavar="FILE", type=Path, help="keep a JSON file of how far it is, for programs")
    parser.add_argument("--force", action="store_true", help="replace an earlier model in DIR")


def run(args: argparse.Namespace) -> int:
    """Finds the run and plans without torch; then merges, checks and writes."""
    if args.status is None:
        return _export(args, None)
    with told(StatusFile(args.status)) as status:
        return _export(args, status)


def _export(args: argparse.Namespace, status: StatusFile | None) -> int:
    from halftune.export.output import check_output
    from halftune.model.finished import open_run

    log.configure()
    output = Path(os.path.expanduser(args.output))
    finished = open_run(args.run, args.overrides)
    check_output(finished, output, force=args.force)

    with quick_imports():
        from halftune.export.merged import export_run

    def progress(phase: str, step: int = 0, total: int = 0) -> None:
        if status is not None:
            status.tell(phase=phase, step=step, total=total, urgent=not step)

    export = export_run(finished, output, args.dtype, force=args.force, progress=progress)
    print(export.describe())
    return 0
