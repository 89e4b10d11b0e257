"""Compares a folder's files with a result's: template, tokenizer, config, weights, base model, processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halftune.verify.adapters import compare_adapters, compare_bases
from halftune.verify.exact import Exact, merged
from halftune.verify.processors import compare_processors
from halftune.verify.reference import Reference
from halftune.verify.report import Files
from halftune.verify.settings import of_templates, of_tokenizers
from halftune.verify.targets.folder import ADAPTER, FolderTarget, base_folder, base_of, load_plain
from halftune.verify.weights import compare_weights


def compare_files(
    reference: Reference, exact: Exact | str, target: FolderTarget, base: str, media: Path | None
) -> Files:
    """Compare a folder with a result.

    Args:
        reference: the result.
        exact: it in fp32, or why there is none.
        target: the folder.
        base: the base model of adapters whose own cannot be found.
        media: the folder with the result's processor, if it has one.
    """
    found = [
        *of_templates(reference.tokenizer, target.tokenizer),
        *of_tokenizers(reference.tokenizer, target.tokenizer),
    ]
    found += compare_processors(media, target.folder) if media else []
    model: Any = target.model
    skipped: str | None = None
    if target.kind == "adapter" and (reference.folder / ADAPTER).is_file():
        own = Path(base_folder(reference.folder, base))
        differing, unknown = compare_bases(reference.folder, own, base_folder(target.folder, target.base))
        found += [*compare_adapters(reference.folder, target), *differing, *unknown]
    elif reference.probes.weights or getattr(base_of(model).config, "quantization_config", None) is not None:
        skipped = "one side is quantised"
    elif isinstance(exact, str):
        skipped = exact
    else:
        whole = model if target.kind == "folder" else merged(load_plain(target.folder, target.base, torch.float32)[0])
        found += compare_weights(exact, whole, target.absent)
    return Files(found, skipped, media is not None)
