"""Whether a small copy computes what transformers' own eager code computes, padded and packed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halftune.certify.certificate import Line, listed
from halftune.certify.workbench import Workbench, reported
from halftune.core.choice import Choice
from halftune.data.batch import Batch
from halftune.data.store import NO_LABEL
from halftune.model.attention.packing_check import CANNOT_RUN, LENGTHS, TOLERANCE, packed_row, silent
from halftune.model.files.architectures import own_architectures
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.train.setup import check_packing

# fp32 at random weights: of the types that were walked 4e-4 for Gemma 3n, and at most 3e-5 for all others.
GRADIENTS = 1e-3
_SMALL = 1e-3  # gradients below this share of the largest one are measured against it
_LAYER = re.compile(r"(.*?\.\d+)\.")
_LEFT_OUT = re.compile(r"expert|tower|vis(ion|ual)|audio|embed_(images|speech)|projector|\bmtp\b|nextn")
_NOISE = re.compile(r"drop|jitter")
Gradients = tuple[float, dict[str, torch.Tensor]]  # a loss, and the gradient of each parameter by name
FIRST, LAST = 100, 1000  # token ids: none is a special token


def same_numbers(bench: Workbench) -> Iterator[Line]:
    """Compare losses and gradients with each sample alone in the class's own eager code, in fp32."""
    loaded = bench.recipe("numbers", adapter="none")
    plan = bench.plan(loaded)
    samples = _samples()
    with silent():
        own = _own_gradients(load_model(loaded.run.model, plan), bench, samples)
        padded = load_model(loaded.run.model, replace(plan, batch=replace(plan.batch, packing=Choice(False, ""))))
        yield _compared("padded rows", *_gradients(padded, _padded(samples)), own, "in one padded batch")
        lines = [one] if (one := _unreached(padded)) else []
        for check, run in (("left padding", _left_padded), ("train mode", _in_train_mode), ("generation", _cached)):
            with reported(check, lines):
                lines.append(run(padded.eval(), samples))
        with reported("packing", lines):
            lines.append(_packing(bench, own, samples))
        yield from lines


def _unreached(model: Any) -> Line | None:
    """Name weights that no gradient reaches, after a backward pass; a layer without any is a fault.

    Experts that no token chose, towers and heads that predict later tokens have none in a sound run.
    """
    of_layer: dict[str, list[bool]] = {}
    names = list[str]()
    for name, one in model.named_parameters():
        if _LEFT_OUT.search(name) or not one.requires_grad:
            continue
        reached = one.grad is not None and bool(one.grad.any())
        if layer := _LAYER.match(name):
            of_layer.setdefault(layer[1], []).append(reached)
        if not reached:
            names.append(name)
    if cut := [layer for layer, reached in of_layer.items() if not any(reached)]:
        return Line("gradients", "no", f"no gradient reaches {listed(cut)}")
    return Line("gradients", "note", f"no gradient reaches {listed(names)}") if names else None


@torch.no_grad()
def _left_padded(model: Any, samples: list[torch.Tensor]) -> Line:
    """Compare the last logits of a row padded on the left, as in generation, with those of the row alone."""
    short, long = sorted(samples, key=lambda one: one.shape[1])[::2]
    more = long.shape[1] - short.shape[1]
    mask = torch.ones_like(long).repeat(2, 1)
    mask[0, :more] = 0
    inputs = {"input_ids": torch.cat([F.pad(short, (more, 0)), long]), "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(**inputs, use_cache=False).logits[:, -1]
    expected = torch.cat([model(input_ids=one, use_cache=False).logits[:, -1] for one in (short, long)])
    return _close("left padding", "a row padded on the left against the row alone", found, expected)


@torch.no_grad()
def _in_train_mode(model: Any, samples: list[torch.Tensor]) -> Line:
    """Compare the logits of train mode, without dropout and noise, with those of eval mode."""
    expected = model(input_ids=samples[0], use_cache=False).logits
    places = [*model.modules(), model.config, model.config.get_text_config()]
    kept = [(one, name, value) for one in places for name, value in vars(one).items() if _is_noise(name, value)]
    for one, name, _ in kept:
        setattr(one, name, 0.0)
    found = model.train()(input_ids=samples[0], use_cache=False).logits
    model.eval()
    for one, name, value in kept:
        setattr(one, name, value)
    return _close("train mode", "train mode without dropout against eval mode", found, expected)


def _is_noise(name: str, value: Any) -> bool:
    """Whether an attribute is the strength of dropout or noise; ``p`` is that of ``nn.Dropout``."""
    return isinstance(value, float) and (name == "p" or _NOISE.search(name) is not None)


def _close(check: str, what: str, found: torch.Tensor, expected: torch.Tensor) -> Line:
    error = float((found - expected).norm() / expected.norm())
    return Line(check, "yes" if error <= GRADIENTS else "no", f"{what}: relative error of the logits {error:.0e}")


@torch.no_grad()
def _cached(model: Any, samples: list[torch.Tensor]) -> Line:
    """Compare the logits of the last token, computed from a cache of those before, with those of one pass."""
    ids = samples[0]
    expected = model(input_ids=ids, use_cache=False).logits[:, -1]
    # the mask that generation passes: with it, Omni's positions start anew, not where another batch has left them
    first = model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), use_cache=True)
    cache = getattr(first, "past_key_values", None)
    if cache is None:
        return Line("generation", "note", "the class keeps no cache of keys and values")
    found = model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    return _close("generation", "a token from the cache against one pass", found, expected)


