"""The target ``gguf``: a run's result as one file for llama.cpp, and a Modelfile for Ollama beside it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.export.gguf.ollama import Turns, find_turns, modelfile
from halftune.export.gguf.vocabulary import generation_of
from halftune.export.gguf.write import Source, compare, open_source, write_gguf
from halftune.export.options import Options
from halftune.model.files.locate import locate
from halftune.model.result.completed_run import CompletedRun
from halftune.model.tokenizer.tokenizer import load_tokenizer

log = get_logger(__name__)
CONTEXT = 4096  # tokens: users ask more than a run with short samples was trained on


def check(run: CompletedRun, _options: Options) -> None:
    """Check that the model and its tokenizer can be written, before anything is merged.

    Raises:
        ModelError: llama.cpp does not know them.
    """
    open_source(locate(run.result), load_tokenizer(run.result), run.result.tokens)


def write(run: CompletedRun, merged: Path, output: Path, options: Options) -> list[str]:
    """Write the GGUF file and the Modelfile, and read the file back.

    Args:
        run: the run.
        merged: folder of the merged model.
        output: an empty folder.
        options: has the type and the name.

    Returns:
        lines for the terminal.

    Raises:
        ModelError: the file differs from the folder.
    """
    tokenizer: Any = load_tokenizer(run.result)
    source = open_source(merged, tokenizer)
    file = output / f"{options.name}-{options.gguf_type}.gguf"
    write_gguf(source, file, options.gguf_type, options.name)
    count, error = compare(source, file, options.gguf_type)
    turns = _turns(run, source, tokenizer)
    (output / "Modelfile").write_text(_modelfile(run, source, tokenizer, file.name, turns), encoding="utf-8")
    placed = options.output / file.name
    lines = [
        f"{placed}: {options.gguf_type}, {count} tensors",
        "read back: tokens, merges, chat template and stops are the folder's; "
        f"largest relative error of a tensor {error:.1e}",
        shlex.join(["llama-server", "-m", str(placed)]),
    ]
    if turns is not None:
        name = re.sub(r"[^\w.-]+", "-", options.name, flags=re.ASCII)  # what Ollama takes as a name
        lines.append(shlex.join(["ollama", "create", name, "-f", str(options.output / "Modelfile")]))
    return lines


def _turns(run: CompletedRun, source: Source, tokenizer: Any) -> Turns | None:
    try:
        turns = find_turns(tokenizer, source.vocabulary, run.loaded.run.model.chat_template_kwargs)
    except ModelError as error:
        log.warning("the Modelfile has no TEMPLATE: %s", error.report())
        return None
    if turns.system is None:
        log.warning("the chat template takes no system message: Ollama leaves out system messages")
    return turns


def _modelfile(run: CompletedRun, source: Source, tokenizer: Any, file: str, turns: Turns | None) -> str:
    stops = [str(tokenizer.decode([index])) for index in sorted(source.vocabulary.stops)]
    context = min(max(run.loaded.run.data.max_length, CONTEXT), source.config.max_position_embeddings)
    return modelfile(file, turns, stops, context, generation_of(source.folder))
