"""Reports errors of a checkpoint's remote code with the failing line."""

from __future__ import annotations

from pathlib import Path

from halftune.config.sections.model import ModelSection
from halftune.core.errors import HalftuneError, ModelError
from halftune.precision.trace.sources import written_in

BUILT = "the model cannot be built"


def remote_code_error(
    error: BaseException, section: ModelSection, folder: Path | None, failed: str = BUILT, since: str = ""
) -> HalftuneError:
    """The error for an exception in a model's code, with the failing line.

    Args:
        error: the exception.
        section: the model's config.
        folder: the model's folder, if no line is known.
        failed: the operation that failed, as a clause.
        since: more about the cause.
    """
    if isinstance(error, HalftuneError):
        return error
    first = str(error).strip().partition("\n")[0] or type(error).__name__
    remedy = "fix the model's code, or use a working revision"
    file, colon, line = last_line(error).rpartition(":")
    if "trust_remote_code" in str(error):
        first = "the checkpoint requires remote code"
        remedy = "review it, then set model.trust_remote_code: true and model.revision to the reviewed commit"
    elif isinstance(error, ImportError):
        failed, remedy = "the model's code cannot be imported", "install the missing packages, or fix the model's code"
    elif isinstance(error, SyntaxError):  # its message names a file that does not exist
        failed, first = "syntax error in the model's code", error.msg
        file, colon, line = _unreadable(Path(section.name_or_path)) or file, ":", str(error.lineno)
    where = f"{written_in(file, section.name_or_path)}{colon}{line}" or (
        str(folder) if folder else section.name_or_path
    )
    return ModelError(
        f"{failed}: {type(error).__name__}: {first}{f' ({since})' if since else ''}",
        where=where,
        remedy=remedy,
        code="model.own_code_failed",
    )


def _unreadable(folder: Path) -> str:
    """The first Python file with a syntax error; transformers' error does not name it."""
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
