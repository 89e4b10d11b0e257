"""What rounding does to a result's log-probabilities: measured, by computing them in fp32 and in other formats."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from halftune.verify.distances import Rows, mean
from halftune.verify.exact import Exact, memory_needed
from halftune.verify.measure import Scores, score
from halftune.verify.probes import Probe, Probes
from halftune.verify.targets.folder import load_plain

FACTOR = 2.0  # times the measured rounding is still called rounding
_ONE_COPY = 3  # bytes in memory for a byte of weights
_LEAST = 1e-5  # nats: the digits of a file of probes
_ASSUMED_TIE = 0.5  # nats between two tokens; bf16 was seen to swap tokens 0.25 nats apart
_NEARER = 0.5  # of a server's distance to fp32: so near to a computation in 16 bits, it is one
_WEIGHTS = "bf16 weights"  # with sums in fp32
_UNNAMED = (_WEIGHTS, "bf16", "fp16")  # what a server that names no format may compute in
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCKS = {"q8_0": 32, "nf4": 64, "q4": 32}  # weights that share a scale; other formats have one for a row
_LEVELS = {"nf4": 7, "q4": 7}  # on each side of zero; others 127


@dataclass(frozen=True)
class Rounding:
    """How far an honest copy may be.

    Attributes:
        probes: with the log-probabilities that targets are compared with: the result's in fp32 where they are measured.
        usual: nats a token; of a server that names no format: of weights in bf16, with sums in fp32.
        tie: lead of a token in nats up to which rounding may choose another one.
        words: how ``usual`` was found.
        halves: log-probabilities ``[P][T]`` of computations in 16 bits, each with its bound, for a server that names
            no format.
        kept: distance of the result's files to what training kept, where that is more than rounding.
        measured: whether ``usual`` is measured.
    """

    probes: Probes
    usual: float
    tie: float
    words: str
    halves: Sequence[tuple[Rows, float]] = ()
    kept: float | None = None
    measured: bool = True

    @property
    def widest(self) -> float:
        """Nats a token by the coarsest format that a target may have."""
        return max([self.usual, *(most for _, most in self.halves)])

    def bound(self, seen: Rows) -> float:
        """Nats a token for these numbers: more where they are those of a computation in 16 bits."""
        apart = mean(_apart(seen, [one.logprobs for one in self.probes.probes]))
        near = [most for rows, most in self.halves if mean(_apart(seen, rows)) < _NEARER * apart]
        return max([self.usual, *near])


def measure_rounding(probes: Probes, exact: Exact | str, reference: Path, base: str, format: str) -> Rounding:
    """Compute the probes' answers in fp32, and in the format of a target.

    Args:
        probes: of the result.
        exact: the result in fp32, or why there is none.
        reference: folder of the result.
        base: the base model of an adapter whose own cannot be found.
        format: of the target, a key of ``formats`` in ``causes.yaml``; empty: not known.
    """
    pairs = [(one.prompt, one.answer) for one in probes.probes]
    if isinstance(exact, str):
        return _without_fp32(probes, reference, base, format, pairs, exact)
    device = torch.device("cpu")
    whole = score(exact.model, pairs, 0, device)
    stored = _apart(_logprobs(probes.probes), _logprobs(whole))
    changes: list[dict[str, Any]] = [{"logprobs": one.logprobs, "top": one.top} for one in whole]
    if exact.before:
        with exact.at(0) as model:
            for change, own in zip(changes, score(model, pairs, 0, device), strict=True):
                change["base"] = own.logprobs
    made: list[Probe] = [one.model_copy(update=new) for one, new in zip(probes.probes, changes, strict=True)]
    usual = format or _WEIGHTS
    computed = {one: _logprobs(_computed(exact, pairs, one)) for one in ({usual, "bf16"} if format else _UNNAMED)}
    apart = {one: _apart(rows, _logprobs(whole)) for one, rows in computed.items()}
    bounds = {one: FACTOR * max(mean(own), _LEAST) for one, own in apart.items()}
    expected = bounds[usual]
    if probes.weights:  # training computed with other weights, which its files do not have
        expected, made = expected + FACTOR * mean(stored), probes.probes
    return Rounding(
        probes.model_copy(update={"probes": made}),
        expected,
        FACTOR * max(*stored, *(one for own in apart.values() for one in own)),
        f"{FACTOR:g} × the rounding of {usual}, measured on this result",
        [] if format else [(computed[one], bounds[one]) for one in _DTYPES],
        mean(stored) if mean(stored) > max(bounds.values()) and not probes.weights else None,
    )


def _without_fp32(probes: Probes, reference: Path, base: str, format: str, pairs: Sequence[Any], why: str) -> Rounding:
    """From another order of sums in the plan's own format, where that is the target's; else the table's number."""
    formats, unknown = known_causes()["formats"], known_causes()["unknown"]
    assumed = max(formats.get(one, unknown) for one in (format, probes.compute))
    small = memory_needed(reference, base, _ONE_COPY) < psutil.virtual_memory().available
    if format not in ("", probes.compute) or probes.weights or not small:
        return Rounding(probes, assumed, _ASSUMED_TIE, f"assumed, not measured: {why}", measured=False)
    model, _ = load_plain(reference, base, _DTYPES.get(probes.compute, torch.float32))
    again = score(model, pairs, 0, next(model.parameters()).device)
    apart = _apart(_logprobs(probes.probes), _logprobs(again))
    words = f"{FACTOR:g} × what another order of sums does; for fp32, {why}"
    return Rounding(probes, FACTOR * max(mean(apart), _LEAST), FACTOR * max(apart), words)


def _computed(exact: Exact, pairs: Sequence[tuple[list[int], list[int]]], format: str) -> list[Scores]:
    """Scores by the result's weights in a format, computed in it where it is one of 16 bits."""
    model = deepcopy(exact.model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = _rounded(parameter.data, format)
        if isinstance(module, torch.nn.Linear) and format in ("q8_0", "int8", "fp8"):  # so are its inputs
            module.register_forward_pre_hook(lambda _, given: (_rounded(given[0], format),))
    return score(model, pairs, 0, torch.device("cpu"))


def _rounded(values: torch.Tensor, format: str) -> torch.Tensor:
    """Values as a format holds them; norms and biases stay as they are in formats of 8 bits and less."""
    if format in _DTYPES or not format:
        return values.to(_DTYPES[format])
    if format == _WEIGHTS:
        return values.bfloat16().float()
    if format == "fp32" or values.ndim < 2:
        return values
    width = _BLOCKS.get(format, values.shape[-1])
    rows = values.reshape(-1, width if values.shape[-1] % width == 0 else values.shape[-1])
    largest = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    if format == "fp8":
        made = (rows / largest * 448).to(torch.float8_e4m3fn).float() * largest / 448
    else:
        levels = _LEVELS.get(format, 127)
        made = (rows / largest * levels).round() * largest / levels
    return made.reshape(values.shape)


def _apart(rows: Rows, others: Rows) -> list[float]:
    """Distances of log-probabilities, as far as both have them."""
    pairs = (pair for both in zip(rows, others, strict=False) for pair in zip(*both, strict=False))
    return [abs(one - other) for one, other in pairs]


def _logprobs(scores: Sequence[Scores | Probe]) -> Rows:
    return [one.logprobs for one in scores]


@cache
def known_causes() -> dict[str, Any]:
    """The content of ``causes.yaml``."""
    return yaml.safe_load((Path(__file__).parent / "causes.yaml").read_text(encoding="utf-8"))
