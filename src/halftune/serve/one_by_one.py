"""One request after another by `generate`: images, and models that continuous batching does not know."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from halftune.core.log import get_logger
from halftune.model.generate import decoding
from halftune.serve.sampling import FAILED, End, Job, choose
from halftune.serve.shared_model import SharedModel

log = get_logger(__name__)


class _Choice(LogitsProcessor):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return torch.zeros_like(scores).scatter_(1, choose([self._job], scores)[:, None], 1)


class _Cancelled(StoppingCriteria):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), self._job.cancelled, device=input_ids.device)


class SerialLane:
    """Answers of one adapter, one after another.

    Args:
        shared: the model.
        adapter: name in the peft model; None: the base.
    """

    def __init__(self, shared: SharedModel, adapter: str | None) -> None:
        self._shared, self._adapter = shared, adapter
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._work, name=f"halftune-serve-{adapter}")
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.put(job)

    def release(self, job: Job) -> None:
        """Stop a job if it has not ended."""
        job.cancelled = True

    def close(self) -> None:
        """Stop after the token in work; waiting jobs never start."""
        self._waiting.put(None)
        if (running := self._running) is not None:
            running.cancelled = True
        self._thread.join(10)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            if job.cancelled:
                continue
            self._running = job
            try:
                self._generate(job)
                job.emit(End())
            except Exception:  # of one request; the next may do better
                log.exception("a request failed")
                job.emit(End(FAILED))

    def _generate(self, job: Job) -> None:
        with self._shared.answering(self._adapter) as causal:
            settings = GenerationConfig(
                max_new_tokens=job.max_tokens,
                do_sample=False,
                eos_token_id=sorted(job.ends) or None,
                pad_token_id=0,  # one row has no padding
                use_cache=True,
            )
            prompt_1T = torch.tensor([job.ids], device=causal.device)
            with decoding(causal, settings):
                causal.generate(
                    prompt_1T,
                    attention_mask=torch.ones_like(prompt_1T),
                    **job.inputs,
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([_Choice(job)]),
                    stopping_criteria=StoppingCriteriaList([_Cancelled(job)]),
                )
