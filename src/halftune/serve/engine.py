"""The models that answer: one loaded base, with or without each run's adapter."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from halftune.core.log import get_logger
from halftune.infer.session import open_session
from halftune.model.adapters import load_adapter
from halftune.model.files.identity import check_base
from halftune.model.files.result import base_of_result
from halftune.model.generate import context_length, ending_ids
from halftune.model.load.device import device_of
from halftune.model.result.completed_run import CompletedRun
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.precision.report import check_dtypes
from halftune.serve.batch_check import batching_holds
from halftune.serve.batching import BatchedLane, cache_tokens, can_batch, paged_attention
from halftune.serve.one_by_one import SerialLane
from halftune.serve.sampling import Job
from halftune.serve.shared_model import SharedModel

log = get_logger(__name__)
_LONGEST = 32_768  # tokens of a request, unless --max-tokens says otherwise


class Lane(Protocol):
    """Answers of one model."""

    @property
    def alive(self) -> bool: ...
    def submit(self, job: Job) -> None: ...
    def release(self, job: Job) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Served:
    """A model that clients can name.

    Attributes:
        name: its name.
        run: whose tokenizer, template and decoding settings it has.
        adapter: name in the peft model; None: without adapter.
        tokenizer: of the run.
        ends: tokens that end an answer.
        lane: where it answers.
    """

    name: str
    run: CompletedRun
    adapter: str | None
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    lane: Lane


class Engine:
    """Loads runs and answers as each of them.

    Args:
        runs: name → run, of one base; see `models.open_runs`.
        base: name of the base model; None: it is not served.
        max_tokens: of prompt and answer together at most; None: the model's context, up to 32,768.

    Raises:
        HalftuneError: a model cannot be loaded as planned.
    """

    def __init__(self, runs: dict[str, CompletedRun], base: str | None, max_tokens: int | None) -> None:
        first, *others = runs.values()
        session = open_session(first)
        self.images, self.media = session.images, session.media
        model: Any = session.model
        for number, run in enumerate(others, 1):
            check_base(base_of_result(run.final), run.loaded.run.model, allowed=run.any_base)
            model = load_adapter(model, run.final, run.plan, f"adapter{number}")
            check_dtypes(model, run.plan.precision)
        model.to(device_of(first.plan)).eval()
        self.shared = SharedModel(model, first.plan)
        context = context_length(self.shared.causal) or _LONGEST
        self.max_tokens = min(max_tokens or _LONGEST, context)
        self._stack = ExitStack()
        self.batched = self.images is None and can_batch(self.shared)
        try:
            self._open_lanes(runs, base, session.tokenizer)
            served = next(iter(self.models.values()))
            if isinstance(served.lane, BatchedLane) and not batching_holds(self.shared, served.lane, served.adapter):
                self.close()
                self.batched = False
                self._open_lanes(runs, base, session.tokenizer)
        except BaseException:  # threads would keep the process
            self.close()
            raise
        if not self.batched:
            log.info("one request at a time: continuous batching does not serve this model")

    def _open_lanes(self, runs: dict[str, CompletedRun], base: str | None, first: PreTrainedTokenizerBase) -> None:
        names = [*runs, *([base] if base else [])]
        cache = 0
        if self.batched:
            self._stack.enter_context(paged_attention(self.shared.causal))
            cache = cache_tokens(self.shared, len(names), self.max_tokens)
            self.max_tokens = min(self.max_tokens, cache)
        self.models: dict[str, Served] = {}
        for number, name in enumerate(names):
            run = runs.get(name) or next(iter(runs.values()))
            adapter = "default" if number == 0 else f"adapter{number}"
            adapter = adapter if name in runs and isinstance(self.shared.model, PeftModel) else None
            tokenizer = first if number == 0 or name not in runs else load_tokenizer(run.result)
            lane = BatchedLane(self.shared, adapter, cache) if self.batched else SerialLane(self.shared, adapter)
            self._stack.callback(lane.close)
            ends = frozenset(ending_ids(tokenizer, self.shared.causal.generation_config))
            self.models[name] = Served(name, run, adapter, tokenizer, ends, lane)

    @property
    def alive(self) -> bool:
        """Whether every model takes requests."""
        return all(one.lane.alive for one in self.models.values())

    def close(self) -> None:
        """Stop at once; running requests end with an error."""
        self._stack.close()
