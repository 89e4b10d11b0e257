"""The targets of an export, and the way to each: check, merge, convert, compare, seal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safetensors import SafetensorError

from halftune.config.facts.safetensors_headers import main_format, read_header
from halftune.core.atomic import whole_folder, write_error_remedy
from halftune.core.choice import Format
from halftune.core.errors import TrainingError
from halftune.core.manifest import MANIFEST, manifest_facts, seal
from halftune.core.optional import need
from halftune.core.table import named
from halftune.export.card import write_card
from halftune.export.merged import export_run
from halftune.export.options import Options
from halftune.export.output import check_output, inputs_of, reserved
from halftune.model.result.completed_run import CompletedRun
from halftune.model.result.merge import Progress, no_progress


@dataclass(frozen=True)
class Target:
    """A row of ``TARGETS``.

    Attributes:
        check: import path of ``check(run, options)``, which raises what refuses the run before anything is merged.
        write: import path of ``write(run, source, output, options) -> lines``; ``source`` is the merged folder, or that
            of the adapter.
        merged: the format of the merged folder for some options; None: of the base. Without it, nothing is merged.
        needs: packages.
    """

    check: str
    write: str
    merged: Callable[[Options], Format | None] | None = None
    needs: tuple[str, ...] = ()


def _of_gguf(options: Options) -> Format | None:
    formats: dict[str, Format] = {"f16": "fp16", "bf16": "bf16", "q8_0": "fp32"}
    return formats[options.gguf_type]  # no weight is rounded twice


def _stored(run: CompletedRun, options: Options) -> str:
    """The number format of the weights in a target."""
    if options.target == "adapter":
        return main_format(read_header(run.final / "adapter_model.safetensors")) or "unknown"
    return options.gguf_type if options.target == "gguf" else f"{options.target} (linear layers)"


def _of_base(_options: Options) -> Format | None:
    return None


_GGUF, _QUANTISED, _ADAPTER = (f"halftune.export.{name}" for name in ("gguf.target", "quantised", "adapter"))

TARGETS: dict[str, Target] = {
    "gguf": Target(f"{_GGUF}:check", f"{_GGUF}:write", _of_gguf, ("gguf",)),
    "adapter": Target(f"{_ADAPTER}:check", f"{_ADAPTER}:write"),
    "nf4": Target(f"{_QUANTISED}:check", f"{_QUANTISED}:write", _of_base, ("bitsandbytes",)),
    "int8": Target(f"{_QUANTISED}:check", f"{_QUANTISED}:write", _of_base, ("bitsandbytes",)),
    "fp8": Target(f"{_QUANTISED}:check", f"{_QUANTISED}:write", _of_base, ("torchao",)),
    "int8-wo": Target(f"{_QUANTISED}:check", f"{_QUANTISED}:write", _of_base, ("torchao",)),
}


def export_target(
    run: CompletedRun, options: Options, *, force: bool = False, progress: Progress = no_progress
) -> list[str]:
    """Export a run's result to a target.

    Args:
        run: the finished run.
        options: what to write, and where.
        force: replace an earlier export.
        progress: called with the progress.

    Returns:
        lines for the terminal.

    Raises:
        HalftuneError: the target cannot take this model, or the result differs from the merged model.
    """
    if options.target == "folder":
        return [export_run(run, options.output, options.dtype, force=force, progress=progress).describe()]
    row, output = TARGETS[options.target], options.output
    check_output(run.folder, run.final, output, inputs_of(run.loaded.run), force=force)
    for package in row.needs:
        need(package, why=f"export to {options.target}")
    named(row.check)(run, options)
    try:
        with reserved(output) as scratch:
            source, lines = run.final, []
            if row.merged is not None:
                source = scratch / "merged"
                lines = (
                    export_run(run, source, row.merged(options), progress=progress, card=False)
                    .describe()
                    .splitlines()[1:]
                )
            progress("converting", 0, 0)
            with whole_folder(output) as partial:
                lines += named(row.write)(run, source, partial, options)
                write_card(run, partial, options, _stored(run, options))
                seal(partial, MANIFEST, facts=manifest_facts(partial))
    except (OSError, SafetensorError) as error:
        remedy = f"{write_error_remedy(error)}, or choose another output folder"
        what = f"cannot write: {error}"
        raise TrainingError(what, where=str(output), remedy=remedy, code="core.cannot_write") from error
    return lines
