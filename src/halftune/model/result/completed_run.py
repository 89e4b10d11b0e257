"""Opens a finished run and resolves its inference plan on this machine, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from halftune.config.facts.folder import check_adapter
from halftune.config.facts.folder import read_json as read_config
from halftune.config.facts.model import ModelFacts
from halftune.config.facts.safetensors_headers import main_format, read_header
from halftune.config.load import LoadedConfig, load_run
from halftune.config.reading.names import looks_local
from halftune.config.reading.overrides import COMMAND_LINE
from halftune.config.recipe_facts import run_facts
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.core.choice import Format
from halftune.core.errors import ConfigError, ModelError, PlanError
from halftune.core.files import read_json
from halftune.core.log import get_logger
from halftune.hardware import Hardware
from halftune.hardware.probe import probe
from halftune.model.files.result import FINAL, check_result
from halftune.model.files.target import RESOLVED, identify
from halftune.plan import Plan, resolve
from halftune.plan.inference import resolve_inference

log = get_logger(__name__)

_SETTLED = ("model.tokenizer", "model.chat_template", "model.tokens", "adapter", "method", "training")  # and below
_OPEN = ("training.allow_changes", "training.per_device")  # of these, what a result may be used with


@dataclass(frozen=True)
class CompletedRun:
    """A run with a result.

    Attributes:
        loaded: the resolved configuration with the caller's overrides.
        folder: the run folder.
        plan: the inference plan on this machine; for a checkpoint, the training plan.
        is_adapter: whether ``final`` contains an adapter (else a full model).
        place: folder of the result; None for ``final`` in the run folder.
        step: of the checkpoint that is exported; None: the result is that of the run.
        plain: no run made it: the configuration names its tokenizer and chat template.
    """

    loaded: LoadedConfig
    folder: Path
    plan: Plan
    is_adapter: bool
    place: Path | None = None
    step: int | None = None
    plain: bool = False

    @property
    def final(self) -> Path:
        """Folder of the trained adapter or model."""
        return self.place or self.folder / FINAL

    @property
    def result(self) -> ModelSection:
        """The model to load: an adapter's base or the trained model, with the run's tokenizer."""
        base = self.loaded.run.model
        changes: dict[str, object] = {} if self.plain else {"tokenizer": str(self.final), "chat_template": None}
        if not self.is_adapter:
            changes |= {"name_or_path": str(self.final), "revision": None}
        return base.model_copy(update=changes)

    @property
    def any_base(self) -> bool:
        """Whether the caller allows a changed base model."""
        asked = self.loaded.origins["training.allow_changes"] == COMMAND_LINE
        return asked and "model" in self.loaded.run.training.allow_changes


def open_run(target: str, overrides: Sequence[str] = (), *, packed: bool = False) -> CompletedRun:
    """Open the finished run of a folder or a config.

    Args:
        target: a run folder, its ``final`` folder, or a YAML config (its ``training.output_dir`` is the run folder).
        overrides: ``key=value`` changes to the run's configuration for this session, e.g. ``attention=sdpa``.
        packed: as of ``resolve_inference``.

    Raises:
        ModelError: there is no run, it has no result yet, or the result was modified.
        ConfigError: an override asks for another result than the run has.
        HalftuneError: this machine cannot run the configuration.
    """
    folder = identify(target, "run").path
    loaded = load_run(folder, overrides, look_at_files=False)  # the training data may be absent
    check_settled(loaded)
    final = folder / FINAL
    is_adapter = (final / "adapter_config.json").is_file()
    if not is_adapter and not (final / "config.json").is_file():
        remedy = f"finish training: train --config {folder / 'config.yaml'}"
        what = "the run has no result yet (no final/)"
        raise ModelError(what, where=str(folder), remedy=remedy, code="model.run_unfinished")
    check_result(folder)
    if is_adapter:
        _check_base(loaded, final)
    return with_inference_plan(loaded, folder, is_adapter=is_adapter, packed=packed)


def with_inference_plan(
    loaded: LoadedConfig,
    folder: Path,
    place: Path | None = None,
    *,
    is_adapter: bool,
    packed: bool = False,
    plain: bool = False,
) -> CompletedRun:
    """Plan how a result answers on this machine.

    Args:
        loaded, folder, place, is_adapter, plain: as :class:`CompletedRun` has them.
        packed: as of ``resolve_inference``.

    Raises:
        HalftuneError: this machine cannot run the configuration.
    """
    final = place or folder / FINAL
    section = loaded.run.model if is_adapter else loaded.run.model.model_copy(update={"name_or_path": str(final)})
    stored = _adapter_format(final) if is_adapter else None
    plan = partial(resolve_inference, adapter=stored, packed=packed)
    made = _plan(loaded, run_facts(loaded.run, section), folder, plan)
    return CompletedRun(loaded, folder, made, is_adapter, place, plain=plain)


def open_checkpoint(checkpoint: Path, overrides: Sequence[str], place: Path) -> CompletedRun:
    """Open a checkpoint as if the run had ended there.

    Args:
        checkpoint: a folder in the run folder.
        overrides: as :func:`open_run`'s.
        place: folder for its result.

    Raises:
        ModelError: the checkpoint is not in a run folder.
        HalftuneError: this machine cannot run the configuration.
    """
    folder = checkpoint.resolve().parent
    if not (folder / RESOLVED).is_file():
        what, remedy = "the checkpoint lies in no run folder", f"move it into its run folder, beside {RESOLVED}"
        raise ModelError(what, where=str(checkpoint), remedy=remedy, code="config.not_a_run_folder")
    loaded = load_run(folder, overrides, look_at_files=False)
    check_settled(loaded)
    plan = _plan(loaded, run_facts(loaded.run), folder, resolve)
    return CompletedRun(loaded, folder, plan, loaded.run.adapter.type != "none", place)


def check_settled(loaded: LoadedConfig, keys: tuple[str, ...] = _SETTLED) -> None:
    """Refuse overrides of settled keys, which would be ignored, or change what was trained.

    Raises:
        ConfigError: names the first.
    """
    for key, origin in loaded.origins.items():
        settled = any(f"{key}.".startswith(f"{one}.") for one in keys)  # not model.chat_template_kwargs
        if settled and origin == COMMAND_LINE and not key.startswith(_OPEN):
            what, remedy = f"{key} has no effect: training has settled it", f"leave {key} out, or train with it"
            raise ConfigError(what, where=key, remedy=remedy, code="cli.option_conflict")


def _check_base(loaded: LoadedConfig, final: Path) -> None:
    """Check that an adapter's base model is the run's model, if both are hub ids.

    Raises:
        ModelError: the base model differs, or files are missing or corrupt.
    """
    check_adapter(final)
    base = read_config(final / "adapter_config.json").get("base_model_name_or_path")
    ours = loaded.run.model.name_or_path
    if (
        not isinstance(base, str)
        or base == ours
        or any(looks_local(name) or Path(name).is_dir() for name in (base, ours))
    ):
        return
    what = f"the adapter was trained on {base}, but the run's model is {ours}"
    if loaded.origins["model.name_or_path"] == COMMAND_LINE:
        log.warning("%s: %s", final, what)
    else:
        raise ModelError(
            what,
            where=str(final),
            remedy=f"set model.name_or_path={base}, or use the adapter of {ours}",
            code="model.adapter_mismatch",
        )


def _adapter_format(final: Path) -> Format:
    """The number format of an adapter's file; fp32 if unknown."""
    found = main_format(read_header(final / "adapter_model.safetensors"))
    return {"bf16": "bf16", "fp16": "fp16"}.get(found or "", "fp32")  # pyright: ignore[reportReturnType]


