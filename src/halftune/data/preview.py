"""Shows samples with the trained tokens marked and every control token visible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from halftune.data.sample import NO_LABEL, Sample

TRAINED, CONTROL = "green", "reverse"
OPEN, CLOSE = "⟦", "⟧"  # stand around trained tokens, so that a pipe without colour shows them too


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind, as text.

    Attributes:
        text: what they decode to.
        trained: whether they carry a label.
        control: whether it is one control token.
    """

    text: str
    trained: bool
    control: bool


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """A sample as pieces of text."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for ids, trained in _runs(sample):
        for part, control in _parts(ids, special):
            yield Piece(str(tokenizer.decode(part, skip_special_tokens=False)), trained, control)


def preview(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A sample as text: what is trained is green and stands between ⟦ and ⟧, control tokens are reversed."""
    text, before = Text(), False
    for piece in pieces(sample, tokenizer):
        if piece.trained != before:
            text.append(OPEN if piece.trained else CLOSE, style=f"bold {TRAINED}")
        before = piece.trained
        styles = [CONTROL] * piece.control + [TRAINED] * piece.trained
        text.append(piece.text, style=" ".join(styles))
    if before:
        text.append(CLOSE, style=f"bold {TRAINED}")
    return text


def as_data(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A sample as JSON-able data: number of tokens, of trained ones, and its pieces."""
    trained = int((sample.labels != NO_LABEL).sum())
    shown = [asdict(piece) for piece in pieces(sample, tokenizer)]
    return {"tokens": len(sample.input_ids), "trained": trained, "pieces": shown}


def _runs(sample: Sample) -> Iterator[tuple[list[int], bool]]:
    """Neighbouring tokens that are all trained or all not."""
    run: list[int] = []
    before: bool | None = None
    for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        trained = label != NO_LABEL
        if run and trained != before:
            yield run, bool(before)
            run = []
        run.append(token)
        before = trained
    if run:
        yield run, bool(before)


def _parts(ids: list[int], special: set[int]) -> Iterator[tuple[list[int], bool]]:
    """Control tokens one by one, what stands between them together (a character may take several tokens)."""
    plain: list[int] = []
    for token in ids:
        if token in special:
            if plain:
                yield plain, False
            yield [token], True
            plain = []
        else:
            plain.append(token)
    if plain:
        yield plain, False
