"""Uploads an export to the Hugging Face Hub: asked before anything is merged, shown and confirmed before it is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of httpx or httpx2, by the hub's version
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from halftune.core.errors import ConfigError, ModelError
from halftune.verify.probes import PROBES

Ask = Callable[[str], str]


def check_push(repo: str, *, force: bool, public: bool, confirmed: bool) -> None:
    """Check that a repository can be created with this machine's token, before the work begins.

    Args:
        repo: ``ORG/NAME``.
        force: allow a repository that exists.
        public: allow one that anybody may read.
        confirmed: nobody needs to be asked.

    Raises:
        ConfigError: the name is not valid, or there is nobody to ask.
        ModelError: no token, the repository exists or is public, or the hub cannot be reached.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise _bad(str(error).splitlines()[0], "write ORG/NAME") from error
    if repo.count("/") != 1:
        raise _bad(f"{repo!r} is no name of a repository", "write ORG/NAME")
    if not confirmed and not sys.stdin.isatty():
        raise _bad("nobody can confirm the upload: standard input is no terminal", "add --yes")
    if get_token() is None:
        remedy = "log in with `hf auth login`, or set HF_TOKEN"
        raise ModelError("no token of the hub on this machine", where=repo, remedy=remedy, code="export.no_token")
    private = _is_private(repo, public=public)
    if private is not None and not force:
        remedy = "choose another name, or add --force to add a commit to it"
        raise ModelError("the repository exists", where=repo, remedy=remedy, code="export.repo_exists")


def push(folder: Path, repo: str, *, public: bool, confirmed: bool, ask: Ask = input) -> str:
    """Upload all files of a folder; the repository is private unless asked otherwise.

    Args:
        folder: the export.
        repo: ``ORG/NAME``.
        public: anybody may read it.
        confirmed: do not ask.
        ask: reads a line from the user.

    Returns:
        a line for the terminal.

    Raises:
        ModelError: the hub refuses it or cannot be reached, or the repository has become public.
    """
    # probes are rows of the user's data
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != PROBES]
    shown = "\n".join(f"  {path.relative_to(folder)}  {path.stat().st_size:,} bytes" for path in files)
    private = _is_private(repo, public=public)
    kind = "private" if private or (private is None and not public) else "public"
    print(f"to {constants.ENDPOINT}/{repo} ({kind}):\n{shown}")
    if not confirmed and ask("upload? [y/N] ").strip().lower() not in ("y", "yes"):
        return f"not uploaded; the export is in {folder}"
    with _reported(repo):
        api = HfApi()
        if private is None:
            api.create_repo(repo, private=not public)
        message, left_out = "halftune export", [PROBES, f"*/{PROBES}"]
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, ignore_patterns=left_out)
    return f"uploaded {len(files)} files: {constants.ENDPOINT}/{repo} ({kind})"


def _is_private(repo: str, *, public: bool) -> bool | None:
    """Whether an existing repository is private, which an upload does not change; None: it does not exist.

    Raises:
        ModelError: it is public and ``public`` is not set, or the hub cannot be reached.
    """
    with _reported(repo):
        try:
            private = bool(HfApi().repo_info(repo).private)
        except RepositoryNotFoundError:
            return None
    if not private and not public:
        remedy = "choose another name, or add --public"
        what = "the repository exists and is public"
        raise ModelError(what, where=repo, remedy=remedy, code="export.repo_exists")
    return private


@contextmanager
def _reported(repo: str) -> Iterator[None]:
    """Raise the hub's errors as ours."""
    try:
        yield
    except (HTTPError, OfflineModeIsEnabled, OSError) as error:
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if status in (401, 403):
            remedy = "use a token with write access to this organisation"
            raise ModelError(f"refused: {first}", where=repo, remedy=remedy, code="export.push_refused") from error
        remedy = "check network, HF_ENDPOINT and HF_HUB_OFFLINE; the export itself is kept"
        what = f"cannot reach the hub: {first}"
        raise ModelError(what, where=repo, remedy=remedy, code="model.hub_unreachable") from error


def _bad(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, where="--push", remedy=remedy, code="cli.bad_option_value")
