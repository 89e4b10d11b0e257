"""The command line. A verb's module is imported only when that verb runs, so that help needs no torch."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from halftune import __version__
from halftune.cli.failure import drop_output, open_streams, tell, wants_traceback
from halftune.core.errors import HalftuneError
from halftune.core.table import did_you_mean

# verb → (module with add_arguments(parser) and run(args) -> exit code, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "train": ("halftune.cli.train", "train from a YAML file: plan, load, train, save, report"),
    "launch": ("halftune.cli.launch", "print the command that starts every process of a run, or a template around it"),
    "plan": ("halftune.cli.plan", "show every decision about a run and its reason, without loading anything"),
    "doctor": ("halftune.cli.doctor", "look at the environment, and trace which line promotes a tensor, without a GPU"),
    "data": ("halftune.cli.data", "show the data report and samples with their trained tokens coloured"),
    "bench": ("halftune.cli.bench", "measure how fast recipes train here, beside each other: tokens/s, MFU, memory"),
    "chat": ("halftune.cli.chat", "talk to a run's result, with the adapter on or off"),
    "export": ("halftune.cli.export", "merge an adapter into its base model, checked against the unmerged one"),
    "webui": ("halftune.cli.webui", "the whole job in a browser, on this machine only unless told otherwise"),
    "convert": ("halftune.cli.convert", "translate a LLaMA-Factory, axolotl or TRL config into ours"),
    "schema": ("halftune.cli.schema", "print the JSON Schema of the configuration"),
}

# What torch and its libraries read from the environment as they are imported, unless the user has said otherwise.
BEFORE_TORCH = {
    # Threads that wait for each other by spinning make a CPU run many times slower as soon as anything else uses the
    # cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN keeps a compiled product with its workspace for each shape that it has met, 1,024 of them, and torch its
    # own objects beside those. Batches of different lengths bring new shapes at every step: in bf16 on a CPU a small
    # model's process doubled in 80 steps and went on growing. Making them anew was not measurably slower.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in VERBS.items())
    return (
        "usage: halftune VERB [options]     halftune VERB --help explains a verb\n\n"
        "Fine-tune language models from one YAML file; every number format is decided before a weight is read.\n\n"
        f"verbs:\n{verbs}\n\n"
        "start here:\n"
        "  halftune train --config configs/quickstart.yaml\n"
        "  halftune plan --config configs/quickstart.yaml --hardware t4"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``halftune``; leaves the process with the exit code."""
    open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        sys.exit(0)
    if arguments[0] in ("-V", "--version"):
        print(f"halftune {__version__}")
        sys.exit(0)
    verb, *rest = arguments
    if verb not in VERBS:
        print(f"halftune: unknown verb {verb!r} · {did_you_mean(verb, VERBS)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(_run(verb, rest))


def train_main() -> None:
    """Entry point of ``train``: the same as ``halftune train``."""
    open_streams()
    sys.exit(_run("train", sys.argv[1:]))


def _run(verb: str, arguments: Sequence[str]) -> int:
    for name, value in BEFORE_TORCH.items():
        os.environ.setdefault(name, value)
    module_name, line = VERBS[verb]
    show = wants_traceback("--traceback" in arguments)
    try:
        module = importlib.import_module(module_name)
        parser = argparse.ArgumentParser(
            prog=f"halftune {verb}", description=module.__doc__ or line, allow_abbrev=False
        )
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(parser)
        parser.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
        args, unknown = parser.parse_known_intermixed_args(arguments)
        if unknown and "overrides" in args:
            from halftune.cli.overrides import refuse_options

            refuse_options(unknown, arguments)
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        try:
            code = module.run(args)
        except HalftuneError as error:
            from halftune.cli.overrides import place

            place(error, args)
            raise
        sys.stdout.flush()  # here, where a reader that has left or a full disk can still be told
        return code
    except BrokenPipeError:  # the reader of our output (head, less) has left
        drop_output()
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # the last line of defence: no user reads a traceback that nobody asked for
        return tell(error, verb, show=show)
