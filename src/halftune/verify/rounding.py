"""What rounding does to a result's log-probabilities: measured, by computing them in fp32 and in other formats."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml

from halftune.verify.exact import Exact, memory_needed
from halftune.verify.measure import Scores, score
from halftune.verify.probes import Probe, Probes
from halftune.verify.targets import Seen
from halftune.verify.targets.folder import load_plain

FACTOR = 2.0  # times the measured rounding is still called rounding
_ONE_COPY = 3  # bytes in memory for a byte of weights
_LEAST = 1e-5  # nats: the digits of a file of probes
_ASSUMED_TIE = 0.5  # nats between two tokens; bf16 was seen to swap tokens 0.25 nats apart
_ALIKE = 0.2  # correlation of a server's deviations with those of 16 bits computed here
_GRID, _ON_GRID = 2.0**-12, 0.5  # of logits in 16 bits; share of differences that lie on it
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCKS = {"q8_0": 32, "nf4": 64, "q4": 32}  # weights that share a scale; other formats have one for a row
_LEVELS = {"nf4": 7, "q4": 7}  # on each side of zero; others 127


@dataclass(frozen=True)
class Rounding:
    """How far an honest copy may be.

    Attributes:
        probes: with the log-probabilities that targets are compared with: the result's in fp32 where they are measured.
        usual: nats a token.
        tie: lead of a token in nats up to which rounding may choose another one.
        words: how ``usual`` was found.
        halves: deviations ``[P][T]`` of computations in 16 bits, each with its bound; for servers that do not say.
        kept: distance of the result's files to what training kept, where that is more than rounding.
        measured: whether ``usual`` is measured.
    """

    probes: Probes
    usual: float
    tie: float
    words: str
    halves: Sequence[tuple[list[list[float]], float]] = ()
    kept: float | None = None
    measured: bool = True

    def bound(self, seen: Seen) -> float:
        """Nats a token for these numbers: more if they show that they were computed in 16 bits."""
        rows = [own[: len(one.answer)] for own, one in zip(seen.logprobs, self.probes.probes, strict=False)]
        exact = [one.logprobs[: len(own)] for own, one in zip(rows, self.probes.probes, strict=False)]
        apart = _flat(rows) - _flat(exact)
        steps = np.array(seen.steps) / _GRID
        on_grid = len(steps) > 0 and float((np.abs(steps - steps.round()) < 0.05).mean()) > _ON_GRID
        found = [self.usual]
        for deviations, most in self.halves:
            cut = _flat([one[: len(own)] for one, own in zip(deviations, rows, strict=False)])
            if on_grid or (len(cut) > 1 and cut.any() and apart.any() and np.corrcoef(cut, apart)[0, 1] > _ALIKE):
                found.append(most)
        return max(found)


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
    stored = _apart([one.logprobs for one in probes.probes], whole)
    changes: list[dict[str, Any]] = [{"logprobs": one.logprobs, "top": one.top} for one in whole]
    if exact.before:
        with exact.at(0) as model:
            for change, own in zip(changes, score(model, pairs, 0, device), strict=True):
                change["base"] = own.logprobs
    made: list[Probe] = [one.model_copy(update=new) for one, new in zip(probes.probes, changes, strict=True)]
    kinds = {format, "bf16"} if format else {"bf16 weights", "bf16", "fp16"}
    own = {one: _apart(_computed(exact, pairs, one), whole) for one in kinds}
    sizes = {one: max(_mean(apart), _LEAST) for one, apart in own.items()}
    usual = FACTOR * sizes[format or "bf16 weights"]
    name = f"of {format}" if format else "of weights in bf16"
    tie = FACTOR * max(float(np.abs(_flat(one)).max()) for one in (stored, *own.values()))
    if probes.weights:  # training computed with other weights, which its files do not have
        usual, made = usual + FACTOR * _mean(stored), probes.probes
    allowed = FACTOR * max(sizes.values())
    return Rounding(
        probes.model_copy(update={"probes": made}),
        usual,
        tie,
        f"{FACTOR:g} × the rounding {name}, measured on this result",
        [] if format else [(own[one], FACTOR * sizes[one]) for one in _DTYPES],
        _mean(stored) if _mean(stored) > allowed and not probes.weights else None,
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
    apart = _apart([one.logprobs for one in probes.probes], again)
    usual, tie = FACTOR * max(_mean(apart), _LEAST), FACTOR * float(np.abs(_flat(apart)).max())
    return Rounding(probes, usual, tie, f"{FACTOR:g} × what another order of sums does; for fp32, {why}")


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
    if format == "bf16 weights":
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


def _apart(values: Sequence[Any], whole: Sequence[Scores]) -> list[list[float]]:
    rows = [one.logprobs if isinstance(one, Scores) else one for one in values]
    return [[a - b for a, b in zip(own, one.logprobs, strict=True)] for own, one in zip(rows, whole, strict=True)]


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row], dtype=np.float64)


def _mean(rows: Sequence[Sequence[float]]) -> float:
    return float(np.abs(_flat(rows)).mean())


@cache
def known_causes() -> dict[str, Any]:
    """The content of ``causes.yaml``."""
    return yaml.safe_load((Path(__file__).parent / "causes.yaml").read_text(encoding="utf-8"))
