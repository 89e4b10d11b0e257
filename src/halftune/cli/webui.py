"""The whole job in a browser: write a recipe, see its plan, train, watch, talk to the result.

halftune webui                                        on this machine only: http://127.0.0.1:7860
halftune webui --port 8000 --runs runs --root ~/data  recipes may also name what lies under ~/data
halftune webui --lang zh                              中文
halftune webui --host 0.0.0.0 --auth me:password      for other machines; refused without a password
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from halftune.core.errors import ConfigError
from halftune.core.optional import need

AUTH = "HALFTUNE_WEBUI_AUTH"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``halftune webui``."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--auth", metavar="USER:PASSWORD", help=f"ask for it; ${AUTH} keeps it out of the process list")
    parser.add_argument("--runs", metavar="FOLDER", default="runs", help="where run folders are (default: %(default)s)")
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="recipes may name files under this folder, too; the working directory is always allowed; may be repeated",
    )
    parser.add_argument("--lang", choices=("en", "zh"), help="language of the labels (default: $LANG, else English)")
    parser.add_argument(
        "--allow-remote-code", action="store_true", help="let recipes run Python code that comes with a checkpoint"
    )


def run(args: argparse.Namespace) -> int:
    """Checks the address and the folders first, without Gradio; then serves until interrupted."""
    from halftune_webui.settings import Settings, check_address, read_auth

    text = args.auth or os.environ.get(AUTH)
    auth = read_auth(text) if text else None
    check_address(args.host, auth)
    roots = tuple(_folder(name) for name in (".", *args.root))
    runs = Path(os.path.realpath(os.path.expanduser(args.runs)))
    if not any(runs.is_relative_to(root) for root in roots):
        roots = (*roots, runs)
    language = args.lang or ("zh" if os.environ.get("LANG", "").startswith("zh") else "en")
    settings = Settings(roots, runs, language, args.allow_remote_code)
    need("gradio", why="the web board")

    from halftune_webui.server import serve

    serve(settings, args.host, args.port, auth, ready=lambda address: print(f"halftune webui: {address}", flush=True))
    return 0


def _folder(name: str) -> Path:
    path = Path(os.path.realpath(os.path.expanduser(name)))
    if not path.is_dir():
        raise ConfigError("is no folder", where=f"--root {name}", remedy="name a folder that is there")
    return path
