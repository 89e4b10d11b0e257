"""Around a training of several processes: they meet, compare, give signs of life, and say who failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from halftune.config.facts.model import ModelFacts
from halftune.config.run import RunConfig
from halftune.hardware import Hardware
from halftune.plan import Plan
from halftune.train.parallel.preflight import compare
from halftune.train.parallel.rendezvous import join_rendezvous
from halftune.train.parallel.watchdog import Watchdog


@contextmanager
def together(config: RunConfig, hardware: Hardware, facts: ModelFacts, plan: Plan) -> Iterator[Plan]:
    """Yields the plan that all processes agree on.

    Raises:
        PlanError: the processes disagree; names the rank.
        PeerLost: another process is gone or hangs; names it where that can be told.
    """
    rendezvous = join_rendezvous(config.distributed.timeout_seconds)
    with Watchdog(rendezvous, config.distributed.timeout_seconds) as watchdog:
        try:
            yield compare(rendezvous, config, hardware, facts, plan)
        except BaseException as error:
            if (explained := watchdog.explain(error)) is not error:
                raise explained from error
            raise
