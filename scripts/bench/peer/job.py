"""One run that every framework is asked for in the same words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAD, END = "<|endoftext|>", "<|im_end|>"
RANK, ALPHA = 8, 16


@dataclass(frozen=True)
class Job:
    """LoRA fine-tuning of the fixture.

    Attributes:
        model: folder of the model (fp32 safetensors, Hugging Face layout).
        data: folder with the data set in each framework's form.
        out: folder for this run.
        precision: ``fp32`` or ``bf16``.
        packed: whether samples share rows.
        rows: rows per step; length: longest sample, and the length of a packed row.
        steps: optimizer steps; log_every: steps between two lines of metrics.
        learning_rate: constant but for the framework's own schedule; 0-like to compare losses.
    """

    model: Path
    data: Path
    out: Path
    precision: str
    packed: bool
    rows: int
    length: int
    steps: int
    log_every: int = 10
    learning_rate: float = 1e-3
