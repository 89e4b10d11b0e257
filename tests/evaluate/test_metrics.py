"""Metrics of answers against values computed by hand, and standard errors against formulas of their own."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from halftune.core.errors import ConfigError, MissingPackageError
from halftune.evaluate.compare import difference, error, without_one
from halftune.evaluate.metrics import LOSS, PERPLEXITY, answer_metrics, exact, f1, normalised, squad


def drawn() -> np.random.Generator:
    """Of the test's seed."""
    return np.random.default_rng(np.random.randint(1 << 31))


@pytest.mark.parametrize(
    ("answer", "reference", "same", "overlap"),
    [
        ("The cat!", "a cat", 1.0, 1.0),
        ("Paris", "paris.", 1.0, 1.0),
        ("the big red car", "red car", 0.0, 0.8),  # 3 words, 2 of them right: P 2/3, R 1
        ("to be or not", "be be", 0.0, 1 / 3),  # `be` counts once: P 1/4, R 1/2
        ("dog", "cat", 0.0, 0.0),
        ("", "cat", 0.0, 0.0),
        ("the", "An", 1.0, 1.0),  # no words on both sides
        ("theory", "ory", 0.0, 0.0),  # articles are whole words
    ],
)
def test_squad(answer: str, reference: str, same: float, overlap: float) -> None:
    assert squad(answer, reference) == same
    assert f1(answer, reference) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("answer", "reference"), [("-5", "5"), ("1.5", "15"), ("3/4", "34"), ("C", "C++"), ("", "A"), ("Paris", "paris")]
)
def test_exact_keeps_what_squad_leaves_out(answer: str, reference: str) -> None:
    assert (exact(answer, reference), squad(answer, reference)) == (0.0, 1.0)


def test_exact_ignores_white_space_and_unicode_forms() -> None:
    assert exact(" caf\u00e9\n  noir", "cafe\u0301 noir ") == 1.0
    assert exact("x\u00b2", "x2") == 0.0  # compatibility forms differ


def test_normalised() -> None:
    assert normalised("  The U.S.A., an  ODD-looking\tplace ") == ["usa", "oddlooking", "place"]


def test_rouge_l() -> None:
    pytest.importorskip("rouge_score")
    (rouge,) = answer_metrics(["rouge"])
    rows = rouge.rows(["the cat sat down", "x"], ["the cat lay down there", "y"])
    # longest common subsequence `the cat down`: P 3/4, R 3/5
    assert rows[:, 0] == pytest.approx([2 / 3, 0.0])
    assert rouge.metric.score(rows.sum(axis=0)) == pytest.approx(1 / 3)


def test_chrf() -> None:
    pytest.importorskip("sacrebleu")
    from sacrebleu.metrics.chrf import CHRF

    (chrf,) = answer_metrics(["chrf"])
    # n-grams of 1 to 3 characters: 2 of 3, 1 of 2 and 0 of 1 match on both sides; longer ones do not exist
    assert chrf.metric.score(chrf.rows(["abc"], ["abd"])[0]) == pytest.approx(100 * (2 / 3 + 1 / 2) / 3)
    answers, references = ["abc", "hello there", "", "x"], ["abd", "hello, there!", "empty", "x"]
    rows = chrf.rows(answers, references)
    assert chrf.metric.score(rows.sum(axis=0)) == pytest.approx(CHRF().corpus_score(answers, [references]).score)
    left = CHRF().corpus_score(answers[1:], [references[1:]]).score
    assert without_one(rows, chrf.metric.score)[0] == pytest.approx(left)


def test_loss_and_perplexity() -> None:
    rows = np.array([[3.0, 2], [1.0, 6], [0.0, 0]])
    assert LOSS.score(rows.sum(axis=0)) == 0.5
    assert PERPLEXITY.score(rows.sum(axis=0)) == pytest.approx(math.sqrt(math.e))
    assert PERPLEXITY.score(np.array([1e6, 1.0])) == math.inf
    assert math.isnan(LOSS.score(np.zeros(2)))


def test_the_error_of_a_mean_is_the_usual_one() -> None:
    values = drawn().normal(size=50)
    rows = np.stack([values, np.ones(50)], axis=1)
    assert error(without_one(rows, LOSS.score)) == pytest.approx(values.std(ddof=1) / math.sqrt(50), rel=1e-9)


def test_a_difference_is_paired() -> None:
    random = drawn()
    first, gain = random.normal(5, 3, size=40), random.normal(0.1, 0.01, size=40)
    before, after = (np.stack([values, np.ones(40)], axis=1) for values in (first, first - gain))
    found = difference(before, after, LOSS.score, paired=True)
    assert found.value == pytest.approx(-gain.mean())
    assert found.error == pytest.approx(gain.std(ddof=1) / math.sqrt(40), rel=1e-6)
    assert found.marked
    assert difference(before, after, LOSS.score, paired=False).error is None
    same = difference(before, before, LOSS.score, paired=True)
    assert (same.value, same.error, same.marked) == (0.0, 0.0, False)


def test_few_rows_have_no_error() -> None:
    wrong, right = (np.stack([np.full(10, value), np.ones(10)], axis=1) for value in (0.0, 1.0))
    for count, known in ((2, False), (9, False), (10, True)):
        found = difference(wrong[:count], right[:count], LOSS.score, paired=True)
        assert (found.value, found.error is not None, found.marked) == (1.0, known, known)


def test_the_error_of_a_ratio_matches_its_spread() -> None:
    """Of losses per token in rows of different lengths: over many draws, the differences spread as the error says."""
    random, found, errors = drawn(), [], []
    for _ in range(400):
        counts = random.integers(1, 40, size=60).astype(float)
        base = random.gamma(4.0, counts / 4)
        tuned = base * random.normal(0.9, 0.1, size=60)
        before, after = (np.stack([nll, counts], axis=1) for nll in (base, tuned))
        one = difference(before, after, LOSS.score, paired=True)
        assert one.error is not None
        found.append(one.value)
        errors.append(one.error)
    # the standard deviation of 400 draws is known to 3.5 % (one standard error)
    assert np.std(found) == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=0.2)


def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as unknown:
        answer_metrics(["exact", "chfr"])
    assert unknown.value.code == "evaluate.unknown_metric"
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.chrf", None)
    with pytest.raises(MissingPackageError) as missing:
        answer_metrics(["chrf"])
    assert missing.value.code == "core.package_missing"
