"""The sections ``training``, ``generation``, ``logging`` and ``distributed``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from halftune.config.optimizers import PROJECTION_RANK, Optim, Schedule
from halftune.config.sections import LISTED, Flag, Int, Number, OutputPath, Section


class GenerationSection(Section):
    """Decoding."""

    max_new_tokens: Annotated[Int, Field(ge=1)] = 256
    """Maximum number of generated tokens."""

    temperature: Annotated[Number, Field(ge=0)] = 0.0
    """Sampling temperature; 0: greedy decoding."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Top-p (nucleus) sampling."""

    top_k: Annotated[Int, Field(ge=0)] = 0
    """Top-k sampling; 0: all tokens."""

    repetition_penalty: Annotated[Number, Field(gt=0)] = 1.0
    """Repetition penalty; values above 1 make repetition less likely."""


class FsdpSection(Section):
    """Options of `strategy: fsdp2`."""

    wrap: Annotated[tuple[str, ...], LISTED] = ()
    """Class names of the modules to shard as units; by default the layers of the decoder and of towers."""

    reshard_after_forward: Flag = True
    """Free a layer's gathered weights after its forward pass and gather them again for backward: less memory, 1.5 times
    the communication."""

    sync_each_batch: Flag | Literal["auto"] = "auto"
    """Reduce gradients after every micro-batch. Otherwise once per step, with less communication and full gradients on
    each device. `auto`: once per step if the estimate says that they fit."""

    cpu_offload: Flag = False
    """Keep shards, gradients and optimizer state in main memory, and run the optimizer on the CPU."""


class DistributedSection(Section):
    """Several devices and machines. `distributed: fsdp2` is short for `distributed: {strategy: fsdp2}`."""

    word: ClassVar[str | None] = "strategy"

    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    """`ddp`: a full model on each device; `fsdp2`: sharded weights, gradients and optimizer state. `auto`: ddp if the
    estimate says that the full model fits, else fsdp2."""

    num_processes: Annotated[Int, Field(ge=1)] | None = None
    """Processes over all machines, one device each; by default one per visible device, and one on a CPU."""

    num_machines: Annotated[Int, Field(ge=1)] = 1
    """Machines that train together; each starts the same command, with its own `machine_rank`."""

    machine_rank: Annotated[Int, Field(ge=0)] = 0
    """Rank of this machine, from 0."""

    main_process_ip: str | None = None
    """Host name or address of machine 0 for the others."""

    main_process_port: Annotated[Int, Field(ge=1024, le=65534)] = 29500
    """Port of the rendezvous. Several machines also use the next port: open both."""

    max_restarts: Annotated[Int, Field(ge=0)] = 0
    """Number of restarts from the newest valid checkpoint after a process fails."""

    timeout_seconds: Annotated[Number, Field(ge=5)] = 600.0
    """Timeout for a process without a heartbeat, after which the job ends. Reading and writing extend it by their
    size."""

    stop_seconds: Annotated[Number, Field(ge=1)] = 30.0
    """Timeout for a process without a heartbeat after SIGTERM or Ctrl-C, after which it exits without saving; at least
    twice the longest step so far."""

    fsdp: FsdpSection = FsdpSection()
    """Options of fsdp2."""


Logger = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class LoggingSection(Section):
    """Loggers, in addition to `metrics.jsonl`, `loss.png` and `report.html`, which are always written."""

    report_to: Annotated[tuple[Logger, ...], LISTED] = ()
    """Further loggers."""

    run_name: str | None = None
    """Name of the run in reports and loggers; the folder's name by default."""

    progress: Flag = True
    """Show a progress bar on a terminal."""

    sample_prompts: Annotated[tuple[str, ...], LISTED] = ()
    """Prompts answered before and after training; the report shows both answers."""

    sample_media: Annotated[tuple[str, ...], LISTED] = ()
    """Files of the images and sounds in `sample_prompts`: one for each `<image>` and `<audio>`, in their order."""

    probes: Annotated[Int, Field(ge=0, le=64)] = 32
    """Prompts whose answers and log-probabilities are kept in `final/probes.json`, for `halftune verify`; 0: none."""

    profile: Annotated[Int, Field(ge=1, le=100)] | None = None
    """Number of steps to profile with torch.profiler, after three warm-up steps: a trace, and a table in the report."""


