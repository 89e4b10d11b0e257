"""A run's request: its config and its model, as the constraints of the run leave them."""

from __future__ import annotations

from dataclasses import dataclass

from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.core.choice import Choice


@dataclass(frozen=True)
class Request:
    """What is to be decided.

    Attributes:
        config: what was asked.
        facts: the model as it will be trained.
        added_tokens: embedding rows that are added; None without ``model.tokens.add``.
    """

    config: RunConfig
    facts: ModelFacts
    added_tokens: Choice[int] | None = None
