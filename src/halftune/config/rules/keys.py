"""Rules between keys, one small function each: what no type can say, and a user would otherwise learn too late."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from halftune.config.facts.folder import COMMIT
from halftune.config.rules.distributed import DISTRIBUTED_RULES
from halftune.config.rules.files import FILE_RULES
from halftune.config.rules.finding import Context, Finding
from halftune.config.run import RunConfig
from halftune.config.sections.adapter import LoraAdapter
from halftune.config.sections.method import PretrainMethod
from halftune.config.shape import Path, related
from halftune.core.optional import extra_line, version_of

Rule = Callable[[RunConfig, Context], Iterator[Finding]]
FLASH = ("fa2", "fa3", "fa4")
CONVERSATION_FORMATS = ("alpaca", "sharegpt", "messages", "prompt_completion")


def flash_needs_half(run: RunConfig, context: Context) -> Iterator[Finding]:
    """FlashAttention has no fp32 kernels."""
    backend = run.attention.backend
    if run.precision.compute == "fp32" and backend in FLASH:
        yield Finding(
            ("attention", "backend"),
            f"{backend} cannot run with precision: fp32, FlashAttention computes in bf16 and fp16 only",
            "precision: bf16 (or fp16); or attention: sdpa; or auto for either",
        )


def fp16_needs_fp32_masters(run: RunConfig, context: Context) -> Iterator[Finding]:
    """The loss scaler cannot unscale gradients of half-precision weights."""
    if run.precision.compute == "fp16" and run.precision.trainable == "bf16":
        yield Finding(
            ("precision", "trainable"),
            "bf16 weights cannot be trained with compute: fp16, its loss scaling needs fp32 weights",
            "trainable: auto; or compute: bf16",
        )


def _evaluates(run: RunConfig) -> bool:
    return bool(run.data.eval) or run.data.eval_split > 0


def evaluation_needs_data(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Options about evaluation have no effect without evaluation data."""
    training = run.training
    if _evaluates(run):
        return
    asked = {
        "load_best": training.load_best,
        "early_stopping_patience": training.early_stopping_patience is not None,
        "eval_steps": training.eval_steps != "epoch",
    }
    for key, given in asked.items():
        if given:
            remedy = "set data.eval to a file or data.eval_split to a share such as 0.05, or remove this key"
            yield Finding(("training", key), "needs evaluation data, and there is none", remedy)