class PartRatesSection(Section):
    """Peak learning rates of the trained parts of `model.train`; unset: `learning_rate`."""

    vision: Annotated[Number, Field(gt=0)] | None = None
    """Of the image encoder."""

    audio: Annotated[Number, Field(gt=0)] | None = None
    """Of the audio encoder."""

    projector: Annotated[Number, Field(gt=0)] | None = None
    """Of the projectors."""


Share = Annotated[Number, Field(ge=1e-6, lt=1)]
PerEpoch = Annotated[str, Field(pattern="^[1-9][0-9]{0,5}/epoch$"), "a rate such as 4/epoch"]


class TrainingSection(Section):
    """The training loop and its hyperparameters."""

    output_dir: OutputPath
    """The run folder: config, plan, checkpoints, metrics, report and the final adapter or model."""

    num_train_epochs: Annotated[Number, Field(ge=1e-6, le=100_000)] = 3.0
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
    """Forward passes per optimizer step. The loss is a mean over the global batch, so its split does not change it."""

    learning_rate: Annotated[Number, Field(gt=0)] = 2.0e-4
    """Peak learning rate."""

    part_learning_rates: PartRatesSection = PartRatesSection()
    """Learning rates of the encoders and projectors of a multimodal model, e.g. `{vision: 2e-6}`."""

    lr_scheduler_type: Schedule = "cosine"
    """Learning-rate schedule, by its name in transformers. `rex` (arXiv:2107.04197) falls slowly at first and fast at
    the end."""

    lr_min_ratio: Annotated[Number, Field(ge=0, lt=1)] | None = None
    """Lowest learning rate over the peak, for `cosine_with_min_lr` (default 0.1), `polynomial`, `warmup_stable_decay`
    and `rex` (default 0)."""

    lr_cycles: Annotated[Int, Field(ge=1)] | None = None
    """Cycles of `cosine_with_restarts`; default 1."""

    lr_power: Annotated[Number, Field(gt=0)] | None = None
    """Exponent of `polynomial`; default 1."""

    lr_decay_ratio: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of the steps in which `warmup_stable_decay` falls, at the end; default 0.1."""

    warmup_ratio: Annotated[Number, Field(ge=0, lt=1)] = 0.03
    """Share of the steps in which the learning rate rises from zero, rounded up to whole steps, as in transformers. At
    least the last step has the peak."""

    warmup_steps: Annotated[Int, Field(ge=0)] | None = None
    """Warm-up in steps; overrides `warmup_ratio`."""

    optim: Optim = "adamw"
    """Optimizer. `muon` updates hidden matrices by Muon and all other weights by AdamW, with one learning rate.
    `galore` and `apollo` update hidden matrices in a space of low rank, all other weights by AdamW.
    `stable_adamw` clips updates as Adafactor. `adamw_schedule_free` averages weights in place of a schedule.
    `adamw_torch_8bit` and `adamw_torch_4bit` are torchao's. Others with `8bit`, `paged` or `lion` are those of
    bitsandbytes: 8-bit state, and state that may move to main memory if the device is full."""

    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    """Weight decay, decoupled with adamw, lion and muon; biases and norms are exempt."""

    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """Weights that decay: `all` includes biases, norms and other vectors, as torch's optimizers do by themselves."""

    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """First-moment decay of Adam(W), and first beta of Lion."""

    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    """Second-moment decay of Adam(W), and second beta of Lion (0.99 in its paper)."""

    adam_epsilon: Annotated[Number, Field(gt=0)] = 1e-8
    """Epsilon of Adam(W)."""

    muon_momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    """Momentum of Muon (Nesterov's)."""

    muon_ns_steps: Annotated[Int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations of Muon, which make an update nearly orthogonal."""

    projection_rank: Annotated[Int, Field(ge=1)] = PROJECTION_RANK
    """Rank of the space that `galore` and `apollo` project the gradients of hidden matrices to."""

    projection_interval: Annotated[Int, Field(ge=1)] = 200
    """Steps until `galore` and `apollo` choose other projections."""

    projection_scale: Annotated[Number, Field(gt=0)] = 1.0
    """Factor of updates by `galore` (0.25 in its paper), and square of the factor of those by `apollo`."""

    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""

    label_smoothing: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Label smoothing (arXiv:1512.00567) of methods sft and pretrain: this share of each label is spread evenly over
    the vocabulary. The evaluation loss is smoothed too, as in transformers."""

    router_aux_loss_coef: Annotated[Number, Field(ge=0)] | Literal["model"] | None = None
    """Coefficient of the load-balancing loss of a mixture of experts, with methods sft and pretrain. `model`: the
    coefficient in config.json; 0: no such loss; null: as `output_router_logits` in config.json says."""

    neftune_alpha: Annotated[Number, Field(gt=0)] | None = None
    """NEFTune (arXiv:2310.05914): in training, add uniform noise in ± alpha / sqrt(length × hidden size) to the input
    embeddings, with the length of each sample, packed or not. Usual: 5."""

    gradient_checkpointing: Flag | Literal["auto"] = "auto"
    """Recompute activations in the backward pass; `auto`: if the memory estimate requires it."""

    fused_layers: Flag | Literal["auto"] = "auto"
    """Compute adapted linear layers, gated feed-forward layers, norms and, on GPUs, rotary embeddings with fused
    operators, after verifying each kind of layer; `auto`: on CPUs, and on NVIDIA GPUs from compute capability 8.0. The
    log lists fused and unsupported layers."""

    torch_compile: Flag = False
    """Compile each decoder layer with torch.compile, which takes minutes before the first step. Fused operators, the
    loss and attention over packed rows stay as they are; eager and flex attention and dropout in it end graphs in
    packed rows."""

    deterministic: Flag = False
    """Use deterministic operators, including flash-attn's: required on a GPU for bit-identical repetition and resume.
    Slower; operators without a deterministic version cause a warning. Not needed on CPUs."""

    seed: Annotated[Int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of data order, adapter weights and dropout."""

    logging_steps: Annotated[Int, Field(ge=1)] = 1
    """Steps between log lines of metrics."""

    eval_steps: Annotated[Int, Field(ge=1)] | Share | Literal["epoch"] | PerEpoch = "epoch"
    """Steps between two evaluations, where there is evaluation data; once per epoch, or several times, e.g. `4/epoch`.
    Below 1: a share of all steps of the run, rounded up to whole steps, as in transformers."""

    save_steps: Annotated[Int, Field(ge=1)] | Share | Literal["epoch", "end"] | PerEpoch = "epoch"
    """Steps between two checkpoints, as in `eval_steps`; `end`: only the final result."""

    save_total_limit: Annotated[Int, Field(ge=1)] | None = 2
    """Number of checkpoints to keep; the best one is always kept."""

    metric_for_best: str = "eval_loss"
    """Metric of `load_best` and `early_stopping_patience`: `eval_loss`, or `eval_loss_NAME` of a named source of
    `data.eval`. Lower is better."""

    early_stopping_patience: Annotated[Int, Field(ge=1)] | None = None
    """Stop after this many evaluations without improvement of `metric_for_best`."""

    stop_above_loss: Annotated[Number, Field(gt=0)] | None = None
    """Stop a diverging run: after `stop_above_loss_steps` steps in a row with a larger training loss."""

    stop_above_loss_steps: Annotated[Int, Field(ge=1)] = 3
    """Steps in a row for `stop_above_loss`."""

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

    resume: OutputPath = "auto"
    """`auto`: resume from the newest valid checkpoint in `output_dir`; `never`; or the path of a checkpoint."""

    allow_changes: Annotated[
        tuple[
            Literal[
                "model",
                "adapter",
                "tokenizer",
                "template",
                "processor",
                "train_data",
                "eval_data",
                "rewards",
                "teacher",
            ],
            ...,
        ],
        LISTED,
    ] = ()
    """Accepted differences from the checkpoint when resuming; others are errors."""
