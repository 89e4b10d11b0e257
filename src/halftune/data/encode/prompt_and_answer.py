"""Renders and joins a prompt and its answer, which no chat template renders."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from halftune.data.encode.offset_tokenizer import Encoded
from halftune.data.formats.conversation import Prompted, RowDropped
from halftune.data.templates.assistant_turns import Turn
from halftune.data.templates.control_tokens import ControlTokens
from halftune.data.templates.loss_mask import NEUTRALISED, Rendering

_FIELD = re.compile(r"\{(instruction|input)\}")


def render_prompted(made: Prompted, control: ControlTokens) -> Rendering:
    """The text of prompt and answer; its turn ends one character later, where :func:`joined` puts EOS.

    Raises:
        RowDropped: the row has private-use characters that halftune reserves.
    """
    said = "\0".join((*made.fields.values(), made.answer))
    if control.has_private_characters(said):
        raise RowDropped("row with private-use characters (U+F5000 and above), which halftune reserves")
    prompt = control.alias(_FIELD.sub(lambda match: control.mark(made.fields[match[1]]), made.template))
    text = prompt + made.answer
    turn = Turn(1, len(prompt), len(text) + 1, len(text) + 1, complete=True, trained=True)
    notes = (NEUTRALISED,) if control.occurs(said) else ()
    return Rendering(text, (turn,), [], None, notes, split=len(prompt))


def joined(rendering: Rendering, pieces: Sequence[Encoded], first: list[int], last: list[int]) -> Encoded:
    """The tokens of a prompt and its answer as one text.

    Args:
        rendering: of prompt and answer.
        pieces: the tokens of both, with offsets of their own.
        first, last: ids before and after: BOS if the tokenizer adds it, and EOS.
    """
    end = len(rendering.text)
    shifted = list(zip(pieces, (0, rendering.split), strict=True))
    return Encoded(
        np.concatenate([np.array(first, np.int32), *(one.ids for one in pieces), np.array(last, np.int32)]),
        [
            *[(0, 0)] * len(first),
            *((start + by, stop + by) for one, by in shifted for start, stop in one.offsets),
            (end, end + 1),
        ],
        "".join(one.lost for one in pieces),
    )
