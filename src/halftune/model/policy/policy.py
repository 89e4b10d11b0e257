"""The model interface of training methods: loss sums and log-probabilities, independent of heads and packing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from halftune.core.errors import ModelError, PlanError
from halftune.data.batch import LABEL_POSITIONS, Batch
from halftune.data.store import NO_LABEL
from halftune.model.attention.packed_rows import known_packed
from halftune.model.load.score_head import token_scores
from halftune.model.policy.cross_entropy import cross_entropy_sum
from halftune.model.policy.divergence import divergences
from halftune.model.policy.head import (
    Head,
    HeadRows,
    decoder_of,
    hidden_instead_of_logits,
    is_frozen,
    is_head_of,
    logits_of,
    outputs_of,
    plain_head,
)
from halftune.model.policy.logprobs import logprobs
from halftune_kernels.library import opaque
from halftune_kernels.ops.linear_cross_entropy import linear_cross_entropy_sum, rows_at_a_time


@dataclass(frozen=True)
class PolicyModel:
    """A causal language model, plain or wrapped by peft, DDP or FSDP2.

    The model computes logits with its own head (soft-capping, scaling, tied and adapted heads included), only at
    positions that predict a label in some row if its forward takes ``logits_to_keep``.

    Attributes:
        model: the model.
        scale: factor of the loss before the backward pass; see ``linear_cross_entropy_sum``.
        label_smoothing: of :meth:`nll_sum`, from 0 to 1.
        router_loss: coefficient of the auxiliary loss of experts, or ``model``: the one in the model's config; None: as
            ``output_router_logits`` in the model's config says.
    """

    model: nn.Module
    scale: float = 1.0
    label_smoothing: float = 0.0
    router_loss: float | Literal["model"] | None = None

    def nll_sum(self, batch: Batch) -> torch.Tensor:
        """Sum of the cross-entropy over labelled tokens in nats: an fp32 scalar (fp64 for fp64 models).

        For plain linear heads the logits are not materialised: loss and gradient are computed for a few rows at a time,
        without calling the head. The auxiliary loss of a mixture of experts (see ``router_loss``) is added while
        gradients are enabled, weighted by the number of labels, as in transformers.
        Without labels the sum is zero and still has a graph through every weight.

        With label smoothing the sum, divided by the number of labels, is ``F.cross_entropy(label_smoothing=ε)``, which
        is ``label_smoothing_factor`` of transformers. Before 5.15, transformers divides each micro-batch by its own
        number of labels; in every version, it leaves out the auxiliary loss.

        Args:
            batch: on the model's device. Missing ``LABEL_POSITIONS`` are computed, which synchronises with the device.
        """
        inputs, labels = batch.inputs, labels_of(batch)
        targets, positions = labels.targets, labels.positions
        whole = _unwrap_ddp(self.model)
        base = _base(whole)
        # a compiled graph would not see the replaced head
        compiled = whole._compiled_call_impl is not None
        head = None if compiled else plain_head(base, inputs)
        if self.router_loss is not None:
            inputs["output_router_logits"] = self.router_loss != 0 and torch.is_grad_enabled()
        chosen = self._selection(positions)
        with hidden_instead_of_logits(head), known_packed("cu_seq_lens_q" in inputs):
            outputs = self.model(**inputs, **chosen, use_cache=False)
        logits = outputs.logits if chosen else outputs.logits[:, positions]
        rows, flat = logits.flatten(0, 1), targets.flatten()
        options: dict[str, Any] = {"all_labelled": labels.everywhere, "label_smoothing": self.label_smoothing}
        if head is None:
            loss = cross_entropy_sum(rows, flat, **options)
        else:
            with torch.autocast(rows.device.type, enabled=False):
                loss = linear_cross_entropy_sum(rows, head.weight, flat, head.bias, scale=self.scale, **options)
        auxiliary = getattr(outputs, "aux_loss", None)
        if auxiliary is None or not torch.is_grad_enabled():
            return loss
        return loss + self._router_coefficient(base) * auxiliary * (targets != NO_LABEL).sum()

    def _router_coefficient(self, base: Any) -> float:
        if self.router_loss is None or self.router_loss == "model":
            return base.config.get_text_config().router_aux_loss_coef
        return self.router_loss

    def token_logprobs(self, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities of the K labels, row by row, in nats: fp32 ``[K]`` (fp64 for an fp64 model).

        Logits are computed for a few rows at a time, see ``logprobs``. Compiled models and models not from transformers
        materialise all logits. Auxiliary losses are not included.

        Args:
            batch: as for :meth:`nll_sum`.
            temperature: divides the logits.
        """
        return self._logprobs(batch, temperature)[0][0]

    def token_logprobs_and_entropies(
        self, batch: Batch, temperature: float = 1.0, tokens: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`token_logprobs`, and the entropies at the same places in nats: ``[K]``, without a graph.

        Args:
            batch, temperature: as for :meth:`token_logprobs`.
            tokens: the entropy is that of so many likeliest tokens, see ``likeliest_entropy``; 0: of all.
        """
        values, entropies = self._logprobs(batch, temperature, entropies_of=tokens)[0]
        return values, entropies.detach()

    def sequence_logprobs(self, batch: Batch) -> torch.Tensor:
        """Sum of the labels' log-probabilities per segment: fp64 ``[S]`` (fp32 on MPS).

        Segments without a label have 0. Without labels the sums still have a graph through every weight.
        """
        labels = labels_of(batch)
        (values,), places = self._logprobs(batch, 1.0)
        return _sums_of_segments(batch, labels, places, values)

    def head_rows(self, batch: Batch) -> HeadRows:
        """What the head computes the logits of the labels from; of one position where there are no labels."""
        labels = labels_of(batch)
        places = labels.places()
        # without labels, compute and drop one, so that every weight is in the graph
        used = places if places.numel() else places.new_zeros(1)
        rows, head, vocabulary, *kind = self._head_rows(batch, labels.positions)
        targets = labels.targets.flatten()[used].clamp(min=0)
        return HeadRows(rows.flatten(0, 1)[used], head, vocabulary, targets, places, *kind)

    def divergences(self, batch: Batch, teacher: HeadRows, beta: float, temperature: float) -> torch.Tensor:
        """Divergence from a teacher and cross-entropy of the K labels: fp32 ``[2, K]`` (fp64 for an fp64 model).

        Args:
            batch: as for :meth:`nll_sum`.
            teacher: of the same batch.
            beta, temperature: see ``halftune.model.policy.divergence``.
        """
        own = self.head_rows(batch)
        chunk = rows_at_a_time(own.vocabulary, own.rows.device)
        return divergences(own, teacher, beta, temperature, chunk)[:, : own.places.numel()]

    @staticmethod
    def label_segments(batch: Batch) -> torch.Tensor:
        """The segment of each label, in the order of :meth:`token_logprobs`: int64 ``[K]``."""
        labels = labels_of(batch)
        return _owners(batch, labels, labels.places())

    @staticmethod
    def label_counts(batch: Batch) -> torch.Tensor:
        """Number of labels per segment: fp64 ``[S]`` (fp32 on MPS)."""
        labels = labels_of(batch)
        places = labels.places()
        return _sums_of_segments(batch, labels, places, torch.ones_like(places))

    def scores(self, batch: Batch) -> torch.Tensor:
        """Scores of a reward model per segment: fp32 ``[S]`` (fp64 for an fp64 model).

        The score of a segment is that of its last token that is not the config's padding token, as in transformers'
        sequence classifiers.

        Args:
            batch: on the model's device; labels are not read.
        """
        base = _base(_unwrap_ddp(self.model))
        pooled = self._forward(batch.inputs).logits
        tokens = token_scores(base)
        if "seq_idx" not in batch.tokens:
            return pooled[:, 0]
        ids, owners = batch.tokens["input_ids"][0], batch.tokens["seq_idx"][0].long()
        real = ids != base.config.get_text_config().pad_token_id
        places = torch.where(real, torch.arange(len(ids), device=ids.device), 0)
        last = places.new_zeros(len(batch.segment_of_example) + 1).scatter_reduce(0, owners, places, "amax")
        # keep the model's output in the graph: FSDP2 starts its backward hooks from its gradient
        return tokens[0, last[: len(batch.segment_of_example)], 0] + pooled[:0].sum()

    def _forward(self, inputs: dict[str, Any]) -> Any:
        with known_packed("cu_seq_lens_q" in inputs):
            return self.model(**inputs, use_cache=False)

    def _selection(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """The argument of a forward pass that makes logits at P positions alone; empty where the class has none."""
        return {"logits_to_keep": positions} if _takes_positions(type(_base(_unwrap_ddp(self.model)))) else {}

    def _logprobs(
        self, batch: Batch, temperature: float, *, entropies_of: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities ``[1, K]``, or with entropies ``[2, K]``; and their indices among the B·P targets."""
        own = self.head_rows(batch)
        chunk = rows_at_a_time(own.vocabulary, own.rows.device)
        found = logprobs(own, temperature, chunk, entropies_of=entropies_of)
        return found[:, : own.places.numel()], own.places

    def _head_rows(self, batch: Batch, positions: torch.Tensor) -> tuple[torch.Tensor, Head, int, bool, bool]:
        """The head's input at P positions ``[B, P, H]``, the head, V, whether it is frozen and plain; or logits and
        identity.
        """
        whole = _unwrap_ddp(self.model)
        base, inputs = _base(whole), batch.inputs
        if (
            whole._compiled_call_impl is None
            and _takes_positions(type(base))
            and (body := decoder_of(base)) is not None
        ):
            plain = opaque(positions) and plain_head(base, inputs) is not None  # looks at it before the pass
            with outputs_of(body) as seen:
                logits = self._forward(inputs | {"logits_to_keep": positions[:1]}).logits
            if seen and is_head_of(base, body, seen[-1], positions[:1], logits):  # OPT calls a part of its body
                rows = seen[-1].last_hidden_state[:, positions]
                # keep the model's output in the graph: FSDP2 starts its backward hooks from its gradient
                rows = rows + logits[..., :0].sum().to(rows.dtype)
                frozen = is_frozen(base, body)
                return rows, partial(logits_of, base, body, seen[-1]), logits.shape[-1], frozen, plain
        chosen = self._selection(positions)
        logits = self._forward(inputs | chosen).logits
        logits = logits if chosen else logits[:, positions]
        return logits, lambda rows: rows, logits.shape[-1], False, False

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the adapter is disabled and the model is in evaluation mode.

        Raises:
            PlanError: the model has no adapter.
        """
        whole = _unwrap_ddp(self.model)
        if not isinstance(whole, PeftModel):
            what = "the reference model requires an adapter, and this model has none"
            raise PlanError(what, code="plan.no_reference_model")
        layers = [one for one in whole.modules() if isinstance(one, BaseTunerLayer | AuxiliaryTrainingWrapper)]
        training = [module for module in whole.modules() if module.training]
        # peft's disable_adapter also clears requires_grad, which FSDP2 would keep for the gathered weights
        try:
            for layer in layers:
                layer._disable_adapters = True
            for module in training:
                module.training = False
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False
            for module in training:
                module.training = True


@dataclass(frozen=True)
class Labels:
    """The labels of a batch.

    Attributes:
        targets: int64 ``[B, P]``, target tokens at P positions, or ``NO_LABEL``.
        positions: int64 ``[P]``; position t predicts the label at t + 1. Has one position if there are no labels.
        everywhere: whether all B·P targets are labels; otherwise finding them synchronises with the device.
    """

    targets: torch.Tensor
    positions: torch.Tensor
    everywhere: bool

    def places(self) -> torch.Tensor:
        """int64 ``[K]``: indices of labels among the B·P targets."""
        flat = self.targets.flatten()
        if self.everywhere:
            return torch.arange(flat.numel(), device=flat.device)
        return (flat != NO_LABEL).nonzero().squeeze(1)


def labels_of(batch: Batch) -> Labels:
    """Return the labels of a batch."""
    targets = F.pad(batch.tokens["labels"][:, 1:], (0, 1), value=NO_LABEL)
    positions = batch.extras.get(LABEL_POSITIONS)
    if not isinstance(positions, torch.Tensor):
        positions = (targets != NO_LABEL).any(dim=0).nonzero().squeeze(1)
    everywhere = len(targets) == 1 and positions.numel() > 0
    if positions.numel() == 0:
        positions = positions.new_zeros(1)
    return Labels(targets[:, positions], positions, everywhere)


def _unwrap_ddp(model: nn.Module) -> nn.Module:
    """The model inside DDP; accelerate's function for this visits every module."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _base(model: nn.Module) -> Any:
    """The transformers model inside a peft model."""
    unwrap = getattr(model, "get_base_model", None)  # peft
    return unwrap() if unwrap is not None else model


def _sums_of_segments(batch: Batch, labels: Labels, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum of the values ``[K]`` at K places among the B·P targets, per segment: fp64 ``[S]`` (fp32 on MPS)."""
    owners = _owners(batch, labels, places)
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    sums = torch.zeros(len(batch.segment_of_example), dtype=wide, device=values.device)
    return sums.index_add(0, owners, values.to(wide))


def _owners(batch: Batch, labels: Labels, places: torch.Tensor) -> torch.Tensor:
    """The segment of each of K places among the B·P targets: int64 ``[K]``."""
    if "seq_idx" in batch.tokens:  # packed: the label of position t is at t + 1
        return batch.tokens["seq_idx"][0, labels.positions[places] + 1].long()
    return places // labels.positions.numel()


def check_router_loss(model: nn.Module) -> None:
    """Check that a model has an auxiliary loss of experts.

    Raises:
        ModelError: it has none.
    """
    kind = type(_base(model))
    if "output_router_logits" not in inspect.signature(kind.forward).parameters:
        what = f"{kind.__name__} has no load-balancing loss"
        where = "training.router_aux_loss_coef"
        raise ModelError(what, where=where, remedy="remove the key", code="model.no_router_loss")


@cache
def _takes_positions(kind: type[nn.Module]) -> bool:
    return "logits_to_keep" in inspect.signature(kind.forward).parameters
