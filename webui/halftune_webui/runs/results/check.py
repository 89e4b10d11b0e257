"""The check of an export: ``halftune verify`` against the run that it was made of."""

from __future__ import annotations

from pathlib import Path

from halftune.core.errors import ConfigError, MissingPackageError
from halftune.core.optional import pip_line, version_of
from halftune_webui.paths import check_links, inside
from halftune_webui.runs import start_stop
from halftune_webui.runs.results.export import output_of, run_of
from halftune_webui.runs.results.job import begin
from halftune_webui.runs.state import is_live
from halftune_webui.runs.stored import check_model
from halftune_webui.settings import Settings

_LLAMA = "llama-cpp-python"


def folder_of_check(job: Path) -> Path:
    """The job folder of an export's check."""
    return job / "check"


def start(settings: Settings, job: Path) -> None:
    """Start the check of an export, or start it again.

    Args:
        settings: limits of the web UI.
        job: the folder of the export's notes, which anybody may have written.

    Raises:
        HalftuneError: its run or its output lie outside the web UI's folders or are gone, the check runs already, or
            the package that reads the output is not installed.
    """
    run, output = start_stop.find(settings, run_of(job)), inside(settings.roots, output_of(job))
    if is_live(folder_of_check(job)):
        raise ConfigError("is being checked already", where=str(output), code="webui.run_active")
    if not output.is_dir():
        what = "the exported folder is gone"
        raise ConfigError(what, where=str(output), remedy="export again", code="verify.target_unusable")
    check_model(settings, run)
    check_links(settings.roots, output)
    begin(settings, folder_of_check(job), "verify", str(run), "--against", str(_target(output)), "--json")


def _target(output: Path) -> Path:
    """What the verb takes: the GGUF file in the folder, if there is one.

    Raises:
        MissingPackageError: nothing here reads such a file.
    """
    files = sorted(output.glob("*.gguf"))
    if files and version_of(_LLAMA) is None:
        what = f"verify against a GGUF file requires package {_LLAMA}"
        raise MissingPackageError(what, where=str(files[0]), remedy=pip_line(_LLAMA), code="core.package_missing")
    return files[0] if files else output
