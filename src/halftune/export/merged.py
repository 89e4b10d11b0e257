"""Exports a run's result as a model without adapter: merged, verified, in the base checkpoint's dtype."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from halftune.config.facts.safetensors_headers import main_format, read_headers, stored_formats
from halftune.core.atomic import whole_folder, write_error_remedy
from halftune.core.choice import Format
from halftune.core.errors import TrainingError
from halftune.core.manifest import MANIFEST, manifest_facts, seal
from halftune.export.card import write_card
from halftune.export.options import Options
from halftune.export.output import check_output, inputs_of, reserved
from halftune.model.files.identity import check_base
from halftune.model.files.locate import locate
from halftune.model.files.result import base_of_result
from halftune.model.result.completed_run import CompletedRun
from halftune.model.result.merge import Merge, Progress, lacks_memory, merge_adapter, no_progress, round_model
from halftune.model.result.merge_by_layer import merge_by_layer
from halftune.model.result.save import README, save_tokenizer, write_model
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.precision.truth_table import Rounding, roundings
from halftune.verify.probes import PROBES

FORMATS: dict[str, Format] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
PRIVATE = shutil.ignore_patterns(PROBES)  # rows of the user's data, which an upload would show
NEGLIGIBLE = 1e-6  # relative size of an update that fp32 rounding alone explains


@dataclass(frozen=True)
class Export:
    """An exported model.

    Attributes:
        folder: of the model.
        stored: its number format.
        source: the reason for this format.
        merge: result of the merge; None if a full model was copied.
        needs_care: plain transformers loads it incorrectly; its README says how to load it.
    """

    folder: Path
    stored: Format
    source: str
    merge: Merge | None
    needs_care: bool = False

    def describe(self) -> str:
        """Return the result in a few lines for a terminal."""
        lines = [f"{self.folder}: weights and config.json in {self.stored} ({self.source})"]
        if self.needs_care:
            lines.append(f"plain transformers loads this model incorrectly: see {self.folder / README}")
        if self.merge is None:
            lines.append("copied unchanged (full model, no adapter to merge)")
            return "\n".join(lines)
        error, bound = f"{self.merge.compared} {self.merge.forward_error:.1e}", f"{self.merge.bound:.1e}"
        lines.append(f"verified against the result in fp32: relative {error} (rounding bound {bound})")
        if self.merge.by_layer:
            lines.append("merged layer by layer, because the whole model in fp32 does not fit into the main memory")
        if 0 < self.merge.update_size < NEGLIGIBLE:
            lines.append("warning: the adapter hardly changes the weights; was it trained?")
        elif self.merge.update_size:
            kept = f"relative size of the adapter's update: {self.merge.update_size:.1e}"
            lost = f"{self.merge.update_error:.1%}" if self.merge.update_error >= 0.0005 else "nothing"
            lines.append(f"{kept}; lost by rounding to {self.stored}: {lost}")
        return "\n".join(lines)


def export_run(
    run: CompletedRun,
    output: Path,
    dtype: Format | None = None,
    *,
    force: bool = False,
    progress: Progress = no_progress,
    card: bool = True,
) -> Export:
    """Export a run's result as a plain model with its tokenizer.

    Args:
        run: the finished run.
        output: folder to write, atomically.
        dtype: format of the weights; default the base checkpoint's (for a full model: the saved one).
        force: replace an earlier export in ``output``.
        progress: called with the progress.
        card: write a model card.

    Raises:
        ModelError: ``output`` is in use, not enough memory, or the exported model's logits differ.
        TrainingError: ``output`` cannot be written (a full disk …).
    """
    check_output(run.folder, run.final, output, inputs_of(run.loaded.run), force=force)
    if run.is_adapter:
        check_base(base_of_result(run.final), run.loaded.run.model, allowed=run.any_base)
    headers = read_headers(locate(run.result))
    own = main_format(headers)
    stored: Format = dtype or FORMATS.get(own or "", run.plan.precision.saved.value)
    lost = roundings(stored_formats(headers), stored, run.plan.precision.keep_fp32.value)
    source = "set by --dtype" if dtype else _source(run, own, lost)
    progress("loading", 0, 0)
    try:
        with reserved(output), whole_folder(output) as partial:
            if not run.is_adapter and stored == own:
                merge = None
                shutil.copytree(run.final, partial, dirs_exist_ok=True, ignore=PRIVATE)
            else:
                merge = _write_merged(run, stored, partial, progress)
                save_tokenizer(load_tokenizer(run.result), partial)
            needs_care = (partial / README).is_file()
            if card:
                write_card(run, partial, Options(output), stored)
            seal(partial, MANIFEST, facts=manifest_facts(partial))
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        remedy = f"{write_error_remedy(error)}, or choose another output folder"
        what = f"cannot write: {error}"
        raise TrainingError(what, where=str(output), remedy=remedy, code="core.cannot_write") from error
    return Export(output, stored, source, merge, needs_care)


def _write_merged(run: CompletedRun, stored: Format, folder: Path, progress: Progress) -> Merge:
    """Merge, or round a full model, and write it: as a whole if it fits into memory, else layer by layer."""
    if lacks_memory(run.plan):
        adapter = run.final if run.is_adapter else None
        return merge_by_layer(run.result, adapter, run.plan, stored, folder, progress)
    if run.is_adapter:
        merge = merge_adapter(run.result, run.final, run.plan, stored, progress)
    else:
        merge = round_model(run.result, run.plan, stored)
    progress("writing", 0, 0)
    write_model(merge.model, stored, run.plan.precision.keep_fp32.value, folder)
    return merge


def _source(run: CompletedRun, own: str | None, lost: Sequence[Rounding]) -> str:
    """The reason for the default format.

    Args:
        run: the exported run.
        own: the most frequent format in the result's or the base's files.
        lost: tensors of the base that it rounds.
    """
    if own not in FORMATS:
        return f"the run's format; the checkpoint's ({own or 'none'}) is not supported"
    if run.is_adapter and lost:
        rounded = ", ".join(f"{len(one.names)} in {one.source}, first {one.names[0]}" for one in lost)
        return f"most frequent in the base checkpoint; rounds {rounded}; use --dtype fp32 to avoid rounding"
    return "the base checkpoint's format" if run.is_adapter else "the run's format"
