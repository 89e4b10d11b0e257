"""The rows of an evaluation, as each model's own tokenizer, chat template and labels make them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.config.run import RunConfig
from halftune.config.sections.data import DataSection, SourceSection, StreamingSection
from halftune.config.sections.method import ConversationMethod, PretrainMethod, SftMethod
from halftune.core.errors import ConfigError, DataError
from halftune.data.encode.prompts import PromptTokenizer, as_prompt
from halftune.data.encode.settings import settings_of
from halftune.data.formats.conversation import Prompted
from halftune.data.formats.detect import detect_for
from halftune.data.formats.fields import with_nulls
from halftune.data.order.split import TokenizedSplit
from halftune.data.pipeline import prepare
from halftune.data.sources.source import Rows, TakenRows, open_source
from halftune.evaluate.targets import Target
from halftune.model.files.locate import media_of
from halftune.train.checkpoint.run_inputs import template_date

Origin = tuple[str, str, int]  # file, unit and number of a row


@dataclass(frozen=True)
class Chosen:
    """Which rows are evaluated.

    Attributes:
        what: in words.
        data: the ``data`` section whose sources they are.
        seed: that held rows out.
        held_out: whether they are the evaluation split, else all of ``data.train``.
        limit: how many at most; None: all.
    """

    what: str
    data: DataSection
    seed: int
    held_out: bool
    limit: int | None

    def config(self, own: RunConfig) -> RunConfig:
        """A model's configuration with these rows: labels of answers, or of all tokens if it was pre-trained."""
        method = own.method
        if not isinstance(method, PretrainMethod):
            kept = SftMethod.model_fields.keys() & type(method).model_fields.keys() - {"type", "loss"}
            labels = {name: getattr(method, name) for name in kept} if isinstance(method, ConversationMethod) else {}
            method = SftMethod(**labels)
        shown = {name: getattr(self.data, name) for name in ("train", "eval", "eval_split", "deduplicate", "streaming")}
        training = own.training.model_copy(update={"seed": self.seed})
        changes = {"data": own.data.model_copy(update=shown), "method": method, "training": training}
        return own.model_copy(update=changes)


def choose_rows(given: str | None, targets: Sequence[Target], limit: int | None) -> Chosen:
    """The rows that were asked for, else the evaluation set of the first run, else its training set.

    Raises:
        ConfigError: no data is named, and there is no run, or its method trains on other rows than answers.
    """
    if given is not None:
        source = SourceSection(path=os.path.expanduser(given))
        return Chosen(given, _only(targets[0].run.loaded.run.data, (source,)), 0, False, limit)
    first = next((one for one in targets if one.trained_here), None)
    if first is None:
        what, remedy = "plain models have no data of their own", "use for example --data rows.jsonl"
        raise ConfigError(what, where="--data", remedy=remedy, code="evaluate.no_data")
    config = first.run.loaded.run
    if not {"conversation", "document"} & set(config.method.records):
        what = f"the rows of a run with method: {config.method.type} have no single answer"
        remedy = "name rows that have one, for example --data rows.jsonl"
        raise ConfigError(what, where="--data", remedy=remedy, code="evaluate.no_data")
    data, seed = config.data, config.training.seed
    if data.eval:
        return Chosen(f"evaluation set of {first.name}", _only(data, data.eval), seed, False, limit)
    if data.eval_split:
        return Chosen(f"rows that {first.name} held out of training", data, seed, True, limit)
    return Chosen(f"training set of {first.name}, which has no evaluation set", data, seed, False, limit)


def _only(data: DataSection, sources: Sequence[SourceSection]) -> DataSection:
    own = {"train": tuple(sources), "eval": (), "eval_split": 0.0, "deduplicate": False}
    return data.model_copy(update={**own, "streaming": StreamingSection()})


