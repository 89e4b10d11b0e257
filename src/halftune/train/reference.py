"""The reference model as log-probabilities that are computed before training and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from halftune import __version__
from halftune.core import disk_cache
from halftune.core.errors import TrainingError
from halftune.core.log import get_logger
from halftune.data.batch import Batch
from halftune.data.order.split import TokenizedSplit
from halftune.data.pipeline import PACKAGE, code_of
from halftune.model.policy.policy import PolicyModel
from halftune.plan import to_dict
from halftune.train.batches.feed import Feed
from halftune.train.loop.step import forward_pass
from halftune.train.parallel.processes import sum_over_processes
from halftune.train.state import TrainState

log = get_logger(__name__)
_FILE, _WHAT = "values.npy", "log-probabilities of the reference"


@dataclass(frozen=True)
class Precomputed:
    """The reference of one split.

    Attributes:
        values: fp64 ``[N, S]``: log-probabilities in nats of S segments per example, by the example's index.
    """

    values: torch.Tensor

    def sequence_logprobs(self, batch: Batch) -> torch.Tensor:
        """The values of a batch's segments ``[S]`` on its device; zeros for a filler batch."""
        device = batch.tokens["input_ids"].device
        found = self.values[list(batch.examples)].flatten()
        if not batch.examples:
            found = torch.zeros(len(batch.segment_of_example), dtype=self.values.dtype)
        return found.to(device, torch.float32 if device.type == "mps" else torch.float64)


@torch.no_grad()
def precompute(run: TrainState, feed: Feed) -> Precomputed:
    """The log-probabilities of all examples under the model as it is now, from the cache or by one pass.

    All processes call it together, before the weights of a checkpoint are loaded.

    Args:
        run: its model still has the weights that training starts from.
        feed: batches of the split.

    Raises:
        TrainingError: values are not finite; names the first example.
    """
    shape = (len(feed.split), run.config.method.segments)
    folder = disk_cache.entry("reference", _key(run, feed.split))
    known = disk_cache.read(folder, partial(_load, shape=shape), _WHAT) if run.config.data.cache else None
    # all or none: those that compute wait for the others
    if sum_over_processes(run.accelerator, [float(known is not None)])[0] == run.processes:
        assert known is not None
        return Precomputed(torch.from_numpy(known))
    log.info("computing log-probabilities of the reference model for %d examples", len(feed.split))
    values = _computed(run, feed.for_evaluation(feed.split, run.config.training.per_device_eval_batch_size), shape)
    if odd := np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist():
        where = feed.split.where(odd[:3])
        what = f"the reference model's log-probabilities of {len(odd)} of {shape[0]} examples are not finite"
        remedy = "look at this row and the model's weights; in fp16, try precision: bf16 or fp32"
        raise TrainingError(what, where=where, remedy=remedy, code="train.non_finite")
    if run.is_main and run.config.data.cache:
        disk_cache.write(folder, lambda beside: np.save(beside / _FILE, values), _WHAT)
    return Precomputed(torch.from_numpy(values))


def _computed(run: TrainState, feed: Feed, shape: tuple[int, int]) -> np.ndarray:
    """fp64 ``[N, S]``: each process computes its share."""
    values, training = np.zeros(shape), run.model.training
    run.model.eval()
    try:
        with closing(feed.once()) as steps:
            for batch in chain.from_iterable(steps):
                if not batch.examples and not run.strategy.sharded:
                    continue
                with forward_pass(run):  # a sharded model needs all processes in each of them
                    sums = PolicyModel(run.model).sequence_logprobs(batch.to(run.device))
                if batch.examples:
                    values[list(batch.examples)] = sums.double().cpu().numpy().reshape(-1, shape[1])
    finally:
        run.model.train(training)
        run.strategy.after_evaluation(run.model)
    # rows that another process has computed are zero here
    return np.array(sum_over_processes(run.accelerator, values.ravel().tolist())).reshape(shape)


def _key(run: TrainState, split: TokenizedSplit) -> str:
    """sha256 of the model at the start of training, the plan's dtypes and the tokens with their labels."""
    plan, config = to_dict(run.plan), run.config
    start = {
        "versions": [__version__, torch.__version__],
        "inputs": [run.inputs["model"]["files"], run.inputs["adapter"]],
        "code": code_of(PACKAGE / "media"),
        "media": [run.inputs["processor"], config.data.image_min_pixels, config.data.image_max_pixels],
        "sections": [
            config.model.model_dump(mode="json"),
            config.adapter.model_dump(mode="json"),
            config.training.seed,
        ],
        "plan": [plan["precision"], plan["attention"], plan["weights"]],
    }
    digest = hashlib.sha256(json.dumps(start, sort_keys=True, default=str).encode())
    for index in range(len(split)):
        digest.update(split.digests(index))
        for segment in split.example(index).segments:
            digest.update(len(segment.input_ids).to_bytes(8, "little"))
            digest.update(segment.input_ids.tobytes() + segment.loss_mask.tobytes())
    return digest.hexdigest()


def _load(folder: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The values of an earlier run; None where they do not fit."""
    values = np.load(folder / _FILE, allow_pickle=False)
    return values if values.shape == shape and values.dtype == np.float64 and np.isfinite(values).all() else None
