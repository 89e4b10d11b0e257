"""What all methods have in common: the base classes of the ``method`` section."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from halftune.config.sections import LISTED, Flag, Section
from halftune.config.sections.model import ModelSection

RecordName = Literal["conversation", "document", "preference", "rated", "prompt"]


class Method(Section):
    """Properties of a method for data, plan and memory estimate.

    Attributes:
        title: what the report calls it.
        learns: what is trained on, as the plan says it.
        records: what its rows say; the first name is what an error asks for.
        segments: token sequences of an example; one forward pass holds all of them.
        generates: whether rows are prompts only, which the model answers in training.
        needs_reference: whether it compares with the model as it was before training.
        growth: tokens by which an example may become longer in training.
        head: what the model ends in: logits of the vocabulary, or one score.
    """

    title: ClassVar[str]
    learns: ClassVar[str]
    records: ClassVar[tuple[RecordName, ...]]
    segments: ClassVar[int] = 1
    generates: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    growth: ClassVar[int] = 0
    head: ClassVar[Literal["tokens", "score"]] = "tokens"

    @property
    def teacher_model(self) -> ModelSection | None:
        """The frozen model that the trained one learns from, if any."""
        return None

    @property
    def samples_answers(self) -> bool:
        """Whether the model answers in training."""
        return self.generates

    @property
    def rows(self) -> int:
        """Rows of data in an example."""
        return 1

    @property
    def answer_tokens(self) -> int:
        """Tokens of ``data.max_length`` that are kept free for an answer of the model."""
        return 0

    @property
    def labelled_share(self) -> float:
        """Share of the tokens whose log-probability is computed, which the memory of the loss grows with."""
        return 0.5  # answers are about as long as what they answer


class AnswerMethod(Method):
    """A method on the tokens of answers."""

    train_line_break: Flag = False
    """Label what the chat template writes after an answer's end-of-turn token too, such as ChatML's line break."""


class ConversationMethod(AnswerMethod):
    """A method on the labelled tokens of conversations."""

    records: ClassVar[tuple[RecordName, ...]] = ("conversation",)

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Labelled tokens: every assistant turn, the last assistant turn only, or the whole conversation."""

    labels: Literal["turn", "text"] = "turn"
    """Labels of a trained turn. `turn`: everything that the model generates, with the end-of-turn token. `text`: only
    the message's own text, without an empty reasoning block that the chat template adds. The end-of-turn token is then
    labelled only if it is the checkpoint's EOS or in `label_ends`."""

    label_ends: Annotated[list[str], LISTED] = Field(default_factory=list)
    """With `labels: text`: end-of-turn tokens to label in addition to EOS."""

    @property
    def labelled_share(self) -> float:
        return 1.0 if self.train_on == "all" else super().labelled_share


class ReferenceMethod(Method):
    """A method that compares with the model before training."""

    needs_reference: ClassVar[bool] = True

    reference: Literal["auto", "adapter_off", "precomputed"] = "auto"
    """Source of the reference model's log-probabilities. `adapter_off`: the model without its adapter, in every step.
    `precomputed`: one pass over all examples before training. `auto`: `adapter_off` if the adapter starts as the base
    model."""


class PairMethod(Method):
    """A method on pairs of answers."""

    learns: ClassVar[str] = "pairs of a chosen and a rejected answer, both in one forward pass"
    records: ClassVar[tuple[RecordName, ...]] = ("preference",)
    segments: ClassVar[int] = 2
