"""From the data section to tokenised samples and the data report. Needs no device and no other process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.config.run import RunConfig
from halftune.config.sections.data import SourceSection
from halftune.config.sections.method import SftMethod
from halftune.core.errors import ConfigError, DataError
from halftune.core.log import get_logger
from halftune.data.cache import cache_key, cached
from halftune.data.detect import Reading, detect_for
from halftune.data.fed import efficiency
from halftune.data.forms import NO_SYSTEM
from halftune.data.mixture import choose_rows, contents, hold_out, weigh
from halftune.data.report import MERGE, Count, DataReport, SourceReport, histogram, nothing_left
from halftune.data.sources import Rows, Source, open_source
from halftune.data.split import TokenizedSplit
from halftune.data.store import TokenStore, build_store
from halftune.data.tokenize import BadRow, Outcome, Settings
from halftune.data.workers import tokenize_rows

log = get_logger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """What training is fed.

    Attributes:
        train: training samples of an epoch, weights applied.
        eval: evaluation samples, or None.
        report: what became of every row.
        fingerprints: of the content of each source of ``train`` and ``eval``, in the order of the configuration.
    """

    train: TokenizedSplit
    eval: TokenizedSplit | None
    report: DataReport
    fingerprints: dict[str, list[str]]


def prepare(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Reads, tokenises and mixes the sources of a run, or finds them in the cache.

    Args:
        config: the run; its data, method, seed and chat-template variables are read.
        tokenizer: a fast tokenizer, with a chat template unless the data is plain text.

    Raises:
        ConfigError: both ``eval`` and ``eval_split`` are set.
        DataError: a source is missing, malformed, of an unknown format, or leaves nothing to train on.
    """
    data, seed = config.data, config.training.seed
    if data.eval and data.eval_split:
        raise ConfigError("both are set", where="data.eval, data.eval_split", remedy="remove one of them")
    train_stores, train_reports, train_prints = _sources(data.train, config, tokenizer)
    ranges = _ranges(train_stores)
    held: list[np.ndarray] = []
    if not data.eval and data.eval_split:
        content = contents(train_stores)
        kept, out = hold_out(content, data.eval_split, seed=seed)
        if copies := len(content) - len(kept) - len(out):
            log.info("data.eval_split: %s copies of held-out samples are left out of training", copies)
        held = [out]
        ranges = [np.intersect1d(places, kept) for places in ranges]
    positions = weigh(ranges, [section.weight for section in data.train], seed=seed)
    train, evaluation = TokenizedSplit(train_stores, positions), None
    eval_reports: list[SourceReport] = []
    eval_prints: list[str] = []
    if data.eval:
        stores, eval_reports, eval_prints = _sources(data.eval, config, tokenizer)
        weights = [section.weight for section in data.eval]
        evaluation = TokenizedSplit(stores, weigh(_ranges(stores), weights, seed=seed))
    elif held:
        evaluation = TokenizedSplit(train_stores, held[0])
    report = DataReport(
        train=train_reports,
        eval=eval_reports,
        train_samples=len(train),
        eval_samples=len(evaluation) if evaluation else 0,
        max_length=data.max_length,
        efficiency=efficiency(train.lengths, config),
    )
    return PreparedData(train, evaluation, report, {"train": train_prints, "eval": eval_prints})


def _sources(
    sections: Sequence[SourceSection], config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[TokenStore], list[SourceReport], list[str]]:
    """Stores, reports and fingerprints of some sources."""
    sources = [open_source(section) for section in sections]
    pairs = [_source(source, config, tokenizer) for source in sources]
    return [store for store, _ in pairs], [report for _, report in pairs], [source.fingerprint for source in sources]


