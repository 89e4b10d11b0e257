"""How processes share a model while it trains, one file per strategy. This table names them.

In: a plan's distribution, the processes of the run.
Out: a `Strategy`; sums and agreement over processes; who failed.
Imported by: `bench`, `cli`, `launch`, `train.batches`, `train.checkpoint`, `train.finish`,
    `train.loop`, `train.reference`, `train.rollouts`, `train.save_restore`, `train.setup`, `train.signals`,
    `train.trainer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halftune.core.table import load

if TYPE_CHECKING:  # a launcher needs of all this the store only, and keeps what it imports for as long as a run takes
    from accelerate import Accelerator

    from halftune.plan import Plan
    from halftune.train.parallel.strategy import Strategy

STRATEGIES: dict[str, str] = {
    "single": "halftune.train.parallel.strategy:Strategy",
    "ddp": "halftune.train.parallel.ddp:Ddp",
    "fsdp2": "halftune.train.parallel.fsdp2:Fsdp2",
}


def make_strategy(accelerator: Accelerator, plan: Plan) -> Strategy:
    """The strategy that the plan chose."""
    return load(STRATEGIES, plan.distribution.value, kind="strategy")(accelerator, plan)
