"""The dtypes of a run, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from halftune.core.choice import Choice
from halftune.core.formats import Format


@dataclass(frozen=True)
class PrecisionPlan:
    """Every dtype of a run. Names are ours (``bf16 | fp16 | fp32``); ``precision.dtypes`` turns them into torch's.

    Attributes:
        storage: dtype in which frozen weights are loaded.
        trainable: dtype of the weights that are trained (master weights).
        compute: dtype of matmuls and attention.
        autocast: whether torch.autocast is on in forward, evaluation and generation.
        grad_scaler: whether the loss is scaled (fp16 only).
        reduce: dtype of the gradient all-reduce.
        optimizer_state: dtype of the optimizer's moments.
        saved: dtype in which the final adapter or model is written, and that its config.json names.
        keep_fp32: regular expressions; a parameter whose name one of them finds stays fp32 through load and save.
        tf32: whether fp32 matmuls may use TF32.
        experts: how experts that are held as one parameter are multiplied, and in which dtype; None in a dense model.
        warnings: full sentences that the user must see before training.
    """

    storage: Choice[Format]
    trainable: Choice[Format]
    compute: Choice[Format]
    autocast: Choice[bool]
    grad_scaler: Choice[bool]
    reduce: Choice[Format]
    optimizer_state: Choice[Format]
    saved: Choice[Format]
    keep_fp32: Choice[tuple[str, ...]]
    tf32: Choice[bool]
    experts: Choice[str] | None = None
    warnings: tuple[str, ...] = ()
