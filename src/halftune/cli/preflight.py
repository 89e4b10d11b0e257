"""What would stop a run on this machine, told before anything heavy is imported: `plan` and `train` ask the same."""

from __future__ import annotations

from halftune.config.facts.model import ModelFacts
from halftune.config.load import LoadedConfig
from halftune.config.quantised import KEPT
from halftune.core.errors import MissingPackageError
from halftune.core.optional import pip_line, version_of
from halftune.data.preflight import look_over
from halftune.model.preflight import check_folders

_BITSANDBYTES = "bitsandbytes"


def check_inputs(loaded: LoadedConfig, facts: ModelFacts, *, here: bool = True) -> None:
    """Looks at the model's and tokenizer's folders, at the packages that the checkpoint needs, and at the data.

    Args:
        loaded: the recipe.
        facts: its model.
        here: whether the run is for this machine, whose packages then count.

    Raises:
        HalftuneError: what training would stop at; the first of it.
    """
    check_folders(loaded.run.model)
    if here and facts.quantization in KEPT and version_of(_BITSANDBYTES) is None:
        what = f"a checkpoint in {facts.quantization} needs the package {_BITSANDBYTES}"
        raise MissingPackageError(what, remedy=pip_line(_BITSANDBYTES))
    look_over(loaded.run)
