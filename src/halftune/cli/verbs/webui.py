"""Start the web UI: edit recipes, see their plans, train, watch runs, chat with results.

halftune webui                                        for this machine only: http://127.0.0.1:7860
halftune webui --port 8000 --runs runs --root ~/data  recipes may also use files under ~/data
halftune webui --lang zh                              中文
halftune webui --host 0.0.0.0 --auth me:password      for other machines; requires a password
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from halftune.cli.overrides import port
from halftune.cli.verbs.results import export
from halftune.core.errors import ConfigError
from halftune.core.optional import need

AUTH = "HALFTUNE_WEBUI_AUTH"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halftune webui``."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=7860, help="0 selects a free port (default: %(default)s)")
    parser.add_argument(
        "--auth", metavar="USER:PASSWORD", help=f"required login; ${AUTH} hides it from the process list"
    )
    parser.add_argument("--runs", metavar="FOLDER", default="runs", help="folder of run folders (default: %(default)s)")
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="also allow recipes to use files under this folder, besides the working directory; may be repeated",
    )
    parser.add_argument("--lang", choices=("en", "zh"), help="language of the labels (default: $LANG, else English)")
    parser.add_argument(
        "--allow-remote-code", action="store_true", help="allow code that is not halftune's, and servers that sample"
    )


def run(args: argparse.Namespace) -> int:
    """Check address and folders without Gradio, then serve until interrupted."""
    from halftune_webui.settings import Settings, check_address, read_auth

    text = args.auth or os.environ.get(AUTH)
    auth = read_auth(text) if text else None
    check_address(args.host, auth)
    roots = tuple(_folder(name) for name in (".", *args.root))
    runs = Path(os.path.realpath(os.path.expanduser(args.runs)))
    if not any(runs.is_relative_to(root) for root in roots):
        roots = (*roots, runs)
    language = args.lang or ("zh" if os.environ.get("LANG", "").startswith("zh") else "en")
    settings = Settings(roots, runs, language, args.allow_remote_code, export_choices=_export_choices())
    need("gradio", why="the web UI")

    from halftune_webui.server import serve

    serve(settings, args.host, args.port, auth, ready=lambda address: print(f"halftune webui: {address}", flush=True))
    return 0


def _export_choices() -> dict[str, list[str]]:
    """Return the options of ``halftune export`` that have choices: the page offers what the verb takes."""
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    options = [one for one in parser._actions if one.option_strings and one.choices]
    return {one.option_strings[0]: list(one.choices or ()) for one in options}


def _folder(name: str) -> Path:
    path = Path(os.path.realpath(os.path.expanduser(name)))
    if not path.is_dir():
        raise ConfigError(
            "not a folder", where=f"--root {name}", remedy="use an existing folder", code="webui.no_such_folder"
        )
    return path
