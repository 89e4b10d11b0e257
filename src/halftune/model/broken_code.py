"""Errors of code that comes with a checkpoint: which line of it, in a sentence."""

from __future__ import annotations

from pathlib import Path

from halftune.config.sections.model import ModelSection
from halftune.core.errors import HalftuneError, ModelError
from halftune.precision.trace.sources import written_in

BUILT = "the model cannot be built"


def broken(
    error: BaseException, section: ModelSection, folder: Path | None, failed: str = BUILT, since: str = ""
) -> HalftuneError:
    """What went wrong in someone else's code, and on which line of it.

    Args:
        error: as it was raised.
        section: names the model.
        folder: of the model, where no line of it is known.
        failed: what was being done, in words that say that it did not work.
        since: what else is known of the reason.
    """
    if isinstance(error, HalftuneError):
        return error
    first = (str(error).strip().split("\n") or [""])[0] or type(error).__name__
    remedy = "mend the model's code, or take a revision of it that runs"
    file, colon, line = last_line(error).rpartition(":")
    if "trust_remote_code" in str(error):
        first = "the checkpoint brings Python code of its own"
        remedy = "read it, then set model.trust_remote_code: true and model.revision to the commit that you read"
    elif isinstance(error, ImportError):
        failed, remedy = "the model's code cannot be imported", "install what it imports, or mend the model's code"
    elif isinstance(error, SyntaxError):  # its own words name a file that is none
        failed, first = "the model's code is no Python that can be read", error.msg
        file, colon, line = _unreadable(Path(section.name_or_path)) or file, ":", str(error.lineno)
    where = f"{written_in(file, section.name_or_path)}{colon}{line}" or (
        str(folder) if folder else section.name_or_path
    )
    return ModelError(
        f"{failed}: {type(error).__name__}: {first}{f' ({since})' if since else ''}", where=where, remedy=remedy
    )


def _unreadable(folder: Path) -> str:
    """The first Python file of a folder that is none; transformers parses them without a name."""
    for path in sorted(folder.glob("*.py")):
        try:
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return str(path)
    return ""


def last_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame in the model's own source."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        own = Path(file).name.startswith(("modeling_", "configuration_")) and not file.endswith("_utils.py")
        if (own and "heterogeneity" not in file) or "transformers_modules" in file:
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
