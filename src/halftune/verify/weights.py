"""Compares the weights of two folders: which tensor differs, and how."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from halftune.core.processes import heartbeat
from halftune.verify.exact import Exact
from halftune.verify.settings import of_configs
from halftune.verify.targets import Finding

_SCALE = 0.1  # how far from 0 and from 1 the size of an update may be
_ROUNDED_TWICE = 0.005  # share of a tensor's elements that are off by more than one rounding
_ROUNDINGS = 5.0  # last places that several roundings move, of the value and of a usual update
_ONE_WAY = 0.5  # last places by which a tensor's elements grow or shrink on average: rounding goes both ways
_TINY = 2.0**-24  # the smallest number of fp16: what a format between may have lost
_ONE = 0.5 + 1e-3  # roundings of a value, in units of its last place; a tie may go either way
_OTHER = 0.5  # cosine of two updates below which they are of different runs
_MOST = 0.8  # share of the trained weights that are another run's
_NAMED = 3


def compare_weights(exact: Exact, model: Any, absent: list[str]) -> list[Finding]:
    """Compare a model's weights with the result's, merged in fp32.

    Args:
        exact: the result.
        model: what is compared, not quantised.
        absent: weights that its files lack.
    """
    changed = of_configs(exact.model.config, model.config)
    findings = [Finding("weights.config", ", ".join(changed))] if changed else []
    kinds: dict[str, list[tuple[str, float]]] = defaultdict(list)
    ours, theirs = exact.model.state_dict(), dict(model.state_dict())
    for name, tensor in ours.items():
        heartbeat.beat()
        if name in theirs and name not in absent and tensor.is_floating_point():
            kind, size = kind_of(theirs[name].cpu(), tensor, exact.before.get(name))
            kinds[kind].append((name, size))
    names = ours.keys() ^ theirs.keys()
    findings += _of_heads(exact.model, model, kinds) + _of_names(absent, sorted(names))
    return findings + findings_of(kinds, len(exact.before), model)


def _of_heads(expected: Any, model: Any, kinds: dict[str, list[tuple[str, float]]]) -> list[Finding]:
    """A head that is tied to the embeddings in one of the two only, and is not the same there."""
    ties = [bool(getattr(one.config.get_text_config(), "tie_word_embeddings", False)) for one in (expected, model)]
    head = model.get_output_embeddings()
    own = {name for name, one in model.named_parameters(remove_duplicate=False) if head and one is head.weight}
    if ties[0] == ties[1] or own & {name for name, _ in kinds["same"]}:
        return []
    words = ("a tied head", "a head of its own")
    return [Finding("weights.head", f"{words[ties[0]]} instead of {words[not ties[0]]}")]


def _of_names(absent: list[str], other: list[str]) -> list[Finding]:
    found = []
    if absent:
        what = f"{len(absent)} weights are not in its files and are random there: {first(absent)}"
        found.append(Finding("weights.absent", what))
    if other:
        found.append(Finding("weights.differ", f"only one of both has {len(other)} weights: {first(other)}"))
    return found


def kind_of(theirs: torch.Tensor, ours: torch.Tensor, base: torch.Tensor | None) -> tuple[str, float]:
    """How a tensor differs from the one in fp32, and the size of the update in it where it has another."""
    if theirs.shape != ours.shape:
        return "shape", 0.0
    if theirs.equal(ours.to(theirs.dtype)):
        return "same", 1.0
    theirs_32 = theirs.float()
    apart = (theirs_32 - ours).abs()
    places = _last_place(ours, theirs.dtype)
    allowed = _allowed(ours, base, theirs.dtype)
    near = bool((apart <= allowed).all())  # false for NaN
    if near and float((apart > _ONE * places).float().mean()) <= _ROUNDED_TWICE:
        return "same", 1.0
    if _turned(theirs_32, ours, allowed):
        return "transposed", 0.0
    if base is not None:
        kind, size = of_update(theirs_32 - base, ours - base, 2 * float(places.double().norm()))
        if kind != "same":
            return kind, size
    steps = (theirs_32 - ours) / allowed * _ROUNDINGS
    one_way = max(abs(float((steps * sign).mean())) for sign in (1, ours.sign()))
    return ("rounded", 1.0) if near and one_way <= _ONE_WAY else ("other", 0.0)


def of_update(moved: torch.Tensor, wanted: torch.Tensor, noise: float) -> tuple[str, float]:
    """What an update is beside that of training, and its size: ``base``, ``scaled``, ``another``; else ``same``."""
    moved, wanted = moved.flatten().double(), wanted.flatten().double()
    length = float(wanted.norm())
    size = float(moved @ wanted) / max(length**2, 1e-300)
    if float((moved - size * wanted).norm()) <= noise + 0.1 * length * max(abs(size), 1):
        if abs(size) <= _SCALE:
            return "base", size
        return ("scaled" if abs(size - 1) > _SCALE else "same"), size
    own = float(moved.norm())
    return ("another" if own > noise + 0.1 * length and abs(size) * length < _OTHER * own else "same"), size


def _allowed(ours: torch.Tensor, base: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """How far several roundings move each value: of the base's weight, of the update, and of their sum."""
    largest, update = ours.abs(), 0.0
    if base is not None:
        largest, update = largest.maximum(base.abs()), float((ours - base).square().mean().sqrt())
    return (_ROUNDINGS * (_last_place(largest, dtype) + torch.finfo(dtype).eps * update)).clamp(min=_TINY)


