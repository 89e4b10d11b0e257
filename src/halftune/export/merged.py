"""Turns a run's result into a model that needs no adapter: merged, checked, in the base checkpoint's own dtype."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from halftune.config.facts.safetensors_headers import main_format, read_headers, stored_formats
from halftune.core.atomic import first_aid, whole_folder
from halftune.core.errors import TrainingError
from halftune.core.formats import Format
from halftune.export.output import check_output
from halftune.model.card import CARD
from halftune.model.finished import FinishedRun
from halftune.model.locate import locate
from halftune.model.merge import Merge, Progress, merge_adapter, round_model, unwatched
from halftune.model.save import save_tokenizer, write_model
from halftune.model.tokenizer import load_tokenizer
from halftune.precision.rounding import Rounding, roundings

FORMATS: dict[str, Format] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
NOTHING = 1e-6  # an update that is a smaller share of the weights is fp32's own rounding


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        folder: where.
        stored: in which format.
        source: why that one.
        merge: how the check went; None where a full model was copied as it is.
    """

    folder: Path
    stored: Format
    source: str
    merge: Merge | None

    def describe(self) -> str:
        """The result in a few lines for a terminal."""
        lines = [f"{self.folder}: weights and config.json in {self.stored} ({self.source})"]
        if (self.folder / CARD).is_file():
            lines.append(f"transformers alone would load it wrongly: {self.folder / CARD} says why, and how to")
        if self.merge is None:
            lines.append("copied as it was trained: a full model needs no merging")
            return "\n".join(lines)
        error, bound = self.merge.forward_error, self.merge.bound
        lines.append(
            f"checked against the result in fp32: logits differ by {error:.1e} (rounding explains {bound:.1e})"
        )
        if 0 < self.merge.update_size < NOTHING:
            lines.append("the adapter changes next to nothing: was it trained?")
        elif self.merge.update_size:
            kept = f"the adapter moves the weights by {self.merge.update_size:.1e} of their size"
            lost = f"{self.merge.update_error:.1%}" if self.merge.update_error >= 0.0005 else "nothing"
            lines.append(f"{kept}; {lost} of that is lost to {self.stored}")
        return "\n".join(lines)


def export_run(
    run: FinishedRun,
    output: Path,
    dtype: Format | None = None,
    *,
    force: bool = False,
    progress: Progress = unwatched,
) -> Export:
    """Writes a run's result as a plain model with its tokenizer.

    Args:
        run: the finished run.
        output: folder to write; appears when it is whole.
        dtype: format of the weights; the base checkpoint's own by default (a full model: as it was saved).
        force: replace an earlier model in ``output``.
        progress: told how far it is.

    Raises:
        ModelError: ``output`` is in use, memory is short, or the exported model answers differently.
        TrainingError: ``output`` cannot be written (a full disk …).
    """
    check_output(run.folder, run.final, output, force=force)
    headers = read_headers(locate(run.result))
    own = main_format(headers)
    stored: Format = dtype or FORMATS.get(own or "", run.plan.precision.saved.value)
    lost = roundings(stored_formats(headers), stored, run.plan.precision.keep_fp32.value)
    source = "as asked" if dtype else _source(run, own, lost)
    merge = None
    progress("loading", 0, 0)
    try:
        if run.is_adapter:
            merge = merge_adapter(run.result, run.final, run.plan, stored, progress)
        elif stored != own:
            merge = round_model(run.result, run.plan, stored)
        progress("writing", 0, 0)
        with whole_folder(output) as partial:
            if merge is None:
                shutil.copytree(run.final, partial, dirs_exist_ok=True)
            else:
                write_model(merge.model, stored, run.plan.precision.keep_fp32.value, partial)
                save_tokenizer(load_tokenizer(run.result), partial)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        remedy = f"{first_aid(error)}, or choose another output folder"
        raise TrainingError(f"cannot write: {error}", where=str(output), remedy=remedy) from error
    return Export(output, stored, source, merge)


def _source(run: FinishedRun, own: str | None, lost: Sequence[Rounding]) -> str:
    """Where the format comes from when none was asked for.

    Args:
        run: what is exported.
        own: the format of most numbers in the result's or the base's files.
        lost: the base's tensors that it rounds.
    """
    if own not in FORMATS:
        return f"as the run saves; the checkpoint is {own or 'in no one format'}, which is not written"
    if run.is_adapter and lost:
        rounded = ", ".join(f"{len(one.names)} in {one.source}, first {one.names[0]}" for one in lost)
        return f"as most of the base checkpoint's weights; it rounds {rounded}; --dtype fp32 rounds nothing"
    return "the base checkpoint's own" if run.is_adapter else "as the run saved it"