def eval_split_is_share_or_count(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Below 1 a share, from 1 on a number of samples."""
    split = run.data.eval_split
    if split >= 1 and not split.is_integer():
        remedy = f"write {round(split)}, or a share below 1"
        yield Finding(("data", "eval_split"), f"{split} is neither a share (below 1) nor a number of samples", remedy)
    if split > 0 and run.data.eval:
        yield Finding(("data", "eval_split"), "has no effect beside data.eval", "keep one of them")


def warmup_ends_before_training(run: RunConfig, context: Context) -> Iterator[Finding]:
    """A warm-up as long as the run never reaches the learning rate."""
    training = run.training
    if training.warmup_steps and training.max_steps is not None and training.warmup_steps >= training.max_steps:
        what = f"{training.warmup_steps} is not below max_steps ({training.max_steps}): warm-up would never end"
        yield Finding(("training", "warmup_steps"), what, "lower it, or use warmup_ratio")
    if training.warmup_steps and training.lr_scheduler_type == "constant":
        remedy = "lr_scheduler_type: constant_with_warmup"
        yield Finding(("training", "warmup_steps"), "has no effect with lr_scheduler_type: constant", remedy)


def betas_are_adams(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Other optimizers have no such numbers."""
    if run.training.optim in ("adam", "adamw"):
        return
    for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if run.training.__dict__[key] != type(run.training).model_fields[key].default:
            what = f"has no effect with optim: {run.training.optim}"
            yield Finding(("training", key), what, "remove it, or optim: adamw")


def periods_fit_into_run(run: RunConfig, context: Context) -> Iterator[Finding]:
    """What should happen every n steps must happen at least once."""
    training = run.training
    if training.max_steps is None or not _evaluates(run):
        return
    if isinstance(training.eval_steps, int) and training.eval_steps > training.max_steps:
        what = f"{training.eval_steps} is above max_steps ({training.max_steps}): there would be no evaluation"
        yield Finding(("training", "eval_steps"), what, f"at most {training.max_steps}")


def target_modules_name_something(run: RunConfig, context: Context) -> Iterator[Finding]:
    """An empty list, a comma-separated string or a broken regular expression would match nothing."""
    if not isinstance(run.adapter, LoraAdapter):
        return
    targets, key = run.adapter.target_modules, ("adapter", "target_modules")
    if isinstance(targets, tuple):
        if not targets or not all(name.strip() for name in targets):
            yield Finding(key, "names no module", "all-linear, or a list such as [q_proj, v_proj]")
    elif "," in targets and re.fullmatch(r"[\w.,\s-]+", targets):
        names = ", ".join(name.strip() for name in targets.split(",") if name.strip())
        yield Finding(key, "is one text with commas, which matches no module", f"write a list: [{names}]")
    elif targets in ("all", "all_linear", "linear", ""):
        yield Finding(key, f"{targets!r} matches no module", "did you mean all-linear?")
    else:
        try:
            re.compile(targets)
        except re.error as error:
            yield Finding(key, f"is no regular expression: {error}", "all-linear, or a list such as [q_proj, v_proj]")


def method_fits_formats(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Pre-training reads text; fine-tuning reads conversations."""
    pretrain = isinstance(run.method, PretrainMethod)
    for part in ("train", "eval"):
        for index, source in enumerate(getattr(run.data, part)):
            if not pretrain and source.format == "text":
                what = "plain text has no answers to train on with method: sft"
                yield Finding(("data", part, index, "format"), what, "method: pretrain")
    if pretrain and run.data.system is not None:
        yield Finding(("data", "system"), "has no effect with method: pretrain", "remove it, or method: sft")


def packing_split_needs_packing(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Nothing is cut where nothing is packed."""
    if run.data.packing.split and run.data.packing.enabled is False:
        yield Finding(("data", "packing", "split"), "has no effect without packing", "packing: {enabled: true, …}")


def batches_have_one_size(run: RunConfig, context: Context) -> Iterator[Finding]:
    """A batch is so many rows or so many tokens, and the longest sample fits into it."""
    training, key = run.training, ("training", "tokens_per_batch")
    if training.tokens_per_batch is None:
        return
    if training.per_device_train_batch_size is not None:
        what = "and per_device_train_batch_size are both set, and each says how large a batch is"
        yield Finding(key, what, "remove one of them")
    if training.tokens_per_batch < run.data.max_length:
        what = f"{training.tokens_per_batch:,} tokens do not hold a sample of max_length ({run.data.max_length:,})"
        yield Finding(key, what, f"at least {run.data.max_length}, or a smaller data.max_length")


def remote_code_is_pinned(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Code from the hub must not change between two runs."""
    model = run.model
    if model.trust_remote_code and context.is_hub_id(model.name_or_path):
        remedy = "set model.revision to the commit (40 hexadecimal digits) whose code you have read"
        if model.revision is None:
            yield Finding(("model", "trust_remote_code"), "runs code that may change, without a revision", remedy)
        elif not COMMIT.fullmatch(model.revision):
            what = f"{model.revision} can be a branch or a tag, whose code may change under trust_remote_code"
            yield Finding(("model", "revision"), what, remedy)
    if model.revision is not None and not context.is_hub_id(model.name_or_path):
        what = "has no effect: the model does not come from the hub"
        yield Finding(("model", "revision"), what, "remove it")


def loggers_are_installed(run: RunConfig, context: Context) -> Iterator[Finding]:
    """Better now than after the model has been loaded."""
    for index, name in enumerate(run.logging.report_to):
        if context.look_at_files and version_of(name) is None:
            remedy = f"{extra_line(name)}, or remove it"
            yield Finding(("logging", "report_to", index), f"{name} is not installed", remedy)


@dataclass(frozen=True)
class Row:
    """One rule and the keys that it reads: it is left out where one of them is wrong already."""

    rule: Rule
    reads: tuple[Path, ...]


def _row(rule: Rule, *keys: str) -> Row:
    return Row(rule, tuple(tuple(key.split(".")) for key in keys))


RULES: tuple[Row, ...] = (
    _row(flash_needs_half, "precision.compute", "attention.backend"),
    _row(fp16_needs_fp32_masters, "precision.compute", "precision.trainable"),
    _row(
        evaluation_needs_data,
        "data.eval",
        "data.eval_split",
        "training.load_best",
        "training.early_stopping_patience",
        "training.eval_steps",
    ),
    _row(eval_split_is_share_or_count, "data.eval_split", "data.eval"),
    _row(warmup_ends_before_training, "training.warmup_steps", "training.max_steps", "training.lr_scheduler_type"),
    _row(betas_are_adams, "training.optim", "training.adam_beta1", "training.adam_beta2", "training.adam_epsilon"),
    _row(periods_fit_into_run, "training.max_steps", "training.eval_steps", "data.eval", "data.eval_split"),
    _row(target_modules_name_something, "adapter.target_modules"),
    _row(method_fits_formats, "method.type", "data.train", "data.eval", "data.system"),
    _row(packing_split_needs_packing, "data.packing"),
    _row(
        batches_have_one_size,
        "training.tokens_per_batch",
        "training.per_device_train_batch_size",
        "data.max_length",
    ),
    _row(remote_code_is_pinned, "model"),
    _row(loggers_are_installed, "logging.report_to"),
    *(_row(rule, *keys) for rule, *keys in DISTRIBUTED_RULES),
    *(_row(rule, *keys) for rule, keys in FILE_RULES),
)


def check(run: RunConfig, context: Context, broken: set[Path]) -> list[Finding]:
    """What every rule finds. A rule is left out where a key that it reads is in ``broken``; one entry of a list being
    broken does not keep it from looking at the others."""
    findings: list[Finding] = []
    for row in RULES:
        if not any(
            related(read, path) and (len(path) <= len(read) or _in_section(path))
            for read in row.reads
            for path in broken
        ):
            findings += row.rule(run, context)
    return [finding for finding in findings if not any(related(finding.key, path) for path in broken)]


def _in_section(path: Path) -> bool:
    return not any(isinstance(part, int) for part in path)
