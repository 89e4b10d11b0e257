"""Number formats: decided once (resolve), reported (report), enforced at run time (guard).

``PrecisionPlan`` holds the dtypes of a run, each with its reason.

In: a config and a machine (to decide); a live model (to guard and report).
Out: a `PrecisionPlan`; casts, warnings and reports of dtypes.
Imported by: `bench`, `certify`, `cli`, `doctor`, `evaluate`, `export`, `infer`, `model`, `optim`, `plan`, `serve`,
`train`.
"""

from __future__ import annotations

from dataclasses import dataclass

from halftune.core.choice import Choice, Format, StateFormat

TRAINED_FLOAT8 = "fp8 (torchao)"
"""The plan's format of linear layers whose weights are trained and multiplied in float8."""


@dataclass(frozen=True)
class PrecisionPlan:
    """Every dtype of a run, as ``bf16 | fp16 | fp32``; ``precision.dtypes`` maps them to torch's.

    Attributes:
        storage: dtype of loaded weights.
        trainable: dtype of trained (master) weights.
        compute: dtype of matmuls and attention.
        autocast: whether torch.autocast is enabled in training, evaluation and generation.
        grad_scaler: whether the loss is scaled (fp16 only).
        reduce: dtype of the gradient all-reduce.
        optimizer_state: dtype of the optimizer's moments.
        saved: dtype of the final adapter or model, and in its config.json.
        keep_fp32: regular expressions; parameters whose names match stay fp32 on load and save.
        tf32: whether fp32 matmuls may use TF32.
        linear: ``fp8`` for frozen weights under adapters and their products, ``TRAINED_FLOAT8`` for the products
            of full fine-tuning; None as ``compute``.
        experts: matmul and its dtype for experts stored as one parameter; None in a dense model.
        warnings: full sentences, shown before training.
    """

    storage: Choice[Format]
    trainable: Choice[Format]
    compute: Choice[Format]
    autocast: Choice[bool]
    grad_scaler: Choice[bool]
    reduce: Choice[Format]
    optimizer_state: Choice[StateFormat]
    saved: Choice[Format]
    keep_fp32: Choice[tuple[str, ...]]
    tf32: Choice[bool]
    linear: Choice[str] | None = None
    experts: Choice[str] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def trains_in_float8(self) -> bool:
        """Whether trained weights are multiplied in float8."""
        return self.linear is not None and self.linear.value == TRAINED_FLOAT8
