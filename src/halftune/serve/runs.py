"""Which runs are served together, without torch: adapters of one base under names of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halftune.core.errors import ConfigError, ModelError, PlanError
from halftune.core.log import get_logger
from halftune.model.files.result import FINAL
from halftune.model.result.completed_run import CompletedRun, open_run

log = get_logger(__name__)
# Keys of ``data`` by which the first run's processor takes media for all.
_MEDIA = (
    "media", "image_min_pixels", "image_max_pixels", "video_fps", "video_max_frames", "video_min_pixels",
    "video_max_pixels", "audio_max_seconds",
)  # fmt: skip
_SHARED = ("storage", "trainable", "compute", "autocast")  # dtypes that models of one base have in common


def open_runs(targets: Sequence[str], overrides: Sequence[str] = ()) -> tuple[dict[str, CompletedRun], str | None]:
    """The runs by the names under which they are served, and the name of the base.

    Args:
        targets: run folders or configs.
        overrides: ``key=value`` changes to each run's configuration.

    Returns:
        Name of the run folder → run. The base's name is None if it is not served: it is not loaded for a full model.

    Raises:
        ConfigError: two names are equal.
        ModelError: a run writes no answers, or the runs do not share one base.
        HalftuneError: a run cannot be opened.
    """
    opened = [_open(target, overrides) for target in targets]
    first = opened[0]
    for run in opened:
        _check_writes(run)
        _check_same_base(first, run)
    base = _base_name(first.loaded.run.model.name_or_path) if first.is_adapter else None
    names = [run.folder.resolve().name for run in opened]
    twice = [name for name in names if names.count(name) > 1 or name == base]
    if twice:
        what, remedy = f"two models would be named {twice[0]}", "rename a run folder"
        raise ConfigError(what, where=twice[0], remedy=remedy, code="serve.duplicate_name")
    return dict(zip(names, opened, strict=True)), base


def _open(target: str, overrides: Sequence[str]) -> CompletedRun:
    """A run, with SDPA if its model can use it, since that serves several requests at once."""
    run = open_run(target, overrides)
    asked = any(one.startswith(("attention=", "attention.")) for one in overrides)
    if asked or run.plan.attention.softmax.value == "sdpa" or run.loaded.run.data.media:
        return run
    try:
        return open_run(target, [*overrides, "attention=sdpa"])
    except PlanError as error:
        log.info("%s", error)
        return run


def _base_name(model: str) -> str:
    """The name of a base: its hub id, or that of its folder or run."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    return folder.resolve().parent.name if folder.name == FINAL else folder.resolve().name


def _check_writes(run: CompletedRun) -> None:
    if run.plan.method.head.value == "score":
        what = "the result is a reward model, which scores answers and generates no text"
        remedy = "load it with transformers' AutoModelForSequenceClassification"
        raise ModelError(what, where=str(run.final), remedy=remedy, code="infer.reward_model")


def _check_same_base(first: CompletedRun, run: CompletedRun) -> None:
    """Compare what a shared base must have in common.

    Raises:
        ModelError: names the first difference.
    """
    if run is first:
        return
    remedy = "serve it by a process of its own, with another --port"
    if not (first.is_adapter and run.is_adapter):
        full = first if not first.is_adapter else run
        what = f"{full.folder} is a full model, which shares its weights with no other run"
        raise ModelError(what, where=str(run.folder), remedy=remedy, code="serve.different_base")
    of_first, of_run = first.loaded.run, run.loaded.run
    pairs = [(f"precision {name}", *(getattr(one.plan.precision, name).value for one in (first, run))) for name in
             _SHARED]  # fmt: skip
    pairs += [(key, getattr(of_first.model, key), getattr(of_run.model, key)) for key in
              ("name_or_path", "revision", "quantization", "parts")]  # fmt: skip
    pairs += [(f"data.{key}", getattr(of_first.data, key), getattr(of_run.data, key)) for key in _MEDIA]
    # a run without them would answer with rows that its tokenizer does not have
    pairs.append(("tokens.add", *(list(one.model.tokens.add) for one in (of_first, of_run))))
    for key, ours, other in pairs:
        if ours != other:
            what = f"{key} is {ours} in {first.folder.name} and {other} in {run.folder.name}"
            raise ModelError(what, where=str(run.folder), remedy=remedy, code="serve.different_base")
