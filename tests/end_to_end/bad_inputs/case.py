"""What a bad input is, and how one is tried: a verb of the command line in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import shlex
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halftune import cli
from halftune.cli.failure import VARIABLE
from halftune.config.facts.model import facts_from_config
from halftune.hardware import probe as host

RECIPE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
precision: fp32
data:
  train: rows.jsonl
  max_length: 64
training:
  output_dir: run
  max_steps: 1
"""
ROW = json.dumps({"prompt": "1 + 1?", "completion": "2"})
TRAIN = "train --config x.yaml"
PROCESSOR = Path(__file__).resolve().with_name("cpuinfo")  # a made-up one: messages name what it can do


def nothing() -> None:
    """No files besides the recipe and its row."""


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        name: what is bad, for people.
        recipe: the text of ``x.yaml``.
        rows: the text of ``rows.jsonl``.
        make: makes further files in the working directory.
        command: the verb and its arguments.
        code: the exit code.
        says: what the message must hold, at least.
        error: the error codes behind the message, in order; empty for a warning, and for what argparse says.
        needs_torch: whether it can only be found with the model's libraries loaded.
        unprivileged: try it as a user who is not root, whose rights nothing stops.
        environment: variables; None removes one.
        typed: standard input.
    """

    name: str
    recipe: str | bytes = RECIPE
    rows: str | bytes = ROW
    make: Callable[[], Any] = nothing
    command: str = TRAIN
    code: int = 2
    says: tuple[str, ...] = ()
    error: tuple[str, ...] = ()
    needs_torch: bool = False
    unprivileged: bool = False
    environment: dict[str, str | None] = field(default_factory=dict)
    typed: str = ""


@dataclass(frozen=True)
class Answer:
    """What the user sees: exit code, the message, and whether torch was imported for it."""

    code: int
    message: str
    torch: bool


def attempt(case: Case) -> Answer:
    """Runs a case in this process, in a fresh folder that is the working directory meanwhile."""
    with tempfile.TemporaryDirectory(prefix="bad-input-") as folder, _standing_in(Path(folder), case):
        Path("x.yaml").write_bytes(case.recipe.encode() if isinstance(case.recipe, str) else case.recipe)
        Path("rows.jsonl").write_bytes(case.rows.encode() if isinstance(case.rows, str) else case.rows)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            case.make()
            logging.getLogger("halftune").handlers.clear()
        Path.cwd().chmod(0o755)
        said, shown = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown), _rights(case):
            try:
                verb, *rest = shlex.split(case.command)
                code = cli.run_verb(verb, rest)
            except SystemExit as end:  # argparse
                code = int(end.code or 0)
        return Answer(code, neutral(said.getvalue(), folder), "torch" in sys.modules)


@contextlib.contextmanager
def _standing_in(folder: Path, case: Case) -> Iterator[None]:
    before, variables, keyboard = Path.cwd(), dict(os.environ), sys.stdin
    logger, processor = logging.getLogger("halftune"), host.CPUINFO
    os.chdir(folder)
    host.CPUINFO = PROCESSOR
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop(VARIABLE, None)
    for name, value in case.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.stdin = io.StringIO(case.typed)
    try:
        yield
    finally:
        os.chdir(before)
        host.CPUINFO = processor
        os.environ.clear()
        os.environ.update(variables)
        sys.stdin = keyboard
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


@contextlib.contextmanager
def _rights(case: Case) -> Iterator[None]:
    lower = case.unprivileged and os.geteuid() == 0
    if lower:
        os.seteuid(65534)  # nobody
    try:
        yield
    finally:
        if lower:
            os.seteuid(0)


def neutral(text: str, folder: str) -> str:
    """A message without what belongs to this machine: the folder, and lines that only inform."""
    text = text.replace(f"{Path(folder).resolve()}/", "").replace(str(Path(folder).resolve()), ".")
    text = re.sub(r"is unavailable: [^:]+ is a CPU", "is unavailable: <this machine> is a CPU", text)
    lines = [line for line in text.replace(str(Path.home()), "~").splitlines() if not line.startswith("I ")]
    return "\n".join(lines).strip()


# ---- what cases are made of ----

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "dtype": "float32",
    "tie_word_embeddings": False,
}


def safetensors(tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A safetensors file of fp32 zeros, made without torch."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def weights_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name → shape of every weight that a model of this config has."""
    return {
        tensor.name.replace("*", str(layer)): tensor.shape
        for tensor in facts_from_config(config, "made up").tensors
        for layer in tensor.layers or (0,)
    }


def model_folder(folder: str = "model", tokenizer: str | None = "{}", **changes: Any) -> Path:
    """A small whole checkpoint of zeros; its tokenizer is only a file."""
    path, config = Path(folder), {**SMALL, **changes}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors(weights_of(config)))
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer)
    return path


def with_model(text: str = RECIPE) -> str:
    """The recipe with the checkpoint in ``model``."""
    return text.replace("builtin:qwen2-tiny", "model")
