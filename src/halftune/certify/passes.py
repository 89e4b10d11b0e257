"""The logits of a small copy: of two passes, padded on the left, in train mode, of each token generated, in bf16."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers.generation.logits_process import LogitsProcessor

from halftune.certify.certificate import Line
from halftune.certify.workbench import Workbench
from halftune.model.files.load_errors import first_line
from halftune.model.generate import generate_answers
from halftune.model.load.load import load_model
from halftune.model.tokenizer.vocabulary import is_tied
from halftune.precision.dtypes import autocast

LOGITS = 1e-3  # relative error in fp32
ROUNDINGS = 100  # the largest relative error, over what rounding the embeddings once more changes
_NEW = 8  # tokens that are generated
_NOISE = re.compile(r"drop|jitter")


@torch.no_grad()
def not_the_same_twice(model: Any, samples: list[torch.Tensor]) -> Line | None:
    """Whether two passes in eval mode differ; then no other comparison means anything."""
    first, second = (model.eval()(input_ids=samples[0], use_cache=False).logits for _ in range(2))
    if torch.equal(first, second):
        return None
    error = _relative(second, first)
    return Line("eval mode", "no", f"not the same twice: dropout or noise in eval mode, relative error {error:.0e}")


def untied(model: Any) -> Line | None:
    """Whether config.json says that the head is the embedding, and the class has a head of its own."""
    if not getattr(model.config, "tie_word_embeddings", False) or is_tied(model):
        return None
    if (head := model.get_output_embeddings()) is None:
        return None
    what = "tie_word_embeddings is true, and the class ties nothing: its head has"
    return Line("tied head", "no", f"{what} {head.weight.numel():,} weights of its own", "tie_word_embeddings: false")


@torch.no_grad()
def left_padded(model: Any, samples: list[torch.Tensor]) -> Line:
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
def in_train_mode(model: Any, samples: list[torch.Tensor]) -> Line:
    """Compare the logits of train mode, without dropout and noise, with those of eval mode."""
    expected = model(input_ids=samples[0], use_cache=False).logits
    with without_noise(model):
        found, again = (model.train()(input_ids=samples[0], use_cache=False).logits for _ in range(2))
    model.eval()
    if not torch.equal(found, again):
        return Line("train mode", "note", "not compared: the class draws random numbers in train mode")
    return _close("train mode", "train mode without dropout against eval mode", found, expected)


@contextmanager
def without_noise(model: Any) -> Iterator[None]:
    """Inside, dropout and noise of train mode have no strength."""
    places = [*model.modules(), model.config, model.config.get_text_config()]
    kept = [(one, name, value) for one in places for name, value in vars(one).items() if _is_noise(name, value)]
    try:
        for one, name, _ in kept:
            setattr(one, name, 0.0)
        yield
    finally:
        for one, name, value in kept:
            setattr(one, name, value)


def _is_noise(name: str, value: Any) -> bool:
    """Whether an attribute is the strength of dropout or noise; ``p`` is that of ``nn.Dropout``."""
    return isinstance(value, float) and (name == "p" or _NOISE.search(name) is not None)


@torch.no_grad()
def generated(model: Any, samples: list[torch.Tensor]) -> Line:
    """Compare the logits of each token that is generated, in rows padded on the left, with whole passes of each row.

    The tokens are given: those of a model with random weights may hang on a rounding error.
    """
    if not model.can_generate():
        return Line("generation", "note", "the class cannot generate")
    answers = torch.cat(samples, 1)[0, -len(samples) * _NEW :].unflatten(0, (-1, _NEW))
    whole = [torch.cat([one, answer[None]], 1) for one, answer in zip(samples, answers, strict=True)]
    forced, prompts = _Given(answers), [one[0].numpy() for one in samples]
    generate_answers(model, prompts, ends=(), most=_NEW, pad=0, processors=[forced])
    expected = torch.stack([_answered(model, one) for one in whole])
    with _rounded_embeddings(model):
        rounding = _relative(torch.stack([_answered(model, one) for one in whole]), expected)
    found = torch.stack(forced.seen, 1)
    errors = [_relative(found[:, at], expected[:, at]) for at in range(_NEW)]
    worst = max(range(_NEW), key=errors.__getitem__)
    bound = ROUNDINGS * rounding
    what = (
        f"{_NEW} tokens of a batch padded on the left, with a cache, against whole passes of each row: relative error "
        f"of the logits {errors[worst]:.0e}, rounding alone {rounding:.0e}"
    )
    if errors[worst] <= bound:
        return Line("generation", "yes", what)
    first = next(at for at, error in enumerate(errors, 1) if error > bound)
    what += f"; wrong from token {first} on: chat, evaluation, probes and rollouts generate so"
    return Line("generation", "no", what)


class _Given(LogitsProcessor):
    """Makes generation take given tokens ``[B, S]``, and keeps the logits that it had for each."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.seen = tokens, list[torch.Tensor]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(scores.float())
        return torch.zeros_like(scores).scatter_(1, self.tokens[:, len(self.seen) - 1, None], 1.0)


def _answered(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits ``[S, V]`` from which the last tokens of a row are taken, in one pass."""
    return model(input_ids=ids, use_cache=False).logits[0, -_NEW - 1 : -1].float()


@contextmanager
def _rounded_embeddings(model: Any) -> Iterator[None]:
    """Inside, each value that an embedding gives is changed by at most the rounding error of fp32."""
    eps = torch.finfo(torch.float32).eps

    def change(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (1 + eps * (2 * torch.rand_like(out) - 1))

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def healed_in_bf16(bench: Workbench, plain: Callable[[torch.dtype], Any], samples: list[torch.Tensor]) -> Line | None:
    """Whether transformers' own code fails in bf16 where halftune's copy runs.

    Args:
        bench: the small copy.
        plain: loads it without halftune in a dtype.
        samples: token ids.

    Raises:
        PlanError: halftune does not compute in bf16 here.
        RuntimeError: its copy fails, too.
    """
    try:
        plain(torch.bfloat16).eval()(input_ids=samples[0], use_cache=False)
        return None
    except RuntimeError as error:
        why = f"plain transformers fails here in bf16: {first_line(error)}"
    loaded = bench.recipe("computed-in-bf16", adapter="none", precision="bf16")
    plan = bench.plan(loaded)
    model: Any = load_model(loaded.run.model, plan).eval()
    with autocast(plan.precision, model.device):
        model(input_ids=samples[0], use_cache=False)
    return Line("dtypes bf16", "note", f"{why}; halftune heals it")


def _close(check: str, what: str, found: torch.Tensor, expected: torch.Tensor) -> Line:
    error = _relative(found, expected)
    return Line(check, "yes" if error <= LOGITS else "no", f"{what}: relative error of the logits {error:.0e}")


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
