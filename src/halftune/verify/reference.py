"""The result that something is compared with: a run's, or a model trained elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halftune.core.errors import ModelError
from halftune.core.log import get_logger
from halftune.data.sources.builtin import builtin_rows
from halftune.model.generate import ending_ids, evaluating
from halftune.verify.draw import LONGEST, Question, render
from halftune.verify.measure import measure, score
from halftune.verify.probes import PROBES, Probe, Probes, read_probes
from halftune.verify.targets.folder import ADAPTER, base_folder, base_of, load_plain, plain_tokenizer

log = get_logger(__name__)

QUESTIONS = "number-formats"  # of builtin data, for results without probes
_COUNT = 32


@dataclass(frozen=True)
class Reference:
    """A result.

    Attributes:
        folder: with its adapter or model, and its tokenizer.
        base: name of the base model; empty where it is not known.
        probes: stored, or measured now; with ``base`` where the base model could be loaded.
        tokenizer: its tokenizer.
    """

    folder: Path
    base: str
    probes: Probes
    tokenizer: Any


def open_reference(folder: Path, base: str = "") -> Reference:
    """Open a result; without ``probes.json``, its answers to builtin questions are measured by plain transformers.

    Args:
        folder: ``final`` of a run, an export, or a model or adapter from elsewhere.
        base: its base model, where the folder does not name one that can be found.

    Raises:
        ModelError: it is neither, or cannot be loaded.
    """
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER)):
        what = "neither a model nor an adapter: no config.json, no adapter_config.json"
        raise ModelError(what, where=str(folder), remedy="name a run or a model's folder", code="verify.no_reference")
    probes, tokenizer = read_probes(folder), plain_tokenizer(folder, base)
    named = base or (probes.model if probes else "")
    if (folder / ADAPTER).is_file():
        named = str(base_folder(folder, base))
    if probes is None:
        log.info("%s has no %s: measuring its answers to questions of builtin:%s", folder, PROBES, QUESTIONS)
        probes = _measured(folder, named, tokenizer)
    if probes.probes[0].base is None and named and os.path.isdir(named):
        probes = _with_base(probes, named)
    return Reference(folder, named, probes, tokenizer)


def _measured(folder: Path, base: str, tokenizer: Any) -> Probes:
    model, _ = load_plain(folder, base)
    causal = base_of(model)
    dtype = str(causal.dtype).removeprefix("torch.")
    with evaluating(model):
        probes = measure(model, tokenizer, _questions(tokenizer))
    return Probes(
        rows=f"builtin:{QUESTIONS}",
        model=base,
        adapter=model is not causal,
        compute={"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32"),
        bos=tokenizer.bos_token_id,
        stops=ending_ids(tokenizer, causal.generation_config),
        vocabulary=causal.config.get_text_config().vocab_size,
        probes=probes,
    )


def _questions(tokenizer: Any) -> list[Question]:
    found: list[Question] = []
    for row in builtin_rows(QUESTIONS).rows:
        asked = str(row["prompt"])
        messages = [{"role": "user", "content": asked}]
        made = render(tokenizer, messages, None, {}, None) if tokenizer.chat_template else None
        text, ids = made or (asked, list(tokenizer(asked)["input_ids"]))
        if 0 < len(ids) <= LONGEST:
            found.append(Question(ids, text, messages if made else None))
        if len(found) == _COUNT:
            break
    return found


def _with_base(probes: Probes, base: str) -> Probes:
    """The probes with the base model's log-probabilities, by plain transformers."""
    try:
        model, _ = load_plain(Path(base))
        device = next(model.parameters()).device
        pairs: Sequence[tuple[list[int], list[int]]] = [(one.prompt, one.answer) for one in probes.probes]
        found = score(model, pairs, 0, device)
    except (ModelError, IndexError) as error:  # added tokens have no embedding in the base
        log.info("the base model %s is not compared: %s", base, error)
        return probes
    made: list[Probe] = [
        one.model_copy(update={"base": own.logprobs}) for one, own in zip(probes.probes, found, strict=True)
    ]
    return probes.model_copy(update={"probes": made})
