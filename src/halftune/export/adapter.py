"""The target ``adapter``: the adapter for a server that loads it beside its base model, with vLLM's command."""

from __future__ import annotations

import shutil
from pathlib import Path

from halftune.config.facts.folder import read_json
from halftune.core.errors import ModelError
from halftune.export.merged import PRIVATE
from halftune.export.options import Options
from halftune.export.vllm import obstacles, rank_limit
from halftune.model.result.completed_run import CompletedRun

REMEDY = "merge it instead: halftune export without --format"


def check(run: CompletedRun, _options: Options) -> None:
    """Check that vLLM serves this adapter as it was trained.

    Raises:
        ModelError: there is no adapter, or vLLM refuses or ignores a part of it.
    """
    where = str(run.final)
    if not run.is_adapter:
        raise ModelError("the run has no adapter", where=where, remedy=REMEDY, code="export.adapter_unsupported")
    config = read_json(run.final / "adapter_config.json")
    found = obstacles(config)
    if found:
        raise ModelError(found[0], where=where, remedy=REMEDY, code="export.adapter_unsupported")


def write(run: CompletedRun, final: Path, output: Path, options: Options) -> list[str]:
    """Copy the adapter with its tokenizer and name the command that serves it.

    Args:
        run: the run.
        final: folder of the adapter.
        output: an empty folder.
        options: have the name and place.

    Returns:
        lines for the terminal.
    """
    shutil.copytree(final, output, dirs_exist_ok=True, ignore=PRIVATE)
    rank = read_json(final / "adapter_config.json")["r"]
    base = run.loaded.run.model.name_or_path
    lora = f"--enable-lora --max-lora-rank {rank_limit(rank)} --lora-modules {options.name}={options.output}"
    return [
        f"{options.output}: adapter of rank {rank}, and the run's tokenizer and chat template",
        f"vllm serve {base} {lora} --tokenizer {options.output}",
    ]
