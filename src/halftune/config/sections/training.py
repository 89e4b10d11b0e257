"""The ``training`` section: batch, schedule, optimizer, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from halftune.config.section import LISTED, Flag, Int, Number, Section


class TrainingSection(Section):
    """The loop and its hyperparameters, under their usual names."""

    output_dir: str
    """The run folder: config, plan, checkpoints, metrics, report and the final adapter or model."""

    num_train_epochs: Annotated[Number, Field(gt=0, le=100_000)] = 3.0
    """Passes over the training data."""

    max_steps: Annotated[Int, Field(ge=1)] | None = None
    """Optimizer steps; overrides `num_train_epochs`."""

    per_device_train_batch_size: Annotated[Int, Field(ge=1)] | None = None
    """Rows per device and forward pass; 4 by default. Or say `tokens_per_batch`."""

    tokens_per_batch: Annotated[Int, Field(ge=8)] | None = None
    """Tokens per device and forward pass, padding included: as many rows as fit. Short samples then make more rows."""

    per_device_eval_batch_size: Annotated[Int, Field(ge=1)] | None = None
    """Rows per device in evaluation; as in training by default (rows or tokens)."""

    gradient_accumulation_steps: Annotated[Int, Field(ge=1)] = 1
    """Forward passes per optimizer step. The loss is that of the whole global batch, whatever its split."""

    learning_rate: Annotated[Number, Field(gt=0)] = 2.0e-4
    """Peak learning rate."""

    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial"
    ] = "cosine"
    """Learning-rate schedule, by its name in transformers."""

    warmup_ratio: Annotated[Number, Field(ge=0, lt=1)] = 0.03
    """Share of the steps in which the learning rate rises from zero."""

    warmup_steps: Annotated[Int, Field(ge=0)] | None = None
    """Warm-up in steps; overrides `warmup_ratio`."""

    optim: Literal["adamw", "adam", "sgd", "adafactor", "adagrad"] = "adamw"
    """Optimizer."""

    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Weight decay, decoupled with adamw; biases and norms are exempt."""

    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """First-moment decay of Adam(W)."""

    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    """Second-moment decay of Adam(W)."""

    adam_epsilon: Annotated[Number, Field(gt=0)] = 1e-8
    """Epsilon of Adam(W)."""

    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Clip the global gradient norm to this; 0 switches clipping off."""

    gradient_checkpointing: Flag | Literal["auto"] = "auto"
    """Recompute activations in the backward pass; `auto` switches it on when the memory estimate says it must."""

    fused_layers: Flag | Literal["auto"] = "auto"
    """Compute adapted linear layers, gated feed-forward layers and norms by one operator each, where a layer proves to
    be one that the operators know; `auto` does so on CPUs. The log says how many, and which were left alone."""

    torch_compile: Flag = False
    """Compile the model with torch.compile, which takes minutes before the first step. Attention over packed rows runs
    outside of the graphs, which end at every layer."""

    deterministic: Flag = False
    """Use operators that always round the same way, those of flash-attn included: a GPU needs it for the same bits each
    time and after a resume. Slower; an operator without such a form is warned of. CPUs do not need it."""

    seed: Annotated[Int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of data order, adapter weights and dropout."""

    logging_steps: Annotated[Int, Field(ge=1)] = 1
    """Steps between two lines of metrics."""

    eval_steps: Annotated[Int, Field(ge=1)] | Literal["epoch"] = "epoch"
    """Steps between two evaluations, or once per epoch, where there is evaluation data."""

    save_steps: Annotated[Int, Field(ge=1)] | Literal["epoch", "end"] = "epoch"
    """Steps between two checkpoints, once per epoch, or only the final result."""

    save_total_limit: Annotated[Int, Field(ge=1)] | None = 2
    """Keep this many checkpoints; the best one is always kept."""

    early_stopping_patience: Annotated[Int, Field(ge=1)] | None = None
    """Stop after this many evaluations without improvement of the evaluation loss."""

    load_best: Flag = False
    """Save the weights of the best evaluation, not the last ones, as the final result."""

    on_non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: `stop` the run, or `skip` the update of that step; 30 in a row stop it."""

    on_out_of_memory: Literal["first_step", "always", "stop"] = "first_step"
    """Out of memory: halve the micro-batch and double the accumulation (the same global batch) if that happens before
    the `first_step` is done, `always`, or `stop`."""

    ignore_memory_estimate: Flag = False
    """Train although the estimate says that the run does not fit into memory; otherwise `plan` and `train` leave with
    exit code 1."""

    resume: str = "auto"
    """`auto`: go on from the newest valid checkpoint in `output_dir`; `never`; or the path of a checkpoint."""

    allow_changes: Annotated[
        tuple[Literal["model", "tokenizer", "template", "train_data", "eval_data"], ...], LISTED
    ] = ()
    """What may differ from the checkpoint that a run goes on from; otherwise a difference is an error."""