def _source(source: Source, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[TokenStore, SourceReport]:
    section, settings, seed = source.section, _settings(config), config.training.seed

    def make() -> tuple[TokenStore, dict[str, Any]]:
        rows = source.read()
        if section.samples is not None and section.samples > len(rows):
            log.warning("%s: samples: %s, but it has %s rows only", section.path, section.samples, len(rows))
        chosen = choose_rows(len(rows), section.samples, seed=seed)
        store, report = _tokenize(rows, chosen, section, config, tokenizer)
        return store, asdict(report)

    if not config.data.cache:
        store, values = make()
    else:
        parts = {
            "source": source.fingerprint,
            "settings": asdict(settings),
            "reading": section.model_dump(include={"path", "split", "format", "columns", "samples"}),
            "seed": seed if section.samples is not None else None,
        }
        store, values = cached(cache_key(tokenizer, parts), make)
    report = SourceReport.from_dict(values)
    log.info("%s: format %s, %s of %s rows kept", section.path, report.format, report.kept, report.taken)
    _warn(report, config.data.max_length)
    return store, report


def _warn(report: SourceReport, max_length: int) -> None:
    """Says which rows are not trained on as they stand, and what to do about it."""
    raised = f"raise data.max_length ({max_length})"
    for reason, count in report.dropped.items():
        remedy = "correct them, if they should be trained on"
        if "max_length" in reason:
            remedy = f"{raised}, or see data.overlong"
        elif reason == NO_SYSTEM:
            remedy = MERGE
        log.warning("%s: left out: %s: %s · %s", report.name, reason, count, remedy)
    for reason, count in report.truncated.items():
        log.warning("%s: made to fit: %s: %s · %s to keep them whole", report.name, reason, count, raised)


def _settings(config: RunConfig) -> Settings:
    method = config.method
    return Settings(
        method=method.type,
        train_on=method.train_on if isinstance(method, SftMethod) else "all",
        max_length=config.data.max_length,
        overlong=config.data.overlong,
        system=config.data.system,
        merge_system=config.data.merge_system,
        template_variables=dict(config.model.chat_template_kwargs),
    )


def _tokenize(
    rows: Rows, chosen: np.ndarray, section: SourceSection, config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenStore, SourceReport]:
    everything = rows.all()
    taken = [everything[index] for index in chosen]
    reading = detect_for(config.method.type, taken, section)
    report = SourceReport(
        name=section.path,
        format=reading.format.name,
        columns=reading.columns,
        absent=list(reading.absent),
        unused=list(reading.unused),
        gaps=reading.gaps,
        rows=len(rows),
        taken=len(taken),
    )
    samples, origins = _collect(rows, chosen, taken, reading, config, tokenizer, report)
    if not samples:
        raise nothing_left(report.name, report.dropped)
    store = build_store(samples, origins, [(str(part.path), part.unit) for part in rows.parts])
    report.samples, report.tokens = len(store), len(store.ids)
    report.trained_tokens = int(store.trained.sum())
    report.lengths = histogram(store.lengths)
    return store, report


def _collect(
    rows: Rows,
    chosen: np.ndarray,
    taken: list[dict[str, Any]],
    reading: Reading,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    report: SourceReport,
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[tuple[int, int]]]:
    """Samples of the rows and their origins; counts in ``report`` what became of each row."""
    samples, origins = [], []
    try:
        outcomes = tokenize_rows(taken, tokenizer, reading, _settings(config), config.data.num_workers)
        for index, outcome in zip(chosen.tolist(), outcomes, strict=True):
            samples += outcome.samples
            origins += [rows.origin(index)] * len(outcome.samples)
            if outcome.samples and (note := rows.note(index)):
                outcome.notes = (*outcome.notes, note)
            _count(report, outcome, rows.place(index))
    except BadRow as error:
        position, what, remedy = error.args
        raise DataError(what, where=rows.where(int(chosen[position])), remedy=remedy) from error
    return samples, origins


def _count(report: SourceReport, outcome: Outcome, place: str) -> None:
    report.kept += bool(outcome.samples)
    report.truncated_rows += bool(outcome.truncated)
    report.answers_lost += outcome.answers_lost
    reasons = [(report.dropped, outcome.dropped)] if outcome.dropped else []
    reasons += [(report.truncated, what) for what in outcome.truncated]
    reasons += [(report.notes, what) for what in outcome.notes]
    for counts, reason in reasons:
        counts.setdefault(reason, Count()).add(place)


def _ranges(stores: Sequence[TokenStore]) -> list[np.ndarray]:
    """Positions of each store's samples, counted through all stores."""
    ends = np.cumsum([len(store) for store in stores])
    return [np.arange(end - len(store), end) for end, store in zip(ends, stores, strict=True)]
