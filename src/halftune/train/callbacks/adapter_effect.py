"""Whether a trained adapter changes what the model answers, measured on rows that it was trained on."""

from __future__ import annotations

from contextlib import closing

import torch
from peft import PeftModel

from halftune.core.log import FILE_ONLY, get_logger
from halftune.model.policy.policy import PolicyModel
from halftune.train.callback import Callback
from halftune.train.loop.step import forward_pass
from halftune.train.state import TrainState

log = get_logger(__name__)


class AdapterEffect(Callback):
    """Warns at the end if the adapter changes no log-probability of the first micro-batch.

    Costs two forward passes. Not measured for several processes, compiled layers, which would be compiled again, reward
    models, and rows that are only prompts.
    """

    watches = True

    def on_end(self, run: TrainState, error: BaseException | None) -> None:
        """Compares the model with its adapter and without, unless the run has failed or was stopped."""
        method = run.config.method
        measured = run.processes == 1 and not run.config.training.torch_compile and not method.samples_answers
        if error is None and measured and method.head != "score" and isinstance(run.model, PeftModel):
            _compare(run)


@torch.no_grad()
def _compare(run: TrainState) -> None:
    with closing(run.feed.steps(0, 1)) as steps:
        _, batches = next(iter(steps))
        batch, policy = batches[0].to(run.device), PolicyModel(run.model)
        was_training = run.model.training
        run.model.eval()
        with forward_pass(run):
            trained = policy.token_logprobs(batch)
            with policy.without_adapter():
                before = policy.token_logprobs(batch)
        run.model.train(was_training)
    apart = float((trained - before).abs().mean()) if len(trained) else 0.0
    if apart == 0:
        why = f"the update is below the rounding of {run.plan.precision.compute.value}, or no gradient reached it"
        log.warning("the adapter changes no log-probability of %d trained tokens: %s", len(trained), why)
    else:
        what = "the adapter changes the log-probabilities of %d trained tokens by %.2g nats on average"
        log.info(what, len(trained), apart, extra=FILE_ONLY)
