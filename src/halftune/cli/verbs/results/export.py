"""Export a run's result: the adapter merged into its base, verified against the unmerged model.

  halftune export runs/quickstart --output models/quickstart
  halftune export configs/quickstart.yaml --output models/quickstart --dtype fp32
  halftune export runs/quickstart/checkpoint-40 --output models/step-40     a checkpoint, sharded or not
  halftune export runs/quickstart --output models/gguf --format gguf        for llama.cpp and Ollama
  halftune export runs/quickstart --output models/small --quantize nf4      4 bits, for transformers and vLLM
  halftune export runs/quickstart --output models/mine --format adapter     for vLLM, beside the base model
  halftune export runs/quickstart --output models/mine --push me/mine       also to the Hugging Face Hub, private

The merge is computed in fp32. Weights are saved in the base checkpoint's dtype or in --dtype, and config.json records
it. Nothing is written if the merged model's logits differ by more than rounding explains.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import get_args

from halftune.core import log
from halftune.core.errors import ConfigError
from halftune.core.optional import UNUSED, quick_imports
from halftune.core.status import StatusFile, reported
from halftune.export.options import GgufType, Options, Quantised
from halftune.train.run_folder.checkpoints import state_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune export``."""
    parser.add_argument(
        "run", metavar="RUN_DIR_OR_CONFIG", help="a run folder, a checkpoint in it, or the YAML file of a finished run"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="format of the weights")
    parser.add_argument(
        "--format", choices=("folder", "gguf", "adapter"), default="folder", help="what is written; default folder"
    )
    parser.add_argument("--quantize", choices=get_args(Quantised), help="format of the linear layers in a folder")
    parser.add_argument("--gguf-type", choices=get_args(GgufType), help="of the weights in a GGUF file; default bf16")
    parser.add_argument("--status", metavar="FILE", type=Path, help="write progress to this JSON file")
    parser.add_argument("--force", action="store_true", help="replace an earlier export in DIR")
    parser.add_argument("--push", metavar="ORG/NAME", help="upload the export to the Hugging Face Hub, after asking")
    parser.add_argument("--public", action="store_true", help="anybody may read the repository; default private")
    parser.add_argument("--yes", action="store_true", help="upload without asking")


def run(args: argparse.Namespace) -> int:
    """Open the run and plan without torch, then merge, verify and write."""
    if args.status is None:
        return _export(args, None)
    with reported(StatusFile(args.status)) as status:
        return _export(args, status)


def _export(args: argparse.Namespace, status: StatusFile | None) -> int:
    from halftune.export.output import check_output, inputs_of, reserved
    from halftune.model.files.target import identify
    from halftune.model.result.completed_run import open_checkpoint, open_run

    log.configure()
    output, target = Path(os.path.expanduser(args.output)), identify(args.run, "run", "checkpoint")
    options = _options(args, output)
    with ExitStack() as stack:
        scratch = stack.enter_context(reserved(output.with_name(f"{output.name}.result")))
        if at_checkpoint := target.kind == "checkpoint":
            finished = open_checkpoint(target.path, args.overrides, scratch / "final")
        else:
            finished = open_run(str(target.path), args.overrides)
        if args.push is not None:
            from halftune.export.push import check_push

            check_push(args.push, force=args.force, public=args.public, confirmed=args.yes)
        check_output(finished.folder, finished.final, output, inputs_of(finished.loaded.run), force=args.force)

        with quick_imports(UNUSED if args.quantize else ()):
            from halftune.export.targets import export_target
            from halftune.train.checkpoint.to_result import write_result

        def progress(phase: str, step: int = 0, total: int = 0) -> None:
            if status is not None:
                status.tell(phase=phase, step=step, total=total, urgent=not step)

        if at_checkpoint:
            progress("loading")
            write_result(target.path, finished)
            finished = replace(finished, step=state_of(target.path)["step"])
        lines = export_target(finished, options, force=args.force, progress=progress)
    print("\n".join(lines))
    if args.push is not None:
        from halftune.export.push import push

        print(push(output, args.push, public=args.public, confirmed=args.yes))
    return 0


def _options(args: argparse.Namespace, output: Path) -> Options:
    """Return what was asked.

    Raises:
        ConfigError: an option has no effect beside another one.
    """
    conflicts = {
        "--quantize": args.quantize is not None and args.format != "folder",
        "--dtype": args.dtype is not None and (args.format != "folder" or args.quantize is not None),
        "--public": args.public and args.push is None,
        "--yes": args.yes and args.push is None,
        "--gguf-type": args.gguf_type is not None and args.format != "gguf",
    }
    for option, conflict in conflicts.items():
        if conflict:
            what, remedy = f"{option} has no effect beside the other options", f"leave {option} out"
            raise ConfigError(what, where=option, remedy=remedy, code="cli.option_conflict")
    return Options(output, args.quantize or args.format, args.dtype, args.gguf_type or "bf16")
