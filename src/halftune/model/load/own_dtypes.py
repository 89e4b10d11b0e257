"""Weights with a dtype of their own: those of ``keep_fp32`` and ``train_only``, and those of the model's code.

transformers reads them in it (``in_own_dtypes``). ``mark_kept_by_code`` marks those that no pattern of the plan
names, so that adapters, FSDP2 and saving treat them alike. Everything else has its dtype by other means: buffers that
no checkpoint contains (``runtime_buffers``), 4-bit layers (``quantised``), adapters (``cast_adapter``); and under
autocast, query and key (``attention.qk_dtype``) and experts (``attention.experts``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from halftune.core.choice import Format
from halftune.core.log import get_logger
from halftune.model.load.runtime_buffers import is_foreign, tables
from halftune.plan import Plan
from halftune.precision.dtypes import mark_kept, matches, stays_fp32, torch_dtype

log = get_logger(__name__)


@contextmanager
def in_own_dtypes(plan: Plan) -> Iterator[None]:
    """Inside, ``from_pretrained`` reads parameters of ``keep_fp32``, and buffers of remote code, as fp32.

    Parameters of ``train_only`` are read in the trainable dtype. transformers takes the dtype of each tensor from the
    model class's dtype plan. The plan's names are added to it, so that values are not rounded.
    """
    original, patterns = PreTrainedModel._get_dtype_plan, plan.precision.keep_fp32.value
    trainable = torch_dtype(plan.precision.trainable.value)

    def extended(self: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        parameters = [name for name, _ in self.named_parameters()]
        own = {name: trainable for name in parameters if plan.train_only and matches(name, plan.train_only)}
        own |= {name: torch.float32 for name in parameters if stays_fp32(name, None, patterns)}
        own |= {name: torch.float32 for name, _ in tables(self)} if is_foreign(self) else {}
        return {**original(self, dtype), **{f"^{re.escape(name)}$": own[name] for name in own}}

    PreTrainedModel._get_dtype_plan = extended
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = original


def mark_kept_by_code(model: PreTrainedModel, plan: Plan) -> None:
    """Mark weights that the model's code keeps in fp32, by its class's lists or by their dtype, for saving too.

    The lists apply to every half format of the run, also if weights are loaded in fp32 and saved in half precision.
    """
    precision = plan.precision
    storage, patterns = precision.storage.value, precision.keep_fp32.value
    formats: set[Format] = {storage, precision.compute.value, precision.saved.value}
    asked = kept_by_class(model, formats)
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    for name, tensor in (*model.named_parameters(), *buffers):
        if tensor.dtype != torch.float32 or stays_fp32(name, None, patterns):
            continue
        trained = plan.train_only is not None and matches(name, plan.train_only)
        if (storage != "fp32" and not trained) or asked.search(name):
            mark_kept(tensor)
            log.info("%s stays fp32 (required by the model's code)", name)


def kept_by_class(model: PreTrainedModel, formats: set[Format]) -> re.Pattern[str]:
    """Names of weights that the model's class keeps in fp32 for any of the half formats among ``formats``."""
    halves = sorted(formats - {"fp32"})
    listed = [entry for half in halves for entry in model._get_dtype_plan(torch_dtype(half))]
    return re.compile("|".join(entry.replace("*", ".*") for entry in listed) or r"(?!)")
