"""What is compared with a result: a folder, a server, a GGUF file; one file each.

In: a path or an address.
Out: its tokens, stops and log-probabilities.
Imported by: `cli`, `verify.processors`, `verify.reference`, `verify.report`, `verify.weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halftune.verify.probes import Probe, Probes


@dataclass(frozen=True)
class Seen:
    """What a target says of the answers of P probes.

    Attributes:
        logprobs: ``[P]`` of the answers' log-probabilities ``[T]``; shorter where a server's own answer parts from the
            probe's, and empty where nothing is known.
        likeliest: ``[P]`` of the likeliest tokens ``[T]``; empty where they are not known.
        of_top: ``[P]`` of ``[T, K]`` log-probabilities of the probe's ``top`` tokens; empty where they are not known.
        texts: ``[P]`` of its own greedy answers, where it gives no log-probabilities.
    """

    logprobs: list[list[float]]
    likeliest: list[list[int]] = field(default_factory=list)
    of_top: list[list[list[float]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """What differs.

    Attributes:
        code: ``tokens.differ``, ``weights.base`` …
        what: in words, with numbers.
        cause, remedy, source: what is known of it; empty where nothing is.
    """

    code: str
    what: str
    cause: str = ""
    remedy: str = ""
    source: str = ""


class Target(Protocol):
    """A model that is served or stored somewhere.

    Attributes:
        name: for people.
        kind: ``folder``, ``adapter``, ``server`` or ``gguf``.
        format: the format of its weights, a key of ``formats`` in ``causes.yaml``; empty where it is not known.
    """

    name: str
    kind: str
    format: str

    def tokens(self, probe: Probe, probes: Probes, tokenizer: Any) -> list[int] | int | None:
        """The tokens that it makes of a probe's conversation or text, or how many; None where it does not say."""
        ...

    def stops(self, probes: Probes, tokenizer: Any) -> set[int] | None:
        """The tokens of ``probes.stops`` at which it ends an answer; None where nothing is known."""
        ...

    def see(self, probes: Sequence[Probe], tokenizer: Any) -> Seen:
        """Score the probes' answers."""
        ...