def _packing(bench: Workbench, own: Gradients, samples: list[torch.Tensor]) -> Line:
    """Compare a packed row; rows of a model that cannot be packed are padded, and the plan says so."""
    loaded = bench.recipe("packed", adapter="none", data={"packing": True})
    plan = bench.plan(loaded)
    verdict = check_packing(bench.section, plan)
    if not verdict.value:
        refused = CANNOT_RUN in verdict.reason
        return Line("packing", "refused" if refused else "no", verdict.reason, "rows are padded: data.packing: false")
    packed = load_model(loaded.run.model, plan)
    return _compared("packing", *_gradients(packed, _packed(samples)), own, "packed into one row")


def _compared(check: str, loss: float, gradients: dict[str, torch.Tensor], reference: Gradients, how: str) -> Line:
    """Compare a loss and gradients with those of the samples alone."""
    expected_loss, expected = reference
    apart = abs(loss - expected_loss) / max(abs(expected_loss), 1e-9)
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    floor = _SMALL * max(norms.values(), default=0.0)
    errors = {
        name: float((gradients[name] - gradient).norm()) / max(norms[name], floor, 1e-30)
        for name, gradient in expected.items()
        if name in gradients
    }
    worst = max(errors, key=lambda name: errors[name], default="")
    missing = sorted(name for name in norms if name not in gradients and norms[name] > floor)
    if missing:
        return Line(check, "no", f"no gradient reaches {listed(missing)}, which has one in transformers' eager code")
    error = errors.get(worst, 0.0)
    what = (
        f"{len(LENGTHS)} samples {how} against each alone in transformers' eager code: relative error of the loss "
        f"{apart:.0e}, of the worst of {len(errors)} gradients {error:.0e}"
    )
    wrong = not (apart <= TOLERANCE * 10 and error <= GRADIENTS)
    return Line(check, "no" if wrong else "yes", what + (f" ({worst})" if wrong else ""))


def _samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(FIRST, LAST, (1, length), generator=generator) for length in LENGTHS]


def _padded(samples: list[torch.Tensor]) -> Batch:
    longest = max(LENGTHS)
    ids = torch.cat([F.pad(one, (0, longest - one.shape[1])) for one in samples])
    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in LENGTHS])
    labels = ids.masked_fill(mask == 0, NO_LABEL)
    return Batch({"input_ids": ids, "attention_mask": mask, "labels": labels})


def _packed(samples: list[torch.Tensor]) -> Batch:
    row = packed_row(torch.cat(samples, 1), LENGTHS)
    labels = torch.cat([F.pad(one[:, 1:], (1, 0), value=NO_LABEL) for one in samples], 1)
    tokens = {name: row.pop(name) for name in ("input_ids", "position_ids")}
    return Batch({**tokens, "labels": labels}, row)


def _gradients(model: nn.Module, batch: Batch) -> Gradients:
    _without_router_loss(model)
    model.eval()  # no dropout
    loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    return float(loss.detach()), _taken(model)


def _own_gradients(ours: Any, bench: Workbench, samples: list[torch.Tensor]) -> Gradients:
    """The summed loss and gradients of the class's own code, each sample alone."""
    with own_architectures():
        model: Any = type(ours).from_pretrained(
            bench.section.name_or_path, dtype=torch.float32, attn_implementation="eager"
        )
    _without_router_loss(model)
    model.eval()
    total = 0.0
    for ids in samples:
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
        loss.backward()
        total += float(loss.detach())
    return total, _taken(model)


def _taken(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name, of parameters that have one."""
    return {name: one.grad.detach() for name, one in model.named_parameters() if one.grad is not None}


def _without_router_loss(model: Any) -> None:
    text = model.config.get_text_config()
    for config in (model.config, text):
        if vars(config).get("output_router_logits"):
            config.output_router_logits = False
