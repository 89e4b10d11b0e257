"""The target ``gguf``: a run's result as one file for llama.cpp, and a Modelfile for Ollama beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halftune.export.gguf.ollama import modelfile
from halftune.export.gguf.write import compare, open_source, write_gguf
from halftune.export.options import Options
from halftune.model.files.locate import locate
from halftune.model.result.completed_run import CompletedRun
from halftune.model.tokenizer.tokenizer import load_tokenizer

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
    stops = [source.vocabulary.tokens[index] for index in sorted(source.vocabulary.stops)]
    context = min(max(run.loaded.run.data.max_length, CONTEXT), source.config.max_position_embeddings)
    (output / "Modelfile").write_text(modelfile(file.name, tokenizer, stops, context), encoding="utf-8")
    return [
        f"{options.output / file.name}: {options.gguf_type}, {count} tensors",
        "read back: tokens, merges, chat template and stops are the folder's; "
        f"largest relative error of a tensor {error:.1e}",
        f"llama-server -m {options.output / file.name}",
        f"ollama create {options.name} -f {options.output / 'Modelfile'}",
    ]
