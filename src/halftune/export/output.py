"""Checks the output folder of an export, before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from halftune.config.rules.files import part_of_run
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter
from halftune.core.atomic import scratch_folder
from halftune.core.errors import ModelError
from halftune.core.processes.signals import unwound_by_signals
from halftune.model.files.result import has_manifest


def inputs_of(config: RunConfig) -> list[Path]:
    """Return the local files and folders that a run reads: models, tokenizer, adapter, chat template, data."""
    model, adapter = config.model, config.adapter
    names = [model.name_or_path, model.tokenizer, model.chat_template]
    names += [adapter.name_or_path] if isinstance(adapter, LoraAdapter) else []
    names += [source.path for source in (*config.data.train, *config.data.eval)]
    paths = [Path(os.path.expanduser(name)) for name in names if name and "\n" not in name]
    return [path for path in paths if os.path.exists(path)]


def check_output(
    run: Path,
    final: Path,
    output: Path,
    inputs: Sequence[Path] = (),
    *,
    force: bool,
    how: str = "use --force to replace it",
) -> None:
    """Check that the output folder is empty, or contains an export that ``force`` allows to replace.

    Args:
        run: the run folder.
        final: the folder of its result.
        output: the folder to write.
        inputs: what the run reads (:func:`inputs_of`).
        force: whether an earlier export may be replaced.
        how: the remedy if there is one.

    Raises:
        ModelError: the folder cannot be used.
    """
    own, target = run.resolve(), output.resolve()
    if target in (own, own / "final", *final.resolve().parents, final.resolve()):
        raise _unusable("the output folder belongs to the run", output)
    if part := part_of_run(target):
        raise _unusable(f"the output folder is, or is inside, a part of a run: {part}", output)
    if output.is_file():
        raise _unusable("the output is a file", output, "choose a folder")
    for path in map(Path.resolve, inputs):
        if target.is_relative_to(path) or path.is_relative_to(target):
            raise _unusable(f"would write over an input of the run: {path}", output)
    if output.is_dir() and any(output.iterdir()):
        _check_content(output, force=force, how=how)


@contextmanager
def reserved(output: Path) -> Iterator[Path]:
    """Hold an output folder for this process, and yield an empty folder beside it for intermediate files.

    Raises:
        ModelError: another process exports to this folder.
        OSError: no folder can be made beside it.
    """
    with unwound_by_signals(), ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder(output))
        except BlockingIOError as error:
            what = "another process is exporting to this folder"
            raise _unusable(what, output, "wait for it, or choose another folder") from error
        yield scratch


def _check_content(output: Path, *, force: bool, how: str) -> None:
    if not (output / "config.json").is_file() and not has_manifest(output):
        raise _unusable("the folder contains unrelated files", output, "choose an empty or new folder")
    if not has_manifest(output):
        what = "the folder contains a model that halftune did not write"
        raise _unusable(what, output, "choose another folder, or delete this one first")
    if not force:
        raise _unusable("output already contains a model", output, how)


def _unusable(what: str, output: Path, remedy: str = "choose another folder") -> ModelError:
    return ModelError(what, where=str(output), remedy=remedy, code="export.output_unusable")
