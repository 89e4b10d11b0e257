"""Probes of a run's result, which ``halftune verify`` compares with what is served."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from peft import PeftModel

from halftune.core.log import FILE_ONLY, get_logger
from halftune.model.generate import ending_ids
from halftune.train.callback import FAILURES
from halftune.train.loop.step import forward_pass
from halftune.train.state import TrainState
from halftune.verify.draw import draw
from halftune.verify.measure import measure
from halftune.verify.probes import PROBES, Probes

log = get_logger(__name__)


def probes_of(run: TrainState) -> dict[str, str]:
    """File name → content of the result's probes; empty where there are none. All processes call it together.

    There are none for reward models, and where ``logging.probes`` is 0. Where processes hold shares of the weights, all
    of them compute; otherwise the main one. An error is a warning: a result without probes is a result.
    """
    count, measured = run.config.logging.probes, run.is_main or run.sharded
    if not count or not measured or run.config.method.head == "score":
        return {}
    try:
        return _measured(run, count)
    except FAILURES as error:
        if run.sharded:
            raise  # the other processes would wait for this one
        log.warning("the result has no %s: %s: %s", PROBES, type(error).__name__, error)
        return {}


def _measured(run: TrainState, count: int) -> dict[str, str]:
    began, config = time.perf_counter(), run.config
    evaluated, held = run.data.eval is not None, bool(config.data.eval)
    split = run.data.eval if run.data.eval is not None else run.data.train
    sections = config.data.eval if held else config.data.train
    questions = draw(config, split, sections, run.tokenizer, run.data.day, count)
    around = partial(run.strategy.generating, run.model)
    sharded = run.device if run.sharded else None
    probes = measure(run.model, run.tokenizer, questions, partial(forward_pass, run), around, sharded)
    if not probes:
        log.info("the result has no %s: no row has a prompt of text that is short enough", PROBES)
        return {}
    causal: Any = run.model.get_base_model() if isinstance(run.model, PeftModel) else run.model
    found = Probes(
        rows="data.eval" if held else "data.train, held out" if evaluated else "data.train",
        model=config.model.name_or_path,
        adapter=config.adapter.type != "none",
        compute=run.plan.precision.compute.value,
        weights="" if config.model.quantization == "none" else config.model.quantization,
        bos=run.tokenizer.bos_token_id,
        stops=ending_ids(run.tokenizer, causal.generation_config),
        vocabulary=causal.config.get_text_config().vocab_size,
        day=run.data.day,
        variables=dict(config.model.chat_template_kwargs),
        probes=probes,
    )
    log.info("%d probes in %.1f s", len(probes), time.perf_counter() - began, extra=FILE_ONLY)
    return {PROBES: found.as_json()}
