"""What the board may do and touch, decided before it starts and never by the browser."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from halftune.core.errors import ConfigError

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Settings:
    """Limits of one board.

    Attributes:
        roots: folders (resolved) under which every path from the browser must lie.
        runs: the folder whose run folders are listed; it lies under a root.
        language: of the labels, one of ``LANGUAGES``.
        allow_remote_code: whether a recipe may say ``trust_remote_code: true``.
    """

    roots: tuple[Path, ...]
    runs: Path
    language: str = "en"
    allow_remote_code: bool = False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``; a name other than localhost counts as reachable from outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(host: str, auth: tuple[str, str] | None) -> None:
    """Refuses to listen where others can reach the board without a password.

    Raises:
        ConfigError: the address is not one of this machine alone, and there is no password.
    """
    if auth is None and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and the board has no password",
            where="--host",
            remedy="add --auth user:password, or leave --host out and use an SSH tunnel",
        )


def read_auth(text: str) -> tuple[str, str]:
    """User and password from ``user:password``; the password may hold colons.

    Raises:
        ConfigError: one of the two is missing. The message does not repeat the text.
    """
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise ConfigError("is not user:password", where="--auth", remedy="for example --auth me:a-long-password")
    return user, password
