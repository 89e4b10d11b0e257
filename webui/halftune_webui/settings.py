"""What the web UI may do and touch, decided before it starts and never by the browser."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from halftune.core.errors import ConfigError
from halftune.core.loopback import is_loopback

LANGUAGES = ("en", "zh")
HALFTUNE = (sys.executable, "-m", "halftune")
SHORTEST_PASSWORD = 8  # characters


@dataclass(frozen=True)
class Settings:
    """Limits of one web UI.

    Attributes:
        roots: folders (resolved) under which every path from the browser must lie.
        runs: the folder whose run folders are listed; it lies under a root.
        language: of the labels, one of ``LANGUAGES``.
        allow_remote_code: whether a recipe may run code that is not halftune's, or name a server that samples.
        program: what runs are started with, before the verb.
        export_choices: options of ``halftune export`` → the values that they take.
    """

    roots: tuple[Path, ...]  # the first one is the working directory
    runs: Path
    language: str = "en"
    allow_remote_code: bool = False
    program: tuple[str, ...] = HALFTUNE
    export_choices: dict[str, list[str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """For a process that goes on without the web UI."""
        return json.dumps({**vars(self), "roots": [str(root) for root in self.roots], "runs": str(self.runs)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What :meth:`to_json` wrote."""
        values = json.loads(text)
        roots, runs = tuple(map(Path, values.pop("roots"))), Path(values.pop("runs"))
        return cls(roots, runs, **{**values, "program": tuple(values["program"])})


def check_address(host: str, auth: tuple[str, str] | None) -> None:
    """Refuses to listen where others can reach the web UI without a password.

    Raises:
        ConfigError: the address is not one of this machine alone, and there is no password.
    """
    if auth is None and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and the web UI has no password",
            where="--host",
            remedy="add --auth user:password, or leave --host out and use an SSH tunnel",
            code="webui.bad_password",
        )


def read_auth(text: str) -> tuple[str, str]:
    """User and password from ``user:password``; the password may hold colons.

    Raises:
        ConfigError: one of the two is missing, or the password is short. The message does not repeat the text.
    """
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise ConfigError(
            "is not user:password",
            where="--auth",
            remedy="for example --auth me:a-long-password",
            code="webui.bad_password",
        )
    if len(password) < SHORTEST_PASSWORD:
        what = f"the password has {len(password)} characters; at least {SHORTEST_PASSWORD} are required"
        raise ConfigError(what, where="--auth", remedy="choose a longer password", code="webui.bad_password")
    return user, password
