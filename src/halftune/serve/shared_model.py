"""One loaded model, which answers as one of its adapters at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel

from halftune.plan import Plan
from halftune.precision.dtypes import autocast
from halftune.serve.sampling import Token, with_logprobs

_PART = 512  # tokens whose logits are held at the same time


class SharedModel:
    """A model with the dtypes of its plan, and its adapters.

    Args:
        model: a peft model or a transformers one, in evaluation mode, on its device.
        plan: its inference plan.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self._turn, self._active = threading.Lock(), "default"

    @contextmanager
    def answering(self, adapter: str | None) -> Iterator[Any]:
        """The model as ``adapter``, None: without any; waits until other threads have left."""
        with self._turn, torch.no_grad(), autocast(self.plan.precision, self.causal.device):
            if isinstance(self.model, PeftModel):
                self._select(self.model, adapter)
            yield self.causal

    def _select(self, model: PeftModel, adapter: str | None) -> None:
        if adapter == self._active:
            return
        tuner: Any = model.base_model
        if adapter is None:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            model.set_adapter(adapter, inference_mode=True)
        self._active = adapter

    def read(self, ids: list[int], adapter: str | None, top: int) -> list[Token]:
        """The tokens of a prompt with their log-probabilities; the first has none.

        Args:
            ids: T tokens.
            adapter: as of `answering`.
            top: how many of the likeliest tokens are added to each.
        """
        found, cache = [Token(ids[0])], None
        for start in range(0, len(ids) - 1, _PART):
            part = ids[start : min(start + _PART, len(ids) - 1)]
            with self.answering(adapter) as causal:
                inputs = torch.tensor([part], device=causal.device)
                output = causal(input_ids=inputs, past_key_values=cache, use_cache=True)
                cache, scores = output.past_key_values, output.logits[0].float()
                found += with_logprobs(ids[start + 1 : start + 1 + len(part)], scores, top)
        return found
