"""Remote code of checkpoints: its attention implementation, and its errors with the failing line."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from halftune.config.sections.model import ModelSection
from halftune.core.choice import ASKED
from halftune.core.errors import HalftuneError, ModelError
from halftune.core.log import get_logger
from halftune.model.files.architectures import remote_class
from halftune.plan import Plan
from halftune.precision.record.remote_files import written_in

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


def accept_arguments_of_peft(model: PreTrainedModel, section: ModelSection) -> None:
    """Leave out arguments that are None and that the model's own ``forward`` does not know; peft always passes some.

    Calling ``forward`` with an unknown argument that is something raises ModelError.
    """
    forward: Callable[..., Any] = model.forward
    known = inspect.signature(forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        if unknown := sorted(name for name, value in kwargs.items() if value is not None and name not in known):
            what = f"forward of {type(model).__name__} does not accept {', '.join(unknown)}"
            remedy = "add **kwargs to it, and pass them to the layers"
            raise ModelError(what, where=section.name_or_path, remedy=remedy, code="model.own_code_failed")
        return forward(*args, **{name: value for name, value in kwargs.items() if name in known})

    model.forward = named


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


log = get_logger(__name__)

_TRANSFORMERS = {"fa2": "flash_attention_2", "flex": "flex_attention", "sdpa": "sdpa"}
_INTERFACE = ("ALL_ATTENTION_FUNCTIONS", "AttentionInterface")


def attention_for(folder: Path, plan: Plan, registered: str) -> str:
    """The ``attn_implementation`` for remote code: ``registered`` if the code uses transformers' attention interface.

    Other code does not know our names. It gets transformers' name of the planned backend, if it declares support for
    it. The guard then wraps the flash_attn functions that it imports.

    Raises:
        Exception: any error of importing the code.
    """
    reference = remote_class(folder)
    assert reference is not None, "the folder has remote code"
    built = get_class_from_dynamic_module(reference, folder)
    if _asks_the_interface(built) and ("sdpa" not in registered or built._supports_sdpa):
        return registered
    softmax = plan.attention.softmax
    named = planned = _TRANSFORMERS.get(softmax.value, "eager")
    if planned == "flash_attention_2" and plan.attention.provider.value != "flash_attn":
        planned = "sdpa"  # such code imports the flash_attn package, not torch's kernels
    offered = _offered(built)
    chosen = planned if planned in offered else "sdpa" if "sdpa" in offered else "eager"
    say = log.warning if softmax.reason == ASKED and chosen != named else log.info
    say("%s has its own attention code: using attn_implementation=%s", built.__name__, chosen)
    return chosen


def _asks_the_interface(built: type[PreTrainedModel]) -> bool:
    """Whether a class uses transformers' attention interface: declared, inherited or named in its files."""
    derived = any(base.__module__.startswith("transformers.models.") for base in built.__mro__)
    if derived or built._supports_attention_backend:
        return True
    files = Path(str(sys.modules[built.__module__].__file__)).parent.glob("*.py")
    return any(name in file.read_text(encoding="utf-8") for file in files for name in _INTERFACE)


def _offered(built: type[PreTrainedModel]) -> set[str]:
    """The ``attn_implementation`` names that a class declares support for."""
    flash = built._supports_flash_attn or getattr(built, "_supports_flash_attn_2", False)
    has = {"flash_attention_2": flash, "flex_attention": built._supports_flex_attn, "sdpa": built._supports_sdpa}
    return {"eager", *(name for name, there in has.items() if there)}
