"""Builds tokenised splits and the data report from the ``data`` section.

Tokenised sources are cached on disk, keyed by everything that affects the tokens.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from halftune import __version__
from halftune.config.run import RunConfig
from halftune.config.sections.data import SourceSection
from halftune.core import disk_cache
from halftune.core.errors import ConfigError
from halftune.core.log import get_logger
from halftune.data.encode.offset_tokenizer import backend_json
from halftune.data.encode.settings import Settings, settings_of
from halftune.data.formats.conversation import BadRow
from halftune.data.formats.detect import bad_row, detect_for
from halftune.data.order.split import TokenizedSplit, choose_rows, contents, efficiency, hold_out, weigh, without_copies
from halftune.data.report import LEFT_OVER, Count, DataReport, SourceReport, histogram, nothing_left, remedy_of
from halftune.data.sources.source import Rows, Source, TakenRows, open_source
from halftune.data.store import Example, StoreWriter, TokenStore, load_store, ranges_of
from halftune.data.templates.render import writes_date

if TYPE_CHECKING:
    from halftune.data.encode.groups import Grouper
    from halftune.data.encode.tokenize import Outcome
    from halftune.data.media.processor import MediaSettings
    from halftune.data.stream import TokenStream

log = get_logger(__name__)

WRITTEN = 4096  # examples written at a time
_FILES = "files"  # in the cache beside the report: places of the media of dropped rows
PACKAGE = Path(__file__).parent  # any change in here may change tokens, labels or the report

Tokenised = tuple[TokenStore, dict[str, Any]]
Make = Callable[[Path | None], Tokenised]  # writes the store into a folder, or keeps it in memory


def cache_key(tokenizer: PreTrainedTokenizerBase, parts: dict[str, Any]) -> str:
    """sha256 of the tokenizer, its chat template, this package's code and ``parts`` (JSON)."""
    everything = {
        "halftune": __version__,
        "code": code_of(PACKAGE),
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "tokenizer": hashlib.sha256(backend_json(tokenizer).encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        **parts,
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()


@cache
def code_of(folder: Path) -> str:
    """sha256 of the names and contents of all Python files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def cached(key: str, make: Make, valid: Callable[[TokenStore, dict[str, Any]], bool] | None = None) -> Tokenised:
    """Return the result of ``make``, from the cache if it is there; an entry that is not ``valid`` is rebuilt."""

    def save(folder: Path) -> None:
        (folder / "report.json").write_text(json.dumps(make(folder)[1]), encoding="utf-8")

    def load(folder: Path) -> Tokenised | None:
        found, values = load_store(folder), json.loads((folder / "report.json").read_text(encoding="utf-8"))
        if valid is not None and not valid(found, values[_FILES]):
            log.info("files that the token cache refers to changed: rebuilding")
            return None
        return found, values

    return disk_cache.stored(disk_cache.entry("data", key), save, load, "tokenised data") or make(None)


@dataclass(frozen=True)
class PreparedData:
    """The tokenised data of a run.

    Attributes:
        train: training samples of an epoch, source weights applied.
        eval: evaluation samples; None without evaluation data.
        report: counts of kept, dropped and truncated rows.
        fingerprints: content hashes of the sources of ``train`` and ``eval``, in config order.
        day: ISO date in the chat template; None if the template prints no date.
        stream: with ``data.streaming``, what training reads; ``train`` then has the first rows of each source.
    """

    train: TokenizedSplit
    eval: TokenizedSplit | None
    report: DataReport
    fingerprints: dict[str, list[str]]
    day: str | None = None
    stream: TokenStream | None = None


def prepare(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    day: str | None = None,
    images: MediaSettings | None = None,
) -> PreparedData:
    """Read, tokenise and mix the sources of a run; tokenised sources are cached.

    Args:
        config: reads data, method, seed and chat-template variables.
        tokenizer: a fast tokenizer; conversations also need its chat template.
        day: ISO date for chat templates that print the date, from the resumed run; default today.
        images: how images become tokens, with ``data.images``.

    Raises:
        ConfigError: both ``eval`` and ``eval_split`` are set.
        DataError: a source is missing, malformed, of an unknown format, or leaves nothing to train on.
    """
    data, seed = config.data, config.training.seed
    if data.eval and data.eval_split:
        raise ConfigError(
            "mutually exclusive", where="data.eval, data.eval_split", remedy="remove one", code="config.keys_conflict"
        )
    settings = replace(settings_of(config, _day_written(tokenizer, day)), images=images)
    stream = _stream(config, tokenizer, settings)
    train_stores, train_reports, train_prints = (
        stream.first if stream else _sources(data.train, config, tokenizer, settings)
    )
    ranges = ranges_of(train_stores)
    ranges = without_copies(train_stores, ranges) if data.deduplicate else ranges
    evaluation: TokenizedSplit | None = None
    eval_reports, eval_prints = list[SourceReport](), list[str]()
    if data.eval_split:
        kept, out = _hold_out(train_stores, data.eval_split, seed)
        ranges = [np.intersect1d(places, kept) for places in ranges]
        evaluation = TokenizedSplit(train_stores, out)
    elif data.eval:
        stores, eval_reports, eval_prints = _sources(data.eval, config, tokenizer, settings)
        shown = weigh(ranges_of(stores), [section.weight for section in data.eval], seed=seed)
        evaluation = TokenizedSplit(stores, shown, [section.name for section in data.eval])
    weights = [1.0 if stream else section.weight for section in data.train]
    train = TokenizedSplit(train_stores, weigh(ranges, weights, seed=seed))
    report = DataReport(
        train=train_reports,
        eval=eval_reports,
        train_samples=len(train),
        eval_samples=len(evaluation) if evaluation else 0,
        max_length=data.max_length,
        efficiency=efficiency(train, config),
        streamed=stream is not None,
    )
    return PreparedData(train, evaluation, report, {"train": train_prints, "eval": eval_prints}, settings.day, stream)


def _stream(config: RunConfig, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> TokenStream | None:
    if not config.data.streaming.enabled:
        return None
    from halftune.data.stream import TokenStream  # few runs stream

    return TokenStream(config, tokenizer, settings)


def _day_written(tokenizer: PreTrainedTokenizerBase, day: str | None) -> str | None:
    """The date for the chat template; None if it prints no date, so the cache stays valid on other days."""
    templates = tokenizer.chat_template or ""
    found = templates.values() if isinstance(templates, dict) else [templates]
    if not any(map(writes_date, found)):
        return None
    day = day or date.today().isoformat()
    log.info("the chat template prints the date: this run uses %s", day)
    return day


def _sources(
    sections: Sequence[SourceSection], config: RunConfig, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> tuple[list[TokenStore], list[SourceReport], list[str]]:
    """Token stores, reports and fingerprints of the sources."""
    sources = [open_source(section) for section in sections]
    pairs = [_source(source, config, tokenizer, settings) for source in sources]
    prints = [source.fingerprint for source in sources]
    if (images := settings.images) is not None:
        prints = [images.with_images(one, store) for one, (store, _) in zip(prints, pairs, strict=True)]
    return [store for store, _ in pairs], [report for _, report in pairs], prints


def _source(
    source: Source, config: RunConfig, tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> tuple[TokenStore, SourceReport]:
    section, seed = source.section, config.training.seed
    settings = replace(settings, drop_system=section.drop_system)
    if settings.images is not None:
        settings = replace(settings, images=settings.images.of_source(section.path, config.data.media_folder))

    def make(folder: Path | None) -> Tokenised:
        rows = source.read()
        if (section.samples or 0) > len(rows):
            log.warning("%s: samples: %s exceeds its %s rows", section.path, section.samples, len(rows))
        chosen = choose_rows(len(rows), section.samples, seed=seed, first=section.sampling == "first")
        store, report, files = _tokenize(rows, chosen, section, config, tokenizer, settings, folder)
        source.check()
        return store, {**asdict(report), _FILES: files}

    if not config.data.cache:
        store, values = make(None)
    else:
        parts = {
            "source": source.fingerprint,
            "settings": asdict(settings),
            "method": config.method.type,  # it decides which formats are read
            "reading": section.model_dump(exclude={"weight", "name"}),
            "seed": seed if section.samples is not None else None,
        }
        valid = settings.images.unchanged if settings.images else None
        store, values = cached(cache_key(tokenizer, parts), make, valid)
    kept = {name: value for name, value in values.items() if name != _FILES}
    report = SourceReport.from_dict({**kept, "skipped": list(source.skipped)})
    log.info("%s: format %s, %s of %s rows kept", section.path, report.format, report.kept, report.taken)
    _warn(report, config.data.max_length)
    return store, report


def _warn(report: SourceReport, max_length: int) -> None:
    """Log dropped and truncated rows with a remedy."""
    for reason, count in report.dropped.items():
        log.warning("%s: dropped: %s: %s · %s", report.name, reason, count, remedy_of(reason))
    if report.lost_characters:
        what = "%s: the tokenizer cannot represent %s of %s characters, for example %s"
        log.warning(what, report.name, report.lost_characters, report.characters, report.lost)
    for reason, count in report.truncated.items():
        what = "%s: truncated: %s: %s · raise data.max_length (%s) to keep whole rows"
        log.warning(what, report.name, reason, count, max_length)


def _tokenize(
    rows: Rows,
    chosen: np.ndarray,
    section: SourceSection,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    folder: Path | None,
) -> tuple[TokenStore, SourceReport, dict[str, Any]]:
    from halftune.data.encode.workers import tokenize_rows  # prepared data is read from its cache

    gc.freeze()  # rows and modules stay alive: scanning them in every full collection takes a tenth of the time
    taken = TakenRows(rows, chosen)
    reading = detect_for(config.method, taken, section)
    report = SourceReport.started(section.path, reading, rows=len(rows), taken=len(taken))
    outcomes = tokenize_rows(taken, tokenizer, reading, settings, config.data.num_workers)
    writer = StoreWriter(folder, [(str(part.path), part.unit) for part in rows.parts])
    grouper = None
    if reading.format.record == "rated":
        from halftune.data.encode.groups import Grouper  # few runs have rated rows

        grouper = Grouper(settings.group, settings.max_length)
    try:
        files = _collect(rows, chosen, outcomes, report, writer, grouper)
    except BadRow as error:
        places = chosen.tolist()
        raise bad_row(error, taken, lambda at: rows.where(places[at]), reading, section, config.method) from error
    if not report.kept:
        raise nothing_left(report.name, report.dropped)
    report.check_lost()
    store = writer.finish()
    report.samples, report.tokens, report.trained_tokens = len(store), len(store.ids), int(store.trained.sum())
    report.lengths = histogram(store.lengths)
    return store, report, files


def _collect(
    rows: Rows,
    chosen: np.ndarray,
    outcomes: Iterator[Outcome],
    report: SourceReport,
    writer: StoreWriter,
    grouper: Grouper | None,
) -> dict[str, Any]:
    """Write examples and their origins, in groups if there is a grouper; count each row's outcome in ``report``.

    Returns the places of the media of dropped rows.
    """
    examples, origins, waiting = list[Example](), list[tuple[int, int]](), list[int]()
    files = dict[str, Any]()
    for index, outcome in zip(chosen.tolist(), outcomes, strict=True):
        found, places = outcome.examples, [rows.origin(index)] * len(outcome.examples)
        if grouper is not None:
            waiting += [index] * len(found)
            found, places = grouper.complete(found, places)
            waiting = waiting[len(waiting) - grouper.left :]
        examples += found
        origins += places
        if outcome.examples and (note := rows.note(index)):
            outcome.notes = (*outcome.notes, note)
        report.count(outcome, rows, index)
        files |= outcome.files
        if len(examples) >= WRITTEN:
            writer.append(examples, origins)
            examples, origins = [], []
    for index in waiting:
        report.kept -= 1
        report.dropped.setdefault(LEFT_OVER, Count()).add(rows.place(index))
    if examples:
        writer.append(examples, origins)
    return files


def _hold_out(stores: Sequence[TokenStore], share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of samples for training and for evaluation."""
    kept, out = hold_out(content := contents(stores), share, seed=seed)
    if copies := len(content) - len(kept) - len(out):
        log.info("data.eval_split: left %s duplicates of held-out samples out of training", copies)
    return kept, out
