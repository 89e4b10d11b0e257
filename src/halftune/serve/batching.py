"""Many requests in one forward pass: transformers' continuous batching, under the plan, each with its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import psutil
import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
from transformers.generation.continuous_batching.requests import FutureRequestState, GenerationOutput
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from halftune.model.attention.register import current_guard
from halftune.precision.dtypes import torch_dtype
from halftune.serve.sampling import FAILED, End, Job, choose
from halftune.serve.shared_model import SharedModel

SDPA = "sdpa"  # the one name for which continuous batching builds masks, next to eager
PAGE = 64  # tokens of a page of the key-value cache
MOST_ROWS = 64  # requests in one forward pass
_QUERY_TOKENS = 512  # of one forward pass: longer prompts are read in parts
_CACHE_TOKENS = 1 << 16  # of a model's cache, unless one request needs more
_OF_MEMORY = 0.25  # of what is free, for the caches of all models


def can_batch(shared: SharedModel) -> bool:
    """Whether continuous batching serves this model: softmax attention in every layer, by SDPA, without images."""
    attention, config = shared.plan.attention, shared.causal.config.get_text_config()
    if attention.softmax.value != SDPA or attention.provider.value == "model" or attention.linear.value != "none":
        return False
    try:
        group_layers_by_attn_type(config)
    except (ValueError, AttributeError):  # layers of another kind
        return False
    return True


@contextmanager
def paged_attention(model: Any) -> Iterator[None]:
    """Inside, the model's attention is transformers' SDPA, which knows pages, behind the plan's guard.

    The plan's own function would take a batch of several requests for a row of packed samples.
    """
    mapping: Any = AttentionInterface._global_mapping
    before, name = dict(mapping), model.config._attn_implementation
    AttentionInterface.register(SDPA, current_guard().attention(sdpa_attention_forward))
    model.set_attn_implementation(SDPA)
    try:
        yield
    finally:
        model.set_attn_implementation(name)
        mapping.clear()
        mapping.update(before)


class _AsAdapter:
    """The shared model as continuous batching sees it: with one adapter, in the compute dtype."""

    def __init__(self, shared: SharedModel, adapter: str | None) -> None:
        self._shared, self._adapter = shared, adapter
        self.dtype = torch_dtype(shared.plan.precision.compute.value)  # of the cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared.causal, name)

    def eval(self) -> _AsAdapter:
        return self

    def _get_logits_processor(self, _: GenerationConfig) -> Any:
        return [_Sampling()]

    def __call__(self, **inputs: Any) -> Any:
        with self._shared.answering(self._adapter) as causal:
            return causal(**inputs)


class _Sampling(ContinuousBatchingLogitsProcessor):
    """Lets each request choose its token; the scores that it returns have one maximum, the token."""

    supported_kwargs = {"job": Job}  # noqa: RUF012  the base class's way
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        self._jobs = [one.state.logit_processor_kwargs["job"] for one in requests_with_new_token]
        return torch.zeros(len(self._jobs), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        chosen = torch.zeros_like(scores)
        tokens = choose(self._jobs, scores[: len(self._jobs)])
        chosen[: len(tokens)].scatter_(1, tokens[:, None], 1)
        return chosen


class _Router(OutputRouter):
    """Ends jobs; what belongs to a cancelled one is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, Job] = {}

    def deliver(self, output: GenerationOutput) -> None:
        job = self.jobs.pop(output.request_id, None)
        if job is not None and not job.cancelled:
            job.emit(End(FAILED if output.error else ""))

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)


class _Manager(ContinuousBatchingManager):
    def switch_to_cb_friendly_attn(self, *_: Any, **__: Any) -> None:
        """The attention is `paged_attention`'s."""


class BatchedLane:
    """Answers of one adapter, many at once.

    Args:
        shared: the model, inside `paged_attention`.
        adapter: name in the peft model; None: the base.
        tokens: of the key-value cache.
    """

    def __init__(self, shared: SharedModel, adapter: str | None, tokens: int) -> None:
        self._view: Any = _AsAdapter(shared, adapter)
        self._config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=-(-tokens // PAGE),
            max_batch_tokens=_QUERY_TOKENS,
            max_requests_per_batch=MOST_ROWS,
            use_cuda_graph=False,  # each request chooses its tokens on the CPU
            use_async_batching=False,
        )
        self._numbers, self._names = count(), dict[Job, str]()
        self._start()

    def _start(self) -> None:
        self._router = _Router()
        self._manager = _Manager(self._view, GenerationConfig(do_sample=False), self._config)
        self._manager.logit_processor.tensors_required = 1  # counted only for what it converts itself
        self._manager.output_router = self._router
        self._manager.start()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._manager.is_running() and self._manager.background_thread_status.fatal_error is None

    def submit(self, job: Job) -> None:
        """Start a job, and the engine anew after a failed forward pass, which ends it."""
        if not self.alive:
            self._manager.stop(hard_stop=True)
            self._start()
        name = self._names[job] = str(next(self._numbers))
        self._router.jobs[name] = job
        ends = sorted(job.ends)
        taken = self._manager.add_request(job.ids, name, job.max_tokens, eos_token_id=ends, job=job)
        if taken is None:
            job.emit(End("the engine has stopped"))

    def release(self, job: Job) -> None:
        """Forget a job, and stop it if it has not ended."""
        job.cancelled = True
        name = self._names.pop(job)
        if self._router.jobs.pop(name, None) is not None:
            self._manager.cancel_request(name)

    def close(self) -> None:
        """Stop at once; running jobs end with an error."""
        self._manager.stop(hard_stop=True, timeout=10)


def cache_tokens(shared: SharedModel, lanes: int, longest: int) -> int:
    """Tokens of the key-value cache of each of ``lanes`` models: 65,536, or as many as a quarter of memory holds.

    Args:
        shared: the model.
        lanes: number of caches.
        longest: tokens of the longest request, which should fit.
    """
    config, device = shared.causal.config.get_text_config(), shared.causal.device
    width = torch_dtype(shared.plan.precision.compute.value).itemsize
    each = 2 * config.num_hidden_layers * find_num_key_value_heads(config) * find_head_dim(config) * width
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return min(max(_CACHE_TOKENS, longest + PAGE), int(free * _OF_MEMORY / lanes / each))
