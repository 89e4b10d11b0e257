"""Draws the prompts of probes from a run's rows, rendered as chat and servers do for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from halftune.config.run import RunConfig
from halftune.config.sections.data import SourceSection
from halftune.core.errors import DataError
from halftune.core.log import FILE_ONLY, get_logger
from halftune.core.processes.time_limit import OutOfTime
from halftune.data.encode.prompts import as_prompt
from halftune.data.encode.settings import settings_of
from halftune.data.encode.tokenize import RowTokenizer
from halftune.data.formats.conversation import Conversation, Preference, Rated, RowDropped, RowError
from halftune.data.formats.detect import detect_for
from halftune.data.order.split import TokenizedSplit
from halftune.data.sources.source import open_source
from halftune.data.store import Segment
from halftune.data.templates.render import conversation_limits, with_date, writes_date
from halftune.model.files.load_errors import TEMPLATE_ERRORS

log = get_logger(__name__)

LONGEST = 512  # tokens of a prompt
_EARLY = 1000  # examples at the beginning of each source: a large file is not read to its end
_SPARE = 4  # candidates for each probe: some rows are too long, or have images
_DRAW = 11  # a random stream of its own, beside those of ``data.order``
_DOCUMENT = 32  # tokens of a document that are its prompt, at most half of them
_CHARACTER = 4  # tokens of a character at most

Place = tuple[int, str, int]  # number of the source, file, row


@dataclass(frozen=True)
class Question:
    """A prompt: its tokens and text; ``messages`` is None where no chat template renders it."""

    ids: list[int]
    text: str
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


def draw(
    config: RunConfig,
    split: TokenizedSplit,
    sections: Sequence[SourceSection],
    tokenizer: Any,
    day: str | None,
    count: int,
) -> list[Question]:
    """Draw up to ``count`` different prompts of at most ``LONGEST`` tokens; rows with images or sounds are left out.

    ``training.seed`` decides which. A row that cannot be read again gives its tokens without messages.

    Args:
        config: of the run.
        split: its evaluation or training examples.
        sections: the sources of the split's stores.
        tokenizer: of the run.
        day: ISO date in the chat template, or None.
        count: how many.
    """
    early = np.flatnonzero(split.places < _EARLY)
    order = np.random.default_rng([config.training.seed, _DRAW]).permutation(early)[: _SPARE * count].tolist()
    places = {index: split.source_row(index) for index in order}
    asked = _conversations(config, sections, tokenizer, set(places.values())) if tokenizer.chat_template else {}
    found: dict[tuple[int, ...], Question] = {}
    for index in order:
        segment = split.example(index).segments[0]
        if segment.media or len(found) == count:
            continue
        made = asked.get(places[index])
        one = made and _rendered(made, tokenizer, config.model.chat_template_kwargs, day)
        one = one or _of_tokens(segment, tokenizer)
        if one is not None and 0 < len(one.ids) <= LONGEST:
            found.setdefault(tuple(one.ids), one)
    return list(found.values())


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    day: str | None,
) -> tuple[str, list[int]] | None:
    """The text and the tokens of a prompt, with the beginning of the answer; None if the chat template refuses it.

    Args:
        tokenizer: with a chat template.
        messages, tools: the conversation before the answer.
        variables: further variables of the template.
        day: ISO date for a template that prints the date; None for today.
    """
    try:
        source = str(tokenizer.get_chat_template(tools=tools))
        if day and writes_date(source):
            source = with_date(source, date.fromisoformat(day))
        with conversation_limits():
            text = str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=tools,  # type: ignore[arg-type]
                    chat_template=source,
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
            )
    except (*TEMPLATE_ERRORS, OutOfTime, MemoryError):
        return None
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]


def _rendered(
    made: Conversation, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any], day: str | None
) -> Question | None:
    found = render(tokenizer, made.messages, made.tools, variables, day)
    return found and Question(found[1], found[0], made.messages, made.tools)


def _of_tokens(segment: Segment, tokenizer: Any) -> Question | None:
    """The prompt's tokens, cut where its text gives the same tokens again: not inside a character. None: nowhere."""
    ids = segment.prompt.tolist()
    if len(ids) < 2:  # a document: every token is trained but the first, which nothing predicts
        ids = segment.input_ids[: min(_DOCUMENT, len(segment.input_ids) // 2)].tolist()
    for end in range(len(ids), max(len(ids) - _CHARACTER, 0), -1):
        text = str(tokenizer.decode(ids[:end]))
        if tokenizer(text, add_special_tokens=False)["input_ids"] == ids[:end]:
            return Question(ids[:end], text)
    return None


def _conversations(
    config: RunConfig, sections: Sequence[SourceSection], tokenizer: PreTrainedTokenizerBase, wanted: set[Place]
) -> dict[Place, Conversation]:
    """The conversations before the last answer, of rows that are read again."""
    found: dict[Place, Conversation] = {}
    for number, section in enumerate(sections):
        own = {(file, row) for source, file, row in wanted if source == number}
        try:
            if own and not config.data.streaming.enabled:
                made = _of_source(config, section, tokenizer, own)
                found |= {(number, *place): one for place, one in made.items()}
        except (DataError, RowError) as error:
            log.info("%s: probes without messages: %s", section.path, error, extra=FILE_ONLY)
    return found


def _of_source(
    config: RunConfig, section: SourceSection, tokenizer: PreTrainedTokenizerBase, wanted: set[tuple[str, int]]
) -> dict[tuple[str, int], Conversation]:
    rows = open_source(section).read()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for index, row in enumerate(rows):
        part, number = rows.origin(index)
        if (place := (str(rows.parts[part].path), number)) in wanted:
            found[place] = row
            if len(found) == len(wanted):
                break
    reading = detect_for(config.method, list(found.values()), section)
    if reading.format.name in ("text", "prompted"):
        return {}
    settings = replace(settings_of(config, None), drop_system=section.drop_system)
    encoder = RowTokenizer(tokenizer, reading, settings)
    asked = {}
    for place, row in found.items():
        try:
            made = reading.format.read(reading.rename(row))
            made = made.chosen if isinstance(made, Preference) else made
            before, _ = as_prompt(made.conversation if isinstance(made, Rated) else made)
            if not before.media:
                asked[place] = encoder.for_template(before)
        except RowDropped:
            continue
    return asked