def _turned(theirs: torch.Tensor, ours: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Whether a square matrix is transposed, or both halves of one: gate and up of experts."""
    if ours.ndim < 2 or ours.shape[-2] not in (ours.shape[-1], 2 * ours.shape[-1]):
        return False
    halves = [one.split(ours.shape[-1], -2) for one in (theirs, ours, allowed)]
    return all(bool(((one.transpose(-1, -2) - own).abs() <= far).all()) for one, own, far in zip(*halves, strict=True))


def _last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring numbers of a format around each value; of its smallest normal one below that."""
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().clamp(min=limits.smallest_normal))
    return torch.ldexp(torch.full_like(values, limits.eps), exponent - 1)


def findings_of(kinds: dict[str, list[tuple[str, float]]], adapted: int, model: Any = None) -> list[Finding]:
    """One finding for each way in which tensors differ; ``model`` tells which of them are embeddings."""
    found = []
    names = {kind: [name for name, _ in some] for kind, some in kinds.items()}
    if shapes := names.get("shape"):
        found.append(Finding("weights.shape", f"{len(shapes)} weights have another shape: {first(shapes)}"))
    if turned := names.get("transposed"):
        found.append(Finding("weights.transposed", f"{len(turned)} weights are transposed: {first(turned)}"))
    if of_base := names.get("base"):
        code = "weights.base" if len(of_base) == adapted else "weights.between"
        what = f"{len(of_base)} of {adapted} weights that were trained are the base model's: {first(of_base)}"
        found.append(Finding(code, what))
    if scaled := kinds.get("scaled"):
        found.append(scaled_update([one for _, one in scaled], adapted))
    another = names.get("another", [])
    if len(another) > _MOST * adapted:
        found.append(Finding("weights.other_adapter", f"{len(another)} of {adapted} weights have another run's update"))
        another = []
    if others := [*names.get("other", ()), *another]:
        ends = (model.get_input_embeddings(), model.get_output_embeddings()) if model else ()
        embedded = {id(one.weight) for one in ends if one}
        named = model.named_parameters(remove_duplicate=False) if model else ()
        places = {name for name, one in named if id(one) in embedded}
        code = "weights.embeddings" if set(others) <= places else "weights.differ"
        found.append(Finding(code, f"{len(others)} weights differ: {first(others)}"))
    if rounded := names.get("rounded"):
        what = f"{len(rounded)} weights are off by more than one rounding: {first(rounded)}"
        found.append(Finding("weights.beyond_format", what))
    return found


def scaled_update(sizes: list[float], of: int) -> Finding:
    """The finding for updates of another size."""
    size = sum(sizes) / len(sizes)
    known = {2: ": merged twice, or lora_alpha is doubled", 0.5: ": half of lora_alpha"}
    words = next((text for one, text in known.items() if abs(size / one - 1) < _SCALE), "")
    what = f"the update has {size:.2f} times its size in {len(sizes)} of {of} weights{words}"
    return Finding("weights.beyond" if size > 1 else "weights.between", what)


def first(names: list[str]) -> str:
    """The first names of a list."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
