"""Whether a small copy computes what transformers' own eager code computes, padded and packed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halftune.attention.backends import BACKENDS
from halftune.attention.route import objections
from halftune.certify.certificate import Line, listed
from halftune.certify.passes import (
    generated,
    healed_in_bf16,
    in_train_mode,
    left_padded,
    not_the_same_twice,
    untied,
    without_noise,
)
from halftune.certify.workbench import Workbench, reported
from halftune.config.facts.model import read_model_facts
from halftune.core.choice import Choice
from halftune.data.batch import Batch
from halftune.data.store import NO_LABEL
from halftune.hardware.catalogue import lookup
from halftune.model.adapters.all_linear import linear_layers
from halftune.model.attention.flash_check import LOST, flash_in_torch, padded_error
from halftune.model.attention.packing_check import CANNOT_RUN, LENGTHS, TOLERANCE, packed_row, packing_error, silent
from halftune.model.files.architectures import own_architectures
from halftune.model.load.load import load_model, recompute_activations
from halftune.model.policy.policy import PolicyModel
from halftune.train.setup import check_packing

# fp32 at random weights: of the types that were walked 4e-4 for Gemma 3n, and at most 3e-5 for all others.
GRADIENTS = 1e-3
_SMALL = 1e-3  # gradients below this share of the largest one are measured against it
_LAYER = re.compile(r"(.*?\.\d+)\.")
_LEFT_OUT = re.compile(r"expert|tower|vis(ion|ual)|audio|embed_(images|speech)|projector|\bmtp\b|nextn|indexer")
Gradients = tuple[float, dict[str, torch.Tensor]]  # a loss, and the gradient of each parameter by name
FIRST, LAST = 100, 1000  # token ids: none is a special token


def same_numbers(bench: Workbench) -> Iterator[Line]:
    """Compare losses and gradients with each sample alone in the class's own eager code, in fp32."""
    loaded = bench.recipe("numbers", adapter="none")
    plan = bench.plan(loaded)
    samples = _samples()
    with silent():
        padded = load_model(loaded.run.model, replace(plan, batch=replace(plan.batch, packing=Choice(False, ""))))
        plain = partial(_plain, type(padded), bench)
        model = plain(torch.float32)
        if line := untied(model):
            yield line
        if line := not_the_same_twice(model, samples):
            yield line
            return
        own = _own_gradients(model, samples)
        yield _compared("padded rows", *_gradients(padded.eval(), _padded(samples)), own, "in one padded batch")
        yield from _unreached(padded)
        lines: list[Line] = []
        for check, run in (
            ("gradient checkpointing", _recomputed),
            ("left padding", left_padded),
            ("train mode", in_train_mode),
            ("generation", generated),
            ("dtypes bf16", lambda _, rows: healed_in_bf16(bench, plain, rows)),
        ):
            with reported(check, lines):
                lines += filter(None, [run(padded.eval(), samples)])
        packed = None
        with reported("packing", lines):
            packed, line = _packing(bench, own, samples)
            lines.append(line)
        with reported("flash attention", lines):
            lines.append(_flash(bench, padded, packed))
        yield from lines


def _unreached(model: Any) -> Iterator[Line]:
    """Name weights that no gradient reaches, after a backward pass; a layer, or one that LoRA adapts, is a fault.

    Experts that no token chose, towers, heads that predict later tokens and what selects keys have none in a sound run.
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
    linear, routers, refused = linear_layers(model)
    adapted = {f"{name}.weight" for name in set(linear) - routers - refused}
    cut = [layer for layer, reached in of_layer.items() if not any(reached)]
    if cut := cut or [name for name in names if name in adapted]:
        yield Line("gradients", "no", f"no gradient reaches {listed(cut)}: an adapter there trains nothing")
    elif names:
        yield Line("gradients", "note", f"no gradient reaches {listed(names)}")


def _recomputed(model: Any, samples: list[torch.Tensor]) -> Line:
    """Compare loss and gradients of train mode with and without gradient checkpointing, with the same random numbers.

    Without dropout: some classes draw experts in train mode.
    """
    if not model.supports_gradient_checkpointing:
        return Line("gradient checkpointing", "note", "the class does not support it")
    with without_noise(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kept = _gradients(model.train(), _padded(samples))
        recompute_activations(model)
        torch.manual_seed(0)
        found = _gradients(model, _padded(samples))
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    return _compared("gradient checkpointing", *found, kept, "activations computed again", "the same kept")


@torch.no_grad()
def _flash(bench: Workbench, padded: Any, packed: Any | None) -> Line:
    """Compare FlashAttention, by a kernel in torch, with eager attention; the model's attention is another after it."""
    facts, machine = read_model_facts(bench.whole), lookup("h100")
    against = [
        [one.text for one in objections(row, machine, facts, "bf16", packing=False) if one.kind == "model"]
        for row in BACKENDS
        if row.kernel
    ]
    if facts.family.attention == "none" or all(against):
        return Line("flash attention", "refused", *(against[0][:1] or ["no layer has softmax attention"]))
    with flash_in_torch() as attention:
        errors = {"padded": padded_error(padded.eval(), attention)}
        if packed is not None:
            errors["packed"] = packing_error(packed.eval(), attention)
    shown = ", ".join(f"{error:.0e} {rows}" for rows, error in errors.items())
    what = f"FlashAttention by a kernel in torch against eager attention: relative error of the logits {shown}"
    if max(errors.values()) <= LOST:
        return Line("flash attention", "yes", what)
    why = "a window is lost, or what else only the masks of the class have"
    return Line("flash attention", "no", f"{what}: {why}", "attention: sdpa")


def _packing(bench: Workbench, own: Gradients, samples: list[torch.Tensor]) -> tuple[Any | None, Line]:
    """Compare a packed row; rows of a model that cannot be packed are padded, and the plan says so.

    Returns:
        The model of packed rows, if they are possible, and what was found.
    """
    loaded = bench.recipe("packed", adapter="none", data={"packing": True})
    plan = bench.plan(loaded)
    verdict = check_packing(bench.section, plan)
    if not verdict.value:
        refused = CANNOT_RUN in verdict.reason
        remedy = "rows are padded: data.packing: false"
        return None, Line("packing", "refused" if refused else "no", verdict.reason, remedy)
    packed = load_model(loaded.run.model, plan)
    return packed, _compared("packing", *_gradients(packed.eval(), _packed(samples)), own, "packed into one row")


_ALONE = "each alone in transformers' eager code"


def _compared(
    check: str,
    loss: float,
    gradients: dict[str, torch.Tensor],
    reference: Gradients,
    how: str,
    against: str = _ALONE,
) -> Line:
    """Compare a loss and gradients with a reference."""
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
        return Line(check, "no", f"no gradient reaches {listed(missing)}, which has one in {against}")
    error = errors.get(worst, 0.0)
    what = (
        f"{len(LENGTHS)} samples {how} against {against}: relative error of the loss "
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
    model.zero_grad()
    loss = PolicyModel(model).nll_sum(batch)
    loss.backward()
    return float(loss.detach()), _taken(model)


def _plain(kind: Any, bench: Workbench, dtype: torch.dtype) -> Any:
    """The small copy by the class's own code, without halftune."""
    with own_architectures():
        return kind.from_pretrained(bench.section.name_or_path, dtype=dtype, attn_implementation="eager")


def _own_gradients(model: Any, samples: list[torch.Tensor]) -> Gradients:
    """The summed loss and gradients of the class's own code, each sample alone."""
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
