"""Metrics of answers as sums over rows: what a row adds, and the score of the sum.

A metric is a function of the sum of its rows' statistics, so that a score without one row costs no second pass.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halftune.core.errors import ConfigError
from halftune.core.optional import need
from halftune.core.table import did_you_mean

Score = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Metric:
    """A number for a model.

    Attributes:
        name: as on the command line.
        title: in the table.
        score: from the sum of the rows' statistics, ``[K]``.
        better: 1 if higher is better, -1 if lower is.
    """

    name: str
    title: str
    score: Score
    better: int = 1


@dataclass(frozen=True)
class AnswerMetric:
    """A metric of answers.

    Attributes:
        metric: how it is scored.
        rows: statistics of N answers and references, fp64 ``[N, K]``.
    """

    metric: Metric
    rows: Callable[[Sequence[str], Sequence[str]], np.ndarray]


def _ratio(sums: np.ndarray) -> float:
    """Sum over count; NaN without a count."""
    return float(sums[0] / sums[1]) if sums[1] else math.nan


def _perplexity(sums: np.ndarray) -> float:
    mean = _ratio(sums)
    return math.exp(mean) if mean < 700 else math.inf


LOSS = Metric("loss", "loss per token", _ratio, -1)
PERPLEXITY = Metric("perplexity", "perplexity", _perplexity, -1)


def normalised(text: str) -> list[str]:
    """The words of an answer: lower case, no punctuation, no articles.

    ``normalize_answer`` of SQuAD's ``evaluate-v1.1.py`` (Rajpurkar et al. 2016, arXiv:1606.05250).
    """
    plain = "".join(one for one in text.lower() if one not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact(answer: str, reference: str) -> float:
    """1 if the texts are the same in Unicode's NFC, white space collapsed, else 0."""
    ours, theirs = (unicodedata.normalize("NFC", text).split() for text in (answer, reference))
    return float(ours == theirs)


def squad(answer: str, reference: str) -> float:
    """1 if the normalised words are the same, else 0; SQuAD's exact match. Signs and points do not count."""
    return float(normalised(answer) == normalised(reference))


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the normalised words; SQuAD's F1.

    Where one of both has no words, 1 if neither has, else 0, as in SQuAD 2.0 (``evaluate-v2.0.py``).
    """
    ours, theirs = normalised(answer), normalised(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def _mean(of: Callable[[str, str], float]) -> Callable[[Sequence[str], Sequence[str]], np.ndarray]:
    return lambda answers, references: np.array([(of(*pair), 1.0) for pair in zip(answers, references, strict=True)])


def _rouge() -> AnswerMetric:
    """ROUGE-L (Lin 2004): F-measure of the longest common subsequence, mean over rows, by ``rouge-score``."""
    scorer = need("rouge_score.rouge_scorer", why="--metrics rouge", distribution="rouge-score").RougeScorer(["rougeL"])

    def rouge(answer: str, reference: str) -> float:
        return scorer.score(reference, answer)["rougeL"].fmeasure

    return AnswerMetric(Metric("rouge", "ROUGE-L", _ratio), _mean(rouge))


def _chrf() -> AnswerMetric:
    """chrF (Popović 2015) of all rows together, from 0 to 100, by ``sacrebleu``."""
    scorer: Any = need("sacrebleu.metrics.chrf", why="--metrics chrf", distribution="sacrebleu").CHRF()

    def rows(answers: Sequence[str], references: Sequence[str]) -> np.ndarray:
        # as sacrebleu's own significance tests do
        return np.array(scorer._extract_corpus_statistics(list(answers), [list(references)]), dtype=np.float64)

    def score(sums: np.ndarray) -> float:
        return scorer._compute_score_from_stats(sums.tolist()).score

    return AnswerMetric(Metric("chrf", "chrF", score), rows)


ANSWER_METRICS: dict[str, Callable[[], AnswerMetric]] = {
    "exact": lambda: AnswerMetric(Metric("exact", "exact match", _ratio), _mean(exact)),
    "squad": lambda: AnswerMetric(Metric("squad", "SQuAD exact match", _ratio), _mean(squad)),
    "f1": lambda: AnswerMetric(Metric("f1", "F1 of words", _ratio), _mean(f1)),
    "rouge": _rouge,
    "chrf": _chrf,
}


def answer_metrics(names: Sequence[str]) -> list[AnswerMetric]:
    """The metrics of answers with these names.

    Raises:
        ConfigError: there is none of a name.
        MissingPackageError: its package is not installed.
    """
    if unknown := [name for name in names if name not in ANSWER_METRICS]:
        what = f"unknown metric {unknown[0]!r}"
        remedy = did_you_mean(unknown[0], ANSWER_METRICS)
        raise ConfigError(what, where="--metrics", remedy=remedy, code="evaluate.unknown_metric")
    return [ANSWER_METRICS[name]() for name in dict.fromkeys(names)]