def _plan(
    loaded: LoadedConfig, facts: ModelFacts, folder: Path, resolve: Callable[[RunConfig, Hardware, ModelFacts], Plan]
) -> Plan:
    """Resolve the plan on this machine, with training's number format.

    If this machine does not support training's format or attention backend, ``auto`` replaces them with a warning,
    unless the command line sets them.
    """
    hardware, config = probe(), loaded.run
    from_command_line = {part for part, key in _FALLBACKS.items() if loaded.origins[f"{part}.{key}"] == COMMAND_LINE}
    trained = config.precision.compute if "precision" in from_command_line else _compute_of_training(folder, config)
    config = _with(config, "precision", trained)
    for part in _FALLBACKS:
        try:
            resolve(config, hardware, facts)
        except PlanError as error:
            for problem in error.problems:
                if problem.where == part and part not in from_command_line:
                    log.warning("differs from training: %s; falling back to auto", problem.what)
                    config = _with(config, part, "auto")
    plan = resolve(config, hardware, facts)
    compute = plan.precision.compute
    if config.precision.compute not in ("auto", compute.value):  # precision.on_unsupported: fallback
        log.warning("differs from training: %s", compute.reason)
    return plan


_FALLBACKS = {"precision": "compute", "attention": "backend"}  # section → its key, in the order of decisions


def _with(config: RunConfig, part: str, value: str) -> RunConfig:
    section = config.precision if part == "precision" else config.attention
    return config.model_copy(update={part: section.model_copy(update={_FALLBACKS[part]: value})})


def _compute_of_training(folder: Path, config: RunConfig) -> str:
    """The compute dtype in training's plan.json; the config's if there is none."""
    try:
        recorded = read_json(folder / "plan.json")["precision"]["compute"]["value"]
    except (OSError, ValueError, LookupError, TypeError):
        return config.precision.compute
    return recorded if recorded in get_args(Format) else config.precision.compute