@dataclass(frozen=True)
class TokenizedRows:
    """The rows as one model reads them.

    Attributes:
        config: the model's, with these rows.
        split: all rows.
        count: how many of them are evaluated, from the first.
        origins: of each evaluated sample.
        day: ISO date in the chat template; None if it prints none.
    """

    config: RunConfig
    split: TokenizedSplit
    count: int
    origins: tuple[Origin, ...]
    day: str | None

    def fingerprint(self) -> str:
        """sha256 of the evaluated tokens and labels."""
        digest = hashlib.sha256()
        for index in range(self.count):
            for segment in self.split.example(index).segments:
                digest.update(len(segment.input_ids).to_bytes(8, "little"))
                digest.update(segment.input_ids.tobytes() + segment.loss_mask.tobytes())
        return digest.hexdigest()


def tokenize(rows: Chosen, target: Target, tokenizer: PreTrainedTokenizerBase) -> TokenizedRows:
    """Tokenise the rows as training would have; the result is cached.

    Raises:
        DataError: a row is malformed, or nothing of the data can be used.
    """
    config = rows.config(target.run.loaded.run)
    day = template_date(target.run.folder, None) if target.trained_here else None
    data = prepare(config, tokenizer, day, media_of(config))
    split = data.eval if rows.held_out else data.train
    assert split is not None
    count = min(len(split), rows.limit or len(split))
    return TokenizedRows(config, split, count, tuple(split.origin(index) for index in range(count)), data.day)


@dataclass(frozen=True)
class Question:
    """A prompt with a reference.

    Attributes:
        origin: of its row.
        ids: int32 ``[T]``, the prompt up to where the answer begins.
        text: the messages of the prompt, or the prompt itself.
        reference: the last answer of the row.
    """

    origin: Origin
    ids: np.ndarray
    text: Any
    reference: str


def questions(rows: TokenizedRows, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """The prompts of the evaluated rows, rendered as `halftune chat` does, with the last answer as reference.

    Raises:
        ConfigError: the model reads images or audio.
        DataError: no row has an answer, or a row is malformed.
    """
    config = rows.config
    if config.data.media:
        what, remedy = "answers to images and audio are not evaluated", "leave out --metrics: the loss is measured"
        raise ConfigError(what, where="--metrics", remedy=remedy, code="evaluate.media_answers")
    found: dict[Origin, Question] = {}
    for section in config.data.train:
        found |= {one.origin: one for one in _of_source(section, rows, tokenizer)}
    if not found:
        what = "no row has a prompt with an answer to compare with"
        remedy = "use rows with prompt and completion, or with messages that end with the assistant's"
        where = ", ".join(one.path for one in config.data.train)
        raise DataError(what, where=where, remedy=remedy, code="evaluate.no_references")
    return [found[origin] for origin in dict.fromkeys(rows.origins) if origin in found]


def _of_source(section: SourceSection, rows: TokenizedRows, tokenizer: PreTrainedTokenizerBase) -> Iterator[Question]:
    read, config = open_source(section).read(), rows.config
    places = [_origin(read, index) for index in range(len(read))]
    samples = {origin: index for index, origin in enumerate(rows.origins)}
    chosen = np.flatnonzero([place in samples for place in places])
    reading = detect_for(config.method, TakenRows(read, np.arange(len(read))), section)
    if reading.format.record == "document":
        return
    records = [(places[index], row) for index, row in zip(chosen, TakenRows(read, chosen), strict=True)]
    if reading.format.name == "prompted":  # no chat template: the prompt stands before the first label
        for origin, row in records:
            made, segment = reading.format.read(reading.rename(row)), rows.split.example(samples[origin]).segments[0]
            assert isinstance(made, Prompted)
            ids = segment.input_ids[: int(segment.loss_mask.argmax())]
            yield Question(origin, ids, str(tokenizer.decode(ids, skip_special_tokens=True)), made.answer)
        return
    settings = replace(settings_of(config, rows.day), drop_system=section.drop_system, prompts=True)
    outcomes = PromptTokenizer(tokenizer, reading, settings).tokenize([row for _, row in records])
    for (origin, row), outcome in zip(records, outcomes, strict=True):
        if outcome.examples:
            asked, answer = as_prompt(reading.format.read(with_nulls(reading.rename(row))))
            yield Question(origin, outcome.examples[0].segments[0].input_ids, asked.messages, answer or "")


def _origin(rows: Rows, index: int) -> Origin:
    part, number = rows.origin(index)
    return str(rows.parts[part].path), rows.parts[part].unit, number
