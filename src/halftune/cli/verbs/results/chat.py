"""Chat with a run's result, with the dtypes of training.

halftune chat runs/quickstart                                 interactive; /help lists the commands
halftune chat configs/quickstart.yaml                         the same run by its recipe
halftune chat runs/quickstart/checkpoint-40                   a checkpoint; also an adapter or model folder
halftune chat runs/quickstart --prompt "How wide is bf16?"    print one answer and exit
halftune chat runs/quickstart --prompt "..." --base           the base model's answer
halftune chat runs/vision --image cat.jpg --prompt "What is this?"
halftune chat runs/quickstart generation.temperature=0.7 attention=sdpa
halftune chat runs/quickstart --json-lines                    for programs: requests and answers as JSON lines
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from halftune.core import log
from halftune.core.errors import ConfigError, ModelError
from halftune.core.optional import quick_imports
from halftune.core.processes.signals import unwound_by_signals

if TYPE_CHECKING:
    from halftune.model.result.completed_run import CompletedRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune chat``."""
    parser.add_argument(
        "run", metavar="RUN", help="a run folder, its YAML file, a checkpoint, an adapter folder or a model folder"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration, for this chat")
    parser.add_argument("--prompt", metavar="TEXT", help="answer this once and exit; - reads standard input")
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="an image of --prompt; may be repeated"
    )
    parser.add_argument(
        "--video", metavar="FILE", action="append", default=[], help="a video of --prompt; may be repeated"
    )
    parser.add_argument(
        "--audio", metavar="FILE", action="append", default=[], help="a sound of --prompt; may be repeated"
    )
    parser.add_argument(
        "--json-lines", action="store_true", help="read requests from standard input, write answers to standard output"
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    parser.add_argument("--base", action="store_true", help="answer with the base model (adapter off)")


def run(args: argparse.Namespace) -> int:
    """Open the run and plan without torch, then load the model and answer."""
    from halftune.train.checkpoint.open_target import open_target

    text = _prompt(args)
    log.configure()
    with unwound_by_signals(), TemporaryDirectory() as scratch:
        finished, _ = open_target(args.run, args.overrides, Path(scratch) / "final")
        return _chat(args, text, finished)


def _chat(args: argparse.Namespace, text: str | None, finished: CompletedRun) -> int:
    if finished.plan.method.head.value == "score":
        what = "the result is a reward model, which scores answers and generates no text"
        remedy = "load it with transformers' AutoModelForSequenceClassification"
        raise ModelError(what, where=str(finished.final), remedy=remedy, code="infer.reward_model")

    with quick_imports():
        from halftune.infer.repl import Repl
        from halftune.infer.session import open_session

    session = open_session(finished)
    session.system, session.tuned = args.system, not args.base
    for kind, paths in (("image", args.image), ("video", args.video), ("audio", args.audio)):
        for path in paths:
            session.attach(path, kind)
    if text is not None:
        print(session.answer(text, tuned=session.tuned))
        return 0
    if args.json_lines:
        from halftune.infer.lines import serve

        serve(session, sys.stdin, sys.stdout)
        return 0
    print(_headline(finished))
    Repl(session).loop()
    return 0


def _prompt(args: argparse.Namespace) -> str | None:
    """The text of ``--prompt``, or of standard input for ``-``."""
    text = sys.stdin.read().strip() if args.prompt == "-" else args.prompt
    if text is not None and not text.strip():
        where = "standard input" if args.prompt == "-" else "--prompt"
        what = "the prompt is empty"
        raise ConfigError(what, where=where, remedy='use for example --prompt "What is len?"', code="infer.no_prompt")
    return text


def _headline(finished: CompletedRun) -> str:
    precision, base = finished.plan.precision, finished.loaded.run.model.name_or_path
    result = f"{base} + {finished.final}" if finished.is_adapter else str(finished.final)
    autocast = f", autocast {precision.compute.value}" if precision.autocast.value else ""
    return f"{result} · weights {precision.storage.value}{autocast} · {finished.plan.device.value}"
