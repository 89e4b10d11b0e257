"""Serve results by the OpenAI API, with the dtypes of training: adapters by name beside their base model.

  halftune serve runs/mine                                      http://127.0.0.1:8000, models: mine and its base
  halftune serve runs/a runs/b --port 8001                      two adapters of one base, loaded once
  halftune serve runs/mine generation.temperature=0.7           defaults of requests that do not say otherwise
  HALFTUNE_API_KEY=... halftune serve runs/mine --host 0.0.0.0  other machines, with a key
  halftune serve runs/mine --print-command                      vLLM's command line, also where vLLM is not installed

vLLM serves where it is installed, on a GPU; transformers' continuous batching everywhere else.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from halftune.cli.overrides import port, positive
from halftune.core import log
from halftune.core.errors import ConfigError
from halftune.core.loopback import is_loopback
from halftune.core.optional import need, quick_imports
from halftune.model.result.completed_run import CompletedRun

KEY = "HALFTUNE_API_KEY"
_SHORTEST = 16  # characters of a key
_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune serve``."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR_OR_CONFIG", help="run folders of one base model; key=value changes all"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="0 selects a free port (default: %(default)s)")
    parser.add_argument(
        "--api-key-file", metavar="FILE", type=Path, help=f"key that clients must send; or ${KEY}; required with --host"
    )
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N",
        help="tokens of prompt and answer together (default: the model's context, at most 32768)",
    )  # fmt: skip
    parser.add_argument(
        "--max-body", type=positive, metavar="BYTES", help="of a request (default: 1 MiB, 32 MiB where media are taken)"
    )
    parser.add_argument(
        "--queue", type=positive, metavar="N", default=128, help="requests running or waiting (default: %(default)s)"
    )
    parser.add_argument(
        "--grace", type=positive, metavar="SECONDS", default=30,
        help="how long running requests may take after SIGTERM (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    parser.add_argument("--print-command", action="store_true", help="print vLLM's command line and exit")


def run(args: argparse.Namespace) -> int:
    """Check everything without torch, then load the model and serve until SIGTERM or Ctrl-C."""
    from halftune.serve.runs import open_runs

    log.configure()
    targets = [one for one in args.runs if not _OVERRIDE.match(one)]
    if not targets:
        what, remedy = "no run given", "name a run folder, as in halftune serve runs/mine"
        raise ConfigError(what, remedy=remedy, code="serve.no_run")
    key = _key(args)
    runs, base = open_runs(targets, [one for one in args.runs if _OVERRIDE.match(one)])
    if args.print_command or _engine(args.engine, next(iter(runs.values()))) == "vllm":
        return _vllm(args, runs, base, key)
    return _transformers(args, runs, base, key)


def _key(args: argparse.Namespace) -> str:
    """The key of clients; empty: none.

    Raises:
        ConfigError: the address needs one and there is none, or it is short.
    """
    where, key = f"${KEY}", os.environ.get(KEY, "")
    if args.api_key_file is not None:
        where = str(args.api_key_file)
        try:
            key = args.api_key_file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            what, remedy = f"cannot read the key: {error}", "name a text file with one line"
            raise ConfigError(what, where=where, remedy=remedy, code="serve.bad_key") from error
    remedy = (
        "use for example: python -c 'import secrets; print(secrets.token_urlsafe())' > key, then --api-key-file key"
    )
    if (key or args.api_key_file is not None) and (len(key) < _SHORTEST or not key.isascii() or not key.isprintable()):
        what = f"the key has {len(key)} characters; at least {_SHORTEST}, printable and ASCII, are required"
        raise ConfigError(what, where=where, remedy=remedy, code="serve.bad_key")
    if not key and not is_loopback(args.host):
        what = f"{args.host} can be reached from other machines, and there is no key"
        raise ConfigError(what, where="--host", remedy=remedy, code="serve.bad_key")
    return key


def _engine(asked: str, run: CompletedRun) -> str:
    if asked == "auto":
        return "vllm" if shutil.which("vllm") and run.plan.device.value in ("cuda", "rocm") else "transformers"
    return asked


def _vllm(args: argparse.Namespace, runs: dict[str, CompletedRun], base: str | None, key: str) -> int:
    """Print vLLM's command, or become it."""
    from halftune.serve.vllm import KEY as ITS_KEY
    from halftune.serve.vllm import vllm_command

    command = vllm_command(runs, base, host=args.host, port=args.port, max_tokens=args.max_tokens)
    if args.print_command:
        print(shlex.join(command))
        return 0
    program = shutil.which("vllm")
    if program is None:
        need("vllm", why="--engine vllm")
        what, remedy = "the package vllm is installed, but not its command", "add its folder to $PATH"
        raise ConfigError(what, where="--engine vllm", remedy=remedy, code="serve.vllm_unsupported")
    print(shlex.join(command), file=sys.stderr, flush=True)
    os.execve(program, command, {**os.environ, **({ITS_KEY: key} if key else {})})


def _transformers(args: argparse.Namespace, runs: dict[str, CompletedRun], base: str | None, key: str) -> int:
    """Load the model and serve; exit code 1 if requests were cut off."""
    need("uvicorn", why="serving")
    need("starlette", why="serving")
    from halftune.serve.server import listen, serve

    listening = listen(args.host, args.port)  # before minutes of loading
    with quick_imports():
        from halftune.serve.app import build_app
        from halftune.serve.engine import Engine

    engine = Engine(runs, base, args.max_tokens)
    try:
        body = args.max_body or (1 << 20 if engine.images is None else 1 << 25)
        door = build_app(engine, key=key, body=body, queue=args.queue)
        models = ", ".join(engine.models)
        cut = serve(door, listening, args.grace, lambda url: print(f"{url}/v1 · models: {models}", flush=True))
    finally:
        engine.close()
    if cut:
        logging.shutdown()
        os._exit(1)  # the interpreter would wait for a thread that renders a prompt
    return 0
