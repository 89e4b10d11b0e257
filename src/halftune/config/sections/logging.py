"""The ``logging`` section: experiment trackers, sample prompts, profiling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from halftune.config.section import LISTED, Flag, Int, Section


class LoggingSection(Section):
    """Loggers, in addition to `metrics.jsonl`, `loss.png` and `report.html`, which are always written."""

    report_to: Annotated[tuple[Literal["tensorboard", "wandb"], ...], LISTED] = ()
    """Further loggers."""

    run_name: str | None = None
    """Name of the run in reports and loggers; the folder's name by default."""

    progress: Flag = True
    """Show a progress bar on a terminal."""

    sample_prompts: Annotated[tuple[str, ...], LISTED] = ()
    """Prompts answered before and after training; the report shows both answers."""

    profile: Annotated[Int, Field(ge=1, le=100)] | None = None
    """Number of steps to profile with torch.profiler, after three warm-up steps: a trace, and a table in the report."""
