"""``probes.json``: prompts with the trained model's answers and log-probabilities; others are compared with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from halftune import __version__
from halftune.core.errors import ModelError
from halftune.core.files import read_limited

PROBES = "probes.json"
FORMAT = 1
MOST = 16 << 20  # bytes of a file that is read
TOP = 5  # likeliest tokens per position: what servers give at least
_DIGITS = 5


class Probe(BaseModel):
    """A prompt and the trained model's greedy answer of T tokens.

    Attributes:
        messages: the conversation before the answer; None where no chat template renders the prompt.
        tools: JSON schemas of the conversation's tools, or None.
        text: the rendered prompt.
        prompt: its token ids.
        answer: ``[T]`` token ids, with the token that ends it.
        ended: whether a stop token ends the answer, not the limit of its length.
        logprobs: ``[T]``, log-probabilities of the answer by the trained model, in nats.
        top: ``[T]`` of the likeliest tokens' (id, log-probability), likeliest first.
        base: ``[T]``, log-probabilities by the base model; None where it was not in memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str
    prompt: list[int] = Field(min_length=1)
    answer: list[int] = Field(min_length=1)
    ended: bool
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    base: list[float] | None = None

    @model_validator(mode="after")
    def _aligned(self) -> Probe:
        lists = [self.logprobs, self.top, *([] if self.base is None else [self.base])]
        if any(len(one) != len(self.answer) for one in lists):
            raise ValueError("an answer needs one log-probability for each token")
        return self


class Probes(BaseModel):
    """The probes of a result.

    Attributes:
        format: of this file.
        halftune: the version that wrote it.
        rows: the section of the recipe whose rows they were drawn from.
        model: name of the base model.
        adapter: whether the result is an adapter.
        compute: the format that the model computed in.
        weights: how its frozen weights were quantised in memory (``nf4`` …); empty if they were not.
        bos: id of the token that begins a text, or None.
        stops: ids of the tokens that end an answer.
        vocabulary: number of logits.
        day: ISO date in the prompts, where the chat template prints the date.
        variables: further variables of the chat template.
        probes: the probes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    halftune: str = __version__
    rows: str
    model: str
    adapter: bool
    compute: str
    weights: str = ""
    bos: int | None
    stops: list[int]
    vocabulary: int
    day: str | None = None
    variables: dict[str, Any] = Field(default_factory=dict)
    probes: list[Probe] = Field(min_length=1)

    def as_json(self) -> str:
        """The file's content."""
        return json.dumps(_rounded(self.model_dump()), ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def read_probes(folder: Path) -> Probes | None:
    """The probes in a folder; None if there are none.

    Raises:
        ModelError: the file cannot be read.
    """
    path = folder / PROBES
    try:
        found = Probes.model_validate_json(read_limited(path, MOST))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, RecursionError) as error:
        what = f"cannot be read: {str(error).splitlines()[0]}"
        raise ModelError(what, where=str(path), remedy="copy the result again", code="verify.bad_probes") from error
    if found.format != FORMAT:
        what = f"has format {found.format}; this version reads {FORMAT}"
        raise ModelError(what, where=str(path), remedy="install the halftune that wrote it", code="verify.bad_probes")
    return found
