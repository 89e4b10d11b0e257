"""The whole configuration of a run."""

from __future__ import annotations

from typing import Annotated

from halftune.config.sections import LISTED, RecipePath, Section
from halftune.config.sections.data import DataSection
from halftune.config.sections.method import MethodSection, SftMethod
from halftune.config.sections.model import AdapterSection, AttentionSection, LoraAdapter, ModelSection, PrecisionSection
from halftune.config.sections.training import DistributedSection, GenerationSection, LoggingSection, TrainingSection


class RunConfig(Section):
    """One run: model, number formats, attention, adapter, data, method, training."""

    depends_on: Annotated[tuple[RecipePath, ...], LISTED] = ()
    """Recipes (paths relative to this file) to train first, unless their run is finished."""

    model: ModelSection
    """The base model and its tokenizer."""

    precision: PrecisionSection = PrecisionSection()
    """`auto`, `bf16`, `fp16` or `fp32`, or a section."""

    attention: AttentionSection = AttentionSection()
    """`auto`, `fa2`, `fa3`, `fa4`, `sdpa`, `flex` or `eager`, or a section."""

    adapter: AdapterSection = LoraAdapter()
    """`none` for full fine-tuning, or the type of an adapter, or a section."""

    data: DataSection
    """Training and evaluation data."""

    method: MethodSection = SftMethod()
    """The training method."""

    training: TrainingSection
    """Batch, schedule, optimizer, checkpoints."""

    distributed: DistributedSection = DistributedSection()
    """Processes, machines, and the parallelism strategy: `auto`, `ddp` or `fsdp2`, or a section."""

    logging: LoggingSection = LoggingSection()
    """Experiment trackers, besides the run folder."""

    generation: GenerationSection = GenerationSection()
    """Decoding settings of chat and the report's samples."""
