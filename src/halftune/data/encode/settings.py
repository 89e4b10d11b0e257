"""Settings of tokenisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from halftune.config.run import RunConfig
from halftune.config.sections.method import AnswerMethod, ConversationMethod, MethodSection, PretrainMethod

if TYPE_CHECKING:
    from halftune.data.media.processor import MediaSettings


@dataclass(frozen=True)
class Settings:
    """Settings of tokenisation, all part of the cache key.

    Attributes:
        train_on: as ``method.train_on``.
        max_length, overlong: as ``data.max_length`` (in tokens) and ``data.overlong``.
        system, merge_system: as in ``data``.
        drop_system: as in the source.
        on_lost_text: as in ``data``.
        template_variables: further variables of the chat template.
        day: ISO date in the chat template; None if the template prints no date.
        train_line_break, group: as ``method.train_line_break`` and ``method.rows``.
        prompts: whether rows are prompts, which the model answers in training.
        documents: whether every token of a row is trained, and long rows are cut into pieces.
        margins: whether the method reads by how much the chosen answer of a pair is better.
        label_ends: as ``method.label_ends`` with ``method.labels: text``; None: with ``turn``.
        images: how images become tokens; None: rows with images are dropped.
    """

    train_on: str
    max_length: int
    overlong: str
    system: str | None
    merge_system: bool = False
    template_variables: dict[str, Any] = field(default_factory=dict)
    day: str | None = None
    drop_system: bool = False
    on_lost_text: str = "warn"
    train_line_break: bool = False
    label_ends: tuple[str, ...] | None = None
    group: int = 1
    prompts: bool = False
    documents: bool = False
    margins: bool = False
    images: MediaSettings | None = None

    def ends_with_labels(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...] | None:
        """``label_ends`` and EOS; the checkpoint's EOS, not that of a named template."""
        eos = str(getattr(tokenizer, "own_eos", tokenizer.eos_token))
        return None if self.label_ends is None else (eos, *self.label_ends)


def _labels(method: MethodSection) -> dict[str, Any]:
    line_break = isinstance(method, AnswerMethod) and method.train_line_break
    if not isinstance(method, ConversationMethod):
        trained = "all" if isinstance(method, PretrainMethod) else "assistant"
        return {"train_on": trained, "train_line_break": line_break}
    ends = tuple(method.label_ends) if method.labels == "text" else None
    return {"train_on": method.train_on, "train_line_break": line_break, "label_ends": ends}


def settings_of(config: RunConfig, day: str | None) -> Settings:
    """The settings of a run; ``day`` as in ``Settings``."""
    return Settings(
        max_length=config.data.max_length - config.method.answer_tokens,
        overlong=config.data.overlong,
        system=config.data.system,
        merge_system=config.data.merge_system,
        on_lost_text=config.data.on_lost_text,
        template_variables=dict(config.model.chat_template_kwargs),
        day=day,
        group=config.method.rows,
        prompts=config.method.generates,
        documents="document" in config.method.records,
        margins=config.method.head == "score",
        **_labels(config.method),
    )
