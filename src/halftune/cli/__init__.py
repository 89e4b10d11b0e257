"""The command line. A verb's module is imported only when the verb runs, so that help does not import torch.

In: the command line.
Out: an exit code; errors with their place, remedy and code.
Imported by: `__main__`, `api`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from halftune import __version__
from halftune.cli.failure import drop_output, open_streams, report_error, wants_traceback
from halftune.core.errors import HalftuneError
from halftune.core.table import did_you_mean

# verb → (module with add_arguments(parser) and run(args) -> exit code, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "train": ("halftune.cli.verbs.train", "train from a YAML file: plan, load, train, save, report"),
    "launch": (
        "halftune.cli.verbs.launch",
        "start a run on several devices or nodes; print its command, or a job for a scheduler",
    ),
    "plan": ("halftune.cli.verbs.plan", "show every decision about a run with its reason, without loading the model"),
    "doctor": ("halftune.cli.verbs.doctor", "check the environment; find the lines that promote dtypes, without a GPU"),
    "certify": ("halftune.cli.verbs.certify", "try every promise on a model type, without its weights"),
    "data": ("halftune.cli.verbs.data", "show the data report, and samples with trained tokens highlighted"),
    "bench": ("halftune.cli.verbs.bench", "compare the training speed of recipes: tokens/s, MFU, memory"),
    "chat": ("halftune.cli.verbs.results.chat", "chat with a run's result, with the adapter on or off"),
    "evaluate": (
        "halftune.cli.verbs.results.evaluate",
        "measure results beside their base models: loss, answers, tasks; exit codes for CI",
    ),
    "export": ("halftune.cli.verbs.results.export", "merge an adapter into its base model, and verify the logits"),
    "serve": (
        "halftune.cli.verbs.results.serve",
        "serve results by the OpenAI API, several adapters of one base by name",
    ),
    "verify": ("halftune.cli.verbs.results.verify", "prove that what is served is what was trained"),
    "webui": ("halftune.cli.verbs.webui", "start the web UI, by default for this machine only"),
    "convert": ("halftune.cli.verbs.convert", "convert a LLaMA-Factory, axolotl or TRL config"),
    "recipes": ("halftune.cli.verbs.recipes", "list the recipes that come with halftune, or copy one"),
    "schema": ("halftune.cli.verbs.schema", "print the JSON Schema of the configuration"),
    "explain": ("halftune.cli.verbs.explain", "explain an error code and its fix"),
}

# Environment variables for child processes, torch and its libraries, unless set by the user.
BEFORE_TORCH = {
    # ``python -m`` searches the working directory first: a yaml.py beside a recipe would run in our child processes.
    "PYTHONSAFEPATH": "1",
    # Busy-waiting threads make a CPU run many times slower if other processes use the cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN caches compiled matmuls with their workspaces for 1,024 shapes, and torch has its own cache. Batches of
    # different lengths have new shapes at every step: in bf16 on a CPU the memory of a small model's process doubled in
    # 80 steps and kept growing. Smaller caches were not measurably slower.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in VERBS.items())
    return (
        "usage: halftune VERB [options]     help for a verb: halftune VERB --help\n\n"
        "Fine-tune language models from one YAML file; every dtype is decided before a weight is read.\n\n"
        f"verbs:\n{verbs}\n\n"
        "examples:\n"
        "  halftune train --config configs/quickstart.yaml\n"
        "  halftune plan --config configs/quickstart.yaml --hardware t4"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``halftune``; exits with the exit code."""
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
    sys.exit(run_verb(verb, rest))


def run_verb(verb: str = "train", arguments: Sequence[str] | None = None) -> int:
    """Run a verb, by default ``train`` with the arguments of this process; returns the exit code."""
    open_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    for name, value in BEFORE_TORCH.items():
        os.environ.setdefault(name, value)
    if sys.flags.optimize > 1:
        what = "Python runs without docstrings (PYTHONOPTIMIZE=2 or -OO), which transformers reads"
        print(f"halftune {verb}: {what} · unset it", file=sys.stderr)
        return 2
    show = wants_traceback("--traceback" in arguments)
    try:
        module, args = _parsed(verb, arguments)
        try:
            code = module.run(args)
        except HalftuneError as error:
            from halftune.cli.overrides import place

            place(error, args)
            if vars(args).get("json") and not vars(args).get("answered"):
                print(json.dumps({"error": error.to_dict()}, indent=2, ensure_ascii=False))
            raise
        sys.stdout.flush()  # here, so that a closed pipe or a full disk is still reported
        return code
    except BrokenPipeError:  # the reader of our output (head, less) exited
        drop_output()
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # no traceback unless requested
        return report_error(error, verb, show=show)


train_main = run_verb  # the command `train`; it exits with what is returned


def _parsed(verb: str, arguments: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """A verb's module and options.

    Raises:
        ConfigError: they contain an option of another framework.
    """
    module_name, line = VERBS[verb]
    module = importlib.import_module(module_name)
    parser = argparse.ArgumentParser(prog=f"halftune {verb}", description=module.__doc__ or line, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    args, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown and "overrides" in args:
        from halftune.cli.overrides import refuse_options

        refuse_options(unknown, arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return module, args
