"""The ``training`` section: batch, schedule, optimizer, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from halftune.config.optimizers import Optim
from halftune.config.section import LISTED, Flag, Int, Number, Section

Share = Annotated[Number, Field(gt=0, lt=1)]


class TrainingSection(Section):
    """The training loop and its hyperparameters."""

    output_dir: str
    """The run folder: config, plan, checkpoints, metrics, report and the final adapter or model."""

    num_train_epochs: Annotated[Number, Field(gt=0, le=100_000)] = 3.0
    """Passes over the training data."""

    max_steps: Annotated[Int, Field(ge=1)] | None = None
    """Optimizer steps; overrides `num_train_epochs`."""

    per_device_train_batch_size: Annotated[Int, Field(ge=1)] | None = None
    """Rows per device and forward pass; default 4. Alternative: `tokens_per_batch`."""

    tokens_per_batch: Annotated[Int, Field(ge=8)] | None = None
    """Tokens per device and forward pass, padding included; the number of rows varies."""

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

    optim: Optim = "adamw"
    """Optimizer. `muon` updates hidden matrices by Muon and all other weights by AdamW, with one learning rate."""

    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Weight decay, decoupled with adamw and muon; biases and norms are exempt."""

    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """First-moment decay of Adam(W)."""

    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    """Second-moment decay of Adam(W)."""

    adam_epsilon: Annotated[Number, Field(gt=0)] = 1e-8
    """Epsilon of Adam(W)."""

    muon_momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    """Momentum of Muon (Nesterov's)."""

    muon_ns_steps: Annotated[Int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations of Muon, which make an update nearly orthogonal."""

    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""

    gradient_checkpointing: Flag | Literal["auto"] = "auto"
    """Recompute activations in the backward pass; `auto`: if the memory estimate requires it."""

    fused_layers: Flag | Literal["auto"] = "auto"
    """Compute adapted linear layers, gated feed-forward layers and norms with fused operators, after verifying each
    kind of layer; `auto`: on CPUs. The log lists fused and unsupported layers."""

    torch_compile: Flag = False
    """Compile the model with torch.compile, which takes minutes before the first step. Attention over packed rows runs
    outside of the graphs, which end at every layer."""

    deterministic: Flag = False
    """Use deterministic operators, including flash-attn's: required on a GPU for bit-identical repetition and resume.
    Slower; operators without a deterministic version cause a warning. Not needed on CPUs."""

    seed: Annotated[Int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of data order, adapter weights and dropout."""

    logging_steps: Annotated[Int, Field(ge=1)] = 1
    """Steps between log lines of metrics."""

    eval_steps: Annotated[Int, Field(ge=1)] | Share | Literal["epoch"] = "epoch"
    """Steps between two evaluations, or once per epoch, where there is evaluation data. Below 1: a share of all steps
    of the run, rounded up to whole steps, as in transformers; n times per epoch is 1 / (n × epochs)."""

    save_steps: Annotated[Int, Field(ge=1)] | Share | Literal["epoch", "end"] = "epoch"
    """Steps between two checkpoints, once per epoch, or only the final result. Below 1: a share, as in `eval_steps`."""

    save_total_limit: Annotated[Int, Field(ge=1)] | None = 2
    """Number of checkpoints to keep; the best one is always kept."""

    early_stopping_patience: Annotated[Int, Field(ge=1)] | None = None
    """Stop after this many evaluations without improvement of the evaluation loss."""

    load_best: Flag = False
    """Save the weights of the best evaluation as the final result, instead of the last ones."""

    on_non_finite: Literal["stop", "skip"] = "stop"
    """For a non-finite loss or gradient, `stop` the run or `skip` the update; 30 in a row stop it."""

    on_out_of_memory: Literal["first_step", "always", "stop"] = "first_step"
    """Out of memory: halve the micro-batch and double the accumulation (same global batch) in the `first_step` only,
    or `always`; or `stop`."""

    ignore_memory_estimate: Flag = False
    """Train even if the memory estimate says that the run does not fit; otherwise `plan` and `train` exit with code
    1."""

    resume: str = "auto"
    """`auto`: resume from the newest valid checkpoint in `output_dir`; `never`; or the path of a checkpoint."""

    allow_changes: Annotated[
        tuple[Literal["model", "tokenizer", "template", "train_data", "eval_data"], ...], LISTED
    ] = ()
    """Accepted differences from the checkpoint when resuming; others are errors."""
