"""Rules between keys, one function each."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halftune.config.facts.folder import COMMIT
from halftune.config.optimizers import OPTIMIZERS, SCHEDULES
from halftune.config.rules.rule import Context, Violation, rule
from halftune.config.run import RunConfig
from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.config.sections.training import FsdpSection
from halftune.core.optional import extra_line, version_of


@rule("config.no_effect", "distributed.num_machines", "distributed.machine_rank", "distributed.main_process_ip")
def machines_know_each_other(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options for several machines have no effect with one."""
    asked = run.distributed
    if asked.num_machines == 1:
        for key, given in {"machine_rank": asked.machine_rank > 0, "main_process_ip": asked.main_process_ip}.items():
            if given:
                what = "has no effect with one machine"
                yield Violation(("distributed", key), what, "set distributed.num_machines ≥ 2, or remove it")
        return
    if asked.machine_rank >= asked.num_machines:
        what = f"expected an integer from 0 to {asked.num_machines - 1}, got {asked.machine_rank}"
        yield Violation(("distributed", "machine_rank"), what, "count machines from 0", code="config.out_of_range")


@rule("config.process_count_invalid", "distributed.num_processes", "distributed.num_machines")
def processes_divide_by_machines(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Every machine runs the same number of processes."""
    asked = run.distributed
    if asked.num_processes is not None and asked.num_processes % asked.num_machines:
        what = f"{asked.num_processes} processes are not divisible by {asked.num_machines} machines"
        remedy = "set the total number of processes on all machines"
        yield Violation(("distributed", "num_processes"), what, remedy)


@rule("config.no_effect", "distributed.strategy", "distributed.fsdp")
def shards_are_fsdps(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options of fsdp2 have no effect with another strategy."""
    asked = run.distributed
    if asked.strategy == "ddp" and asked.fsdp != FsdpSection():
        yield Violation(
            ("distributed", "fsdp"), f"has no effect with strategy: {asked.strategy}", "set strategy: fsdp2"
        )


EVAL_LOSS = "eval_loss"
FLASH = ("fa2", "fa3", "fa4")
OPTIMIZER_OPTIONS = tuple(dict.fromkeys(key for spec in OPTIMIZERS.values() for key in spec.options))
SCHEDULE_OPTIONS = tuple(dict.fromkeys(key for spec in SCHEDULES.values() for key in spec.options))


@rule("config.keys_conflict", "precision.compute", "attention.backend")
def flash_needs_half(run: RunConfig, context: Context) -> Iterator[Violation]:
    """FlashAttention has no fp32 kernels."""
    backend = run.attention.backend
    if run.precision.compute == "fp32" and backend in FLASH:
        yield Violation(
            ("attention", "backend"),
            f"{backend} does not support precision: fp32 (bf16 and fp16 only)",
            "use precision: bf16 or fp16, attention: sdpa, or auto for either",
        )


@rule("config.keys_conflict", "precision.compute", "precision.trainable")
def fp16_needs_fp32_masters(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The loss scaler cannot unscale gradients of half-precision weights."""
    if run.precision.compute == "fp16" and run.precision.trainable == "bf16":
        yield Violation(
            ("precision", "trainable"),
            "bf16 trainable weights are incompatible with compute: fp16, whose loss scaler requires fp32",
            "use trainable: auto, or compute: bf16",
        )


def _evaluates(run: RunConfig) -> bool:
    return bool(run.data.eval) or run.data.eval_split > 0


@rule(
    "config.needs_eval_data",
    "data.eval",
    "data.eval_split",
    "training.load_best",
    "training.metric_for_best",
    "training.early_stopping_patience",
    "training.eval_steps",
)
def evaluation_needs_data(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options about evaluation have no effect without evaluation data."""
    training = run.training
    if _evaluates(run):
        return
    asked = {
        "load_best": training.load_best,
        "metric_for_best": training.metric_for_best != EVAL_LOSS,
        "early_stopping_patience": training.early_stopping_patience is not None,
        "eval_steps": training.eval_steps != "epoch",
    }
    for key, given in asked.items():
        if given:
            remedy = "set data.eval to a file or data.eval_split to a share such as 0.05, or remove this key"
            yield Violation(("training", key), "requires evaluation data", remedy)


@rule("config.keys_conflict", "data.eval", "training.metric_for_best")
def evaluation_sets_have_names(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Names of evaluation sets are unique, and the metric of the best evaluation exists."""
    names: list[str] = []
    for index, source in enumerate(run.data.eval):
        if source.name is not None and source.name in names:
            first = names.index(source.name)
            what = f"{source.name} is also the name of data.eval[{first}]"
            yield Violation(("data", "eval", index, "name"), what, "use another name")
        names.append(source.name or "")
    known, asked = [EVAL_LOSS, *(f"{EVAL_LOSS}_{name}" for name in names if name)], run.training.metric_for_best
    if asked not in known and _evaluates(run):
        what = f"expected {' or '.join(known)}, got {asked}"
        remedy = "use one of them, or name a source: data.eval: [{path: …, name: …}]"
        yield Violation(("training", "metric_for_best"), what, remedy, code="config.invalid_value")


@rule("config.out_of_range", "data.eval_split", "data.eval")
def eval_split_is_share_or_count(run: RunConfig, context: Context) -> Iterator[Violation]:
    """A share below 1, or an integer number of samples."""
    split = run.data.eval_split
    if split >= 1 and not split.is_integer():
        remedy = f"write {round(split)}, or a share below 1"
        yield Violation(("data", "eval_split"), f"expected a share < 1 or an integer ≥ 1, got {split}", remedy)
    if split > 0 and run.data.eval:
        yield Violation(
            ("data", "eval_split"), "has no effect with data.eval", "keep one of them", code="config.no_effect"
        )


@rule(
    "config.out_of_range",
    "training.warmup_steps",
    "training.warmup_ratio",
    "training.max_steps",
    "training.lr_scheduler_type",
)
def warmup_ends_before_training(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Warm-up must be shorter than the run, and part of the schedule."""
    training = run.training
    if training.warmup_steps and training.max_steps is not None and training.warmup_steps >= training.max_steps:
        what = (
            f"expected less than max_steps ({training.max_steps}), got {training.warmup_steps}: warm-up would never end"
        )
        yield Violation(("training", "warmup_steps"), what, "lower it, or use warmup_ratio")
    if SCHEDULES[training.lr_scheduler_type].warmup:
        return
    usual = type(training).model_fields["warmup_ratio"].default  # every resolved.yaml writes it
    asked = {"warmup_steps": training.warmup_steps, "warmup_ratio": training.warmup_ratio not in (0, usual)}
    for key, given in asked.items():
        if given:
            what = f"has no effect with lr_scheduler_type: {training.lr_scheduler_type}"
            remedy = "remove it, or set lr_scheduler_type: constant_with_warmup"
            yield Violation(("training", key), what, remedy, code="config.no_effect")


@rule("config.out_of_range", "training.warmup_ratio", "training.lr_decay_ratio", "training.lr_scheduler_type")
def warmup_and_decay_fit_into_run(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The shares of warm-up and decay are at most all steps."""
    training = run.training
    usual = SCHEDULES[training.lr_scheduler_type].options.get("lr_decay_ratio")
    if usual is None or training.warmup_steps is not None:
        return
    decay = training.lr_decay_ratio or usual
    if training.warmup_ratio + decay > 1 + 1e-9:
        most = 1 - training.warmup_ratio
        what = f"expected at most {most:g} with warmup_ratio {training.warmup_ratio:g}, got {decay:g}"
        yield Violation(("training", "lr_decay_ratio"), what, "lower it, or training.warmup_ratio")


@rule("config.no_effect", "training.optim", *(f"training.{key}" for key in OPTIMIZER_OPTIONS))
def options_are_the_optimizers(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options of an optimizer have no effect with others."""
    for key in OPTIMIZER_OPTIONS:
        given = run.training.__dict__[key] != type(run.training).model_fields[key].default
        if given and key not in OPTIMIZERS[run.training.optim].options:
            what = f"has no effect with optim: {run.training.optim}"
            reads = next(name for name, spec in OPTIMIZERS.items() if key in spec.options)
            yield Violation(("training", key), what, f"remove it, or set optim: {reads}")


@rule("config.no_effect", "training.lr_scheduler_type", *(f"training.{key}" for key in SCHEDULE_OPTIONS))
def options_are_the_schedules(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options of a schedule have no effect with others."""
    name = run.training.lr_scheduler_type
    for key in SCHEDULE_OPTIONS:
        if getattr(run.training, key) is not None and key not in SCHEDULES[name].options:
            what = f"has no effect with lr_scheduler_type: {name}"
            reads = next(other for other, spec in SCHEDULES.items() if key in spec.options)
            yield Violation(("training", key), what, f"remove it, or set lr_scheduler_type: {reads}")


@rule("config.keys_conflict", "training.optim", "training.lr_scheduler_type", "training.adam_beta1")
def averages_have_no_schedule(run: RunConfig, context: Context) -> Iterator[Violation]:
    """An average of the weights takes the place of a falling learning rate."""
    training = run.training
    if not OPTIMIZERS[training.optim].averages:
        return
    if not training.lr_scheduler_type.startswith("constant"):
        what = f"{training.lr_scheduler_type} has no place with optim: {training.optim}"
        yield Violation(("training", "lr_scheduler_type"), what, "set it to constant_with_warmup, or to constant")
    if not training.adam_beta1:
        what = f"expected more than 0 with optim: {training.optim}"
        yield Violation(("training", "adam_beta1"), what, "use 0.9", code="config.out_of_range")


@rule("config.out_of_range", "data.train", "data.eval", "data.eval_split")
def shares_take_something(run: RunConfig, context: Context) -> Iterator[Violation]:
    """A share of the samples below one of a million takes one sample or none of each set."""
    sources = (("train", run.data.train), ("eval", run.data.eval))
    shares = {("data", name, at, "weight"): one.weight for name, all_ in sources for at, one in enumerate(all_)}
    for path, share in (shares | {("data", "eval_split"): run.data.eval_split}).items():
        if 0 < share < 1e-6:
            yield Violation(path, f"expected a share ≥ 1e-06, got {share:g}", "write a larger one")


@rule("config.out_of_range", "training.max_steps", "training.eval_steps", "data.eval", "data.eval_split")
def periods_fit_into_run(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Periodic evaluation must happen at least once."""
    training = run.training
    if training.max_steps is None or not _evaluates(run):
        return
    if isinstance(training.eval_steps, int) and training.eval_steps > training.max_steps:
        what = f"{training.eval_steps} exceeds max_steps ({training.max_steps}): there would be no evaluation"
        yield Violation(("training", "eval_steps"), what, f"use at most {training.max_steps}")


@rule("config.no_effect", "adapter")
def spread_layers_are_counted(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Layers at equal distances need their number."""
    if isinstance(run.adapter, NoAdapter) and run.adapter.spread_layers and run.adapter.train_layers is None:
        yield Violation(("adapter", "spread_layers"), "has no effect without train_layers", "set adapter.train_layers")


@rule("config.bad_target_modules", "adapter.target_modules", "adapter.target_parameters")
def target_modules_name_something(run: RunConfig, context: Context) -> Iterator[Violation]:
    """An empty list, a comma-separated string or a broken regular expression would match nothing."""
    if isinstance(run.adapter, NoAdapter):
        return
    targets, key = run.adapter.target_modules, ("adapter", "target_modules")
    if isinstance(targets, str):
        if wrong := _matches_nothing(targets):
            yield Violation(key, *wrong)
        return
    alone = isinstance(run.adapter, LoraAdapter) and run.adapter.target_parameters
    if not (targets or alone) or not all(map(str.strip, targets)):
        yield Violation(key, "empty module name", _TARGETS)


_TARGETS = "use all-linear, or a list such as [q_proj, v_proj]"


def _matches_nothing(pattern: str) -> tuple[str, str] | None:
    """What is wrong with a pattern of module names, and the remedy."""
    if "," in pattern and re.fullmatch(r"[\w.,\s-]+", pattern):
        names = ", ".join(filter(None, map(str.strip, pattern.split(","))))
        return "a string with commas matches no module", f"use a list: [{names}]"
    if pattern in ("all", "all_linear", "linear", ""):
        return f"{pattern!r} matches no module", "did you mean all-linear?"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"invalid regular expression: {error}", _TARGETS
    return None


@rule(
    "config.keys_conflict",
    "adapter.init",
    "adapter.use_dora",
    "adapter.name_or_path",
    "model.quantization",
    "method.type",
    "method.reference",
)
def init_keeps_base(run: RunConfig, context: Context) -> Iterator[Violation]:
    """PiSSA and OLoRA change the base weights, which some options need as they are."""
    adapter = run.adapter
    if not isinstance(adapter, LoraAdapter) or adapter.init == "default":
        return
    key = ("adapter", "init")
    if adapter.name_or_path is not None:
        yield Violation(key, "has no effect with adapter.name_or_path", "remove it", code="config.no_effect")
    if not adapter.reduces_base:
        return
    conflicts = {
        "use_dora: true": adapter.use_dora,
        f"model.quantization: {run.model.quantization}": run.model.quantization != "none",
        "method.reference: adapter_off": getattr(run.method, "reference", None) == "adapter_off",
    }
    for other, given in conflicts.items():
        if given:
            what = f"{adapter.init} changes the base weights and conflicts with {other}"
            yield Violation(key, what, "use init: default or gaussian")


@rule(
    "config.keys_conflict",
    "adapter.target_parameters",
    "adapter.dropout",
    "adapter.use_dora",
    "adapter.init",
    "model.quantization",
    "model.quantize_experts",
)
def experts_fit(run: RunConfig, context: Context) -> Iterator[Violation]:
    """LoRA on experts excludes what works on a layer's inputs or needs another base."""
    adapter = run.adapter
    if run.model.quantize_experts and run.model.quantization == "none":
        what, remedy = "has no effect without model.quantization", "set model.quantization: nf4, or remove it"
        yield Violation(("model", "quantize_experts"), what, remedy, code="config.no_effect")
    if not isinstance(adapter, LoraAdapter) or not adapter.target_parameters:
        return
    conflicts = {
        "adapter.dropout above 0": adapter.dropout > 0,
        "adapter.use_dora: true": adapter.use_dora,
        f"adapter.init: {adapter.init}": adapter.reduces_base,
    }
    for other, given in conflicts.items():
        if given:
            yield Violation(("adapter", "target_parameters"), f"conflicts with {other}", "remove one of the two")


@rule("config.no_effect", "data.packing", "method.type")
def packing_split_needs_packing(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Splitting requires packing, and examples with one segment."""
    if run.data.packing.split and run.method.segments > 1:
        what = f"would split examples of method: {run.method.type}, which have {run.method.segments} segments each"
        yield Violation(("data", "packing", "split"), what, "remove it", code="config.keys_conflict")
    if run.data.packing.split and run.data.packing.enabled is False:
        yield Violation(
            ("data", "packing", "split"), "has no effect without packing", "set packing: {enabled: true, …}"
        )


@rule(
    "config.keys_conflict",
    "training.tokens_per_batch",
    "training.per_device_train_batch_size",
    "data.max_length",
    "method.type",
)
def batches_have_one_size(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The batch size is in rows or in tokens, and the longest sample fits."""
    training, key = run.training, ("training", "tokens_per_batch")
    if training.tokens_per_batch is None:
        return
    if training.per_device_train_batch_size is not None:
        what = "conflicts with per_device_train_batch_size: both set the batch size"
        yield Violation(key, what, "remove one of them")
    longest = run.method.segments * run.data.max_length
    if training.tokens_per_batch < longest:
        what = f"{training.tokens_per_batch:,} tokens are fewer than a sample of max_length ({run.data.max_length:,})"
        yield Violation(key, what, f"use at least {longest}, or reduce data.max_length", code="config.out_of_range")


@rule("model.revision_not_pinned", "model")
def remote_code_is_pinned(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Remote code from the hub must be pinned to a commit."""
    model = run.model
    if model.trust_remote_code and context.is_hub_id(model.name_or_path):
        remedy = "set model.revision to the commit (40 hexadecimal digits) whose code you reviewed"
        if model.revision is None:
            yield Violation(("model", "trust_remote_code"), "remote code is not pinned to a revision", remedy)
        elif not COMMIT.fullmatch(model.revision):
            what = f"{model.revision} may be a branch or tag; trust_remote_code requires a commit"
            yield Violation(("model", "revision"), what, remedy)
    if model.revision is not None and not context.is_hub_id(model.name_or_path):
        what = "has no effect: the model is not from the hub"
        yield Violation(("model", "revision"), what, "remove it", code="config.no_effect")


@rule("core.package_missing", "logging.report_to")
def loggers_are_installed(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Packages of loggers are installed."""
    for index, name in enumerate(run.logging.report_to):
        lighter = "mlflow-skinny" if name == "mlflow" else name
        if context.look_at_files and version_of(name) is None and version_of(lighter) is None:
            remedy = f"run {extra_line(name)}, or remove it"
            yield Violation(("logging", "report_to", index), f"{name} is not installed", remedy)
