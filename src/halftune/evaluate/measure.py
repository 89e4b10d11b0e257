"""Measures a model and its base: losses, answers and tasks. Of an adapter both come from one loaded model."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from halftune.core.log import get_logger
from halftune.core.quantities import duration
from halftune.evaluate.answers import answer
from halftune.evaluate.harness import Harness, TaskScore
from halftune.evaluate.losses import feed_of, row_losses
from halftune.evaluate.rows import Chosen, Origin, Question, TokenizedRows, questions, tokenize
from halftune.evaluate.targets import Target
from halftune.infer.session import load_weights
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import CompletedRun
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan.finalise import finalise
from halftune.train.setup import check_split, evidence

log = get_logger(__name__)


@dataclass(frozen=True)
class Asked:
    """What is measured.

    Attributes:
        rows: whose loss is measured; None: no loss.
        answers: whether their prompts are answered, too.
        max_new_tokens: longest answer; None: ``generation.max_new_tokens`` of each run.
        harness: tasks; None: none.
    """

    rows: Chosen | None
    answers: bool = False
    max_new_tokens: int | None = None
    harness: Harness | None = None


@dataclass(frozen=True)
class Measured:
    """One model's numbers.

    Attributes:
        name: of its column.
        path: of the model.
        is_base: whether it is the base of another.
        compute: dtype of its arithmetic.
        losses: sum of the loss in nats and number of trained tokens, per row: fp64 ``[N, 2]``; None: not measured.
        origins: of these rows.
        tokens: identifies the tokens and labels; equal where losses per token compare.
        questions, answers: prompts with references, and the model's answers.
        tasks: scores by ``task/metric``.
        seconds: for each kind of number.
    """

    name: str
    path: str
    is_base: bool
    compute: str
    losses: np.ndarray | None = None
    origins: tuple[Origin, ...] = ()
    tokens: str = ""
    questions: Sequence[Question] = ()
    answers: Sequence[str] = ()
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def measure(targets: Sequence[Target], asked: Asked) -> list[Measured]:
    """Measure each model, base models first; a base of several targets once. One model is in memory at a time.

    Raises:
        HalftuneError: rows or a model cannot be used.
    """
    bases, tuned, seen = list[Measured](), list[Measured](), set[tuple[str, ...]]()
    for target in targets:
        for one in _of_target(target, asked, seen):
            (bases if one.is_base else tuned).append(one)
    return [*bases, *tuned]


def _of_target(target: Target, asked: Asked, seen: set[tuple[str, ...]]) -> Iterator[Measured]:
    """The base model, unless it has been ``seen``, and the result."""
    run, tokenizer = target.run, load_tokenizer(target.run.result)
    config = run.loaded.run
    loaded = config.model_copy(update={"model": config.model if run.is_adapter else run.result})
    run = replace(run, plan=finalise(run.plan, evidence(loaded, run.plan, None)))
    rows = None if asked.rows is None else tokenize(asked.rows, target, tokenizer)
    prompts = questions(rows, tokenizer) if rows is not None and asked.answers else []
    work = _Work(run, tokenizer, rows, prompts, asked)
    path, tokens = config.model.name_or_path, "" if rows is None else rows.fingerprint()
    key = (path, config.model.revision or "", config.model.quantization, run.plan.precision.compute.value, tokens)
    base = target.base and key not in seen
    if base:
        seen.add(key)
    if base and not run.is_adapter:
        yield work.numbers(load_weights(run, base=True), path, path, is_base=True)
        gc.collect()  # modules refer to each other: the base leaves the memory before the result comes
    model = load_weights(run, base=False)
    if base and run.is_adapter:
        with PolicyModel(model).without_adapter():
            made = work.numbers(model, path, path, is_base=True)
        yield made
    yield work.numbers(model, target.name, target.path, is_base=False)


@dataclass(frozen=True)
class _Work:
    """What one run's models are measured with."""

    run: CompletedRun
    tokenizer: PreTrainedTokenizerBase
    rows: TokenizedRows | None
    prompts: Sequence[Question]
    asked: Asked

    def numbers(self, model: nn.Module, name: str, path: str, *, is_base: bool) -> Measured:
        plan, seconds, found = self.run.plan, dict[str, float](), dict[str, Any]()
        model.eval()
        if self.rows is not None:
            check_split(model, self.tokenizer, self.rows.split, "data")
            with _timed("loss", name, seconds):
                found["losses"] = row_losses(model, feed_of(self.rows, model, self.tokenizer, plan), plan)
            found |= {"origins": self.rows.origins, "tokens": self.rows.fingerprint()}
        if self.prompts:
            found |= {"questions": self.prompts, "answers": self._answers(model, name, seconds)}
        if self.asked.harness is not None:
            with _timed("tasks", name, seconds):
                found["tasks"] = self.asked.harness.scores(model, self.tokenizer, plan, plan.batch.micro_batch)
        return Measured(name, path, is_base, plan.precision.compute.value, seconds=seconds, **found)

    def _answers(self, model: nn.Module, name: str, seconds: dict[str, float]) -> list[str]:
        config = self.run.loaded.run
        longest = self.asked.max_new_tokens or config.generation.max_new_tokens
        with _timed("answers", name, seconds):
            return answer(
                model,
                self.tokenizer,
                self.prompts,
                self.run.plan,
                max_new_tokens=longest,
                added=config.model.tokens.add,
            )


@contextmanager
def _timed(kind: str, name: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[kind] = time.perf_counter() - began
    log.info("%s: %s in %s", name, kind, duration(seconds[kind]))
