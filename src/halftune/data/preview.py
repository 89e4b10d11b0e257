"""Shows samples with the trained tokens marked and every control token visible."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from halftune.data.sample import NO_LABEL, Sample

TRAINED, CONTROL = "green", "reverse"
OPEN, CLOSE = "⟦", "⟧"  # stand around trained tokens, so that a pipe without colour shows them too


def preview(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A sample as text: what is trained is green and stands between ⟦ and ⟧, control tokens are reversed."""
    text = Text()
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for ids, trained in _runs(sample):
        if trained:
            text.append(OPEN, style=f"bold {TRAINED}")
        for piece, control in _pieces(ids, special):
            style = (
                f"{CONTROL} {TRAINED}" if control and trained else CONTROL if control else TRAINED if trained else ""
            )
            text.append(str(tokenizer.decode(piece, skip_special_tokens=False)), style=style)
        if trained:
            text.append(CLOSE, style=f"bold {TRAINED}")
    return text


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


def _pieces(ids: list[int], special: set[int]) -> Iterator[tuple[list[int], bool]]:
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
